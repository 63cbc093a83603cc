"""`import_model`: from an `OnnxModel` to an `ImportedGraph`."""

from __future__ import annotations

import logging
from dataclasses import replace

import tvm
from tvm import relax

from relaxtune.models import OnnxModel, TensorSpec
from relaxtune.pipeline.importer.errors import check_operators
from relaxtune.pipeline.importer.frontend import NodeByNodeImporter, identifier
from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.importer.names import name_bindings, name_sizes
from relaxtune.pipeline.importer.normalise import normalise
from relaxtune.pipeline.importer.ordered_sizes import order_sizes
from relaxtune.pipeline.importer.quiet import quiet_libraries

_LOG = logging.getLogger(__name__)


def import_model(model: OnnxModel) -> ImportedGraph:
    """Return the model as a Relax module with its signature and the way back to its ONNX nodes.

    Raises
    ------
    ImportFailedError
        An operator has no converter (all of them are listed), or a converter failed on a node.
    """
    order_sizes()
    graph = normalise(model.proto, model.data_dir)
    _LOG.info("%s: %d ONNX nodes, %d after normalisation", model.name, graph.nodes_before, graph.nodes_after)
    check_operators(model, graph)
    with quiet_libraries():
        frontend = NodeByNodeImporter(model, graph)
        mod = frontend.from_onnx(graph.proto.graph, graph.opset)
    hints = {name: identifier(name) for name in graph.sources}
    main, nodes = name_bindings(mod["main"], frontend.marks, hints)
    mod.update_func(mod.get_global_var("main"), name_sizes(main))
    source_map = {
        binding: tuple(dict.fromkeys(source for name in names for source in graph.sources[name]))
        for binding, names in nodes.items()
    }
    return ImportedGraph(
        name=model.name,
        model=model,
        mod=tvm.relax.transform.Normalize()(mod),
        inputs=model.inputs,
        outputs=_outputs(model, main),
        source_map=source_map,
        source_sha256=model.sha256,
    )


def _outputs(model: OnnxModel, main: relax.Function) -> tuple[TensorSpec, ...]:
    """Return the outputs as they are computed, where a file states another rank or another size."""
    types = list(main.ret_ty.fields) if isinstance(main.ret_ty, relax.TupleType) else [main.ret_ty]
    outputs = []
    for spec, result in zip(model.outputs, types, strict=True):
        sizes = result.shape.values if isinstance(result.shape, relax.ShapeExpr) else [None] * int(result.ndim)
        shape = tuple(
            int(size) if isinstance(size, tvm.tirx.IntImm) else f"{spec.name}_{axis}" for axis, size in enumerate(sizes)
        )
        numbers = ((a, b) for a, b in zip(spec.shape, shape, strict=False) if isinstance(a, int) and isinstance(b, int))
        right = len(shape) == len(spec.shape) and all(a == b for a, b in numbers)
        outputs.append(spec if right else replace(spec, shape=shape))
    return tuple(outputs)
