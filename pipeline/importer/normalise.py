"""Normalise an ONNX graph before it is converted: the stage that removes most causes of failed imports at one place.

In order, each step from onnx-ir or onnxscript:

1. model-local functions are inlined;
2. shapes and dtypes are inferred, with the values of shape tensors propagated;
3. constant expressions are folded: `Shape` of a static tensor and all arithmetic on it, position ids, constant masks;
4. identities are dropped, then nodes and initializers that nothing reads;
5. every `Constant` node, whichever attribute it uses, becomes an initializer;
6. every node gets a unique name, and `sources` says which nodes of the user's graph it stands for.

No operator is fused or replaced for speed here: that is the work of `pipeline.passes`, on Relax.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as ir_passes
from onnxscript import optimizer

from relaxtune.pipeline.importer.quiet import quiet_libraries

_LOG = logging.getLogger(__name__)

# A folded constant may be as large as a 1024 x 1024 mask; weights beyond it are folded later by Relax, if at all.
FOLD_LIMIT_ELEMENTS = 1 << 20
# Twice, because the shapes found in a first round make more constants in the second.
_FOLD_ROUNDS = 2

_SOURCE_KEY = "relaxtune.source"
_MAIN_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, eq=False)
class NormalisedGraph:
    """An ONNX model ready for conversion."""

    proto: onnx.ModelProto  # The model without functions, `Constant` nodes, unnamed or equally named nodes.
    # Node name in `proto` -> names of the nodes of the user's graph it stands for.
    sources: Mapping[str, tuple[str, ...]]
    opset: int  # Version of the main ONNX operator set.
    # Nodes of the main graph as given and as left.
    nodes_before: int
    nodes_after: int


class _StepFailedError(Exception):
    """A step of a library failed on a graph; the message is the step's name."""


def normalise(proto: onnx.ModelProto, data_dir: Path | None = None) -> NormalisedGraph:
    """Return `proto` with functions inlined, constants folded and unique node names; `proto` is not changed.

    Weights that are references into `data_dir` stay references; one small enough to be folded is read. A step that
    makes a graph simpler and fails on this one is logged and left out.
    """
    left_out: set[str] = set()
    while True:
        try:
            with quiet_libraries():
                return _normalised(proto, data_dir, left_out)
        except _StepFailedError as failed:
            left_out.add(str(failed))
            _LOG.warning(
                "the graph is imported without the step %r, which fails on it; results stay right", str(failed)
            )
            _LOG.debug("%s", failed.__cause__)


def _normalised(proto: onnx.ModelProto, data_dir: Path | None, left_out: Collection[str]) -> NormalisedGraph:
    model = ir.serde.deserialize_model(proto)
    if data_dir is not None:
        ir.external_data.set_base_dir(model.graph, data_dir)
    nodes_before = len(model.graph)
    writers = _mark_sources(model)
    ir_passes.InlinePass()(model)
    _name_everything(model)
    for _ in range(_FOLD_ROUNDS):
        for name, step in _SIMPLIFY.items():
            if name in left_out:
                continue
            try:
                step(model)
            except MemoryError:
                raise
            except Exception as e:  # libraries raise every kind of exception
                # The step may have left the graph half-changed.
                raise _StepFailedError(name) from e
    ir_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _name_everything(model)
    ir_passes.TopologicalSortPass()(model)
    sources = _sources(model, writers)
    return NormalisedGraph(
        proto=ir.serde.serialize_model(model),
        sources=sources,
        opset=next((model.opset_imports[domain] for domain in _MAIN_DOMAINS if domain in model.opset_imports), 1),
        nodes_before=nodes_before,
        nodes_after=len(model.graph),
    )


def _fold_constants(model: ir.Model) -> object:
    return optimizer.fold_constants_ir(
        model,
        onnx_shape_inference=True,
        input_size_limit=FOLD_LIMIT_ELEMENTS,
        output_size_limit=FOLD_LIMIT_ELEMENTS,
        should_fold=_should_fold,
    )


def node_label(name: str | None, outputs: list[str], op_type: str) -> str:
    """Return how a node is called in messages and maps: its name, or for an unnamed node what it writes."""
    return name or (f"{op_type}->{outputs[0]}" if outputs and outputs[0] else op_type)


def _should_fold(node: ir.Node) -> bool | None:
    """Fold what the optimizer leaves for the sake of file size; None is its own judgement."""
    return True if node.op_type == "ConstantOfShape" and node.domain in _MAIN_DOMAINS else None


# Passes that make a graph simpler, in order; a graph is right without any of them.
_SIMPLIFY: dict[str, Callable[[ir.Model], object]] = {
    "infer shapes": ir_passes.ShapeInferencePass(check_type=False, strict_mode=False),
    "fold constants": _fold_constants,
    "drop identities": ir_passes.IdentityEliminationPass(),
    "drop what is not read": ir_passes.RemoveUnusedNodesPass(),
}


def _label(node: ir.Node) -> str:
    return node_label(node.name, [output.name or "" for output in node.outputs], node.op_type)


def _mark_sources(model: ir.Model) -> dict[str, str]:
    """Write each node's own name into its metadata, which inlining hands down; return value name -> node name."""
    writers: dict[str, str] = {}
    for node in model.graph.all_nodes():
        label = _label(node)
        node.metadata_props[_SOURCE_KEY] = label
        for output in node.outputs:
            if output.name:
                writers[output.name] = label
    return writers


def _sources(model: ir.Model, writers: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return for each node the user's node: by its mark, else (a folding step replaced it) by the value it writes."""
    sources: dict[str, tuple[str, ...]] = {}
    for node in model.graph.all_nodes():
        mark = node.metadata_props.get(_SOURCE_KEY)
        written = [writers[output.name] for output in node.outputs if output.name in writers]
        names = [mark] if mark else written
        sources[node.name or ""] = tuple(dict.fromkeys(names)) or (_label(node),)
    return sources


def _name_everything(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        if not node.name:
            node.name = _label(node)
    ir_passes.NameFixPass()(model)
