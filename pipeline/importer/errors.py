"""Build the errors of the importer: every message names operator, domain, version, node, inputs and the way on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import onnx
from onnx import helper
from tvm.relax.frontend.onnx import onnx_frontend

from models import OnnxModel
from pipeline.errors import ImportFailedError
from pipeline.importer.converters import CONVERTERS
from pipeline.importer.normalise import NormalisedGraph

_CONVERTED_ELSEWHERE = frozenset({"If"})


def check_operators(model: OnnxModel, graph: NormalisedGraph) -> None:
    """Raise if the graph holds an operator that nothing converts; the message lists all of them at once.

    Raises
    ------
    ImportFailedError
        Names the first such node in full, then every such operator with its count.
    """
    unsupported = [node for node in list_nodes(graph.proto.graph) if not _is_supported(node)]
    if not unsupported:
        return
    first = unsupported[0]
    counts = Counter(_operator(node, graph) for node in unsupported)
    listed = ", ".join(f"{operator} x{count}" for operator, count in sorted(counts.items()))
    msg = (
        f"model {model.name!r}: no converter for {describe_node(graph, first)}.\n"
        f"Unsupported operators in this model: {listed}.\n"
        f"Export the model with standard ONNX operators (domain ai.onnx), or add a converter to "
        f"pipeline/importer/converters."
    )
    raise ImportFailedError(msg)


def conversion_failed(
    model: OnnxModel, graph: NormalisedGraph, node: onnx.NodeProto, cause: Exception
) -> ImportFailedError:
    """Return the error of a node whose converter raised `cause`."""
    reason = str(cause).strip().splitlines()
    msg = (
        f"model {model.name!r}: cannot convert {describe_node(graph, node)}.\n"
        f"Cause: {type(cause).__name__}: {reason[-1] if reason else 'no message'}\n"
        f"If a size in the inputs above is symbolic, give it a number (--shape); otherwise export the model with "
        f"another opset or exporter."
    )
    return ImportFailedError(msg)


def describe_node(graph: NormalisedGraph, node: onnx.NodeProto) -> str:
    """Return operator, domain, version, name and inputs of a node, e.g. for an error message."""
    types = _value_types(graph.proto.graph)
    inputs = ", ".join(f"{name or '(left out)'}: {types.get(name, 'unknown')}" for name in node.input)
    names = ", ".join(graph.sources.get(node.name, (node.name,)))
    return f"{_operator(node, graph)}, node {names!r}, inputs ({inputs})"


def _operator(node: onnx.NodeProto, graph: NormalisedGraph) -> str:
    domain = node.domain or "ai.onnx"
    versions = {item.domain or "ai.onnx": item.version for item in graph.proto.opset_import}
    return f"{domain}.{node.op_type} (opset {versions.get(domain, 'not imported')})"


def _is_supported(node: onnx.NodeProto) -> bool:
    domain = "" if node.domain == "ai.onnx" else node.domain
    if (domain, node.op_type) in CONVERTERS:
        return True
    return domain == "" and (node.op_type in _CONVERTED_ELSEWHERE or _stock_converter(node.op_type))


# Contrib operators that TVM's one table, which goes by name alone, has too; it must not serve them in another domain.
_STOCK_CONTRIB = frozenset({"BiasGelu", "EmbedLayerNormalization", "FastGelu", "SkipLayerNormalization"})


def _stock_converter(op_type: str) -> bool:
    return op_type in onnx_frontend._get_convert_map() and op_type not in _STOCK_CONTRIB


def list_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of the graphs inside them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                yield from list_nodes(subgraph)


def element_types(graph: onnx.GraphProto) -> Mapping[str, int]:
    """Return value name -> ONNX element type, of the values whose type is known."""
    types = {
        info.name: int(info.type.tensor_type.elem_type) for info in (*graph.value_info, *graph.input, *graph.output)
    }
    types.update((tensor.name, int(tensor.data_type)) for tensor in graph.initializer)
    return types


def _value_types(graph: onnx.GraphProto) -> Mapping[str, str]:
    types = {info.name: _type_text(info.type) for info in (*graph.value_info, *graph.input, *graph.output)}
    for tensor in graph.initializer:
        types[tensor.name] = f"{_dtype(tensor.data_type)}{_shape(list(tensor.dims))} constant"
    return types


def _type_text(value_type: onnx.TypeProto) -> str:
    kind = value_type.WhichOneof("value")
    if kind != "tensor_type":
        return str(kind or "unknown")
    tensor = value_type.tensor_type
    if not tensor.HasField("shape"):
        return f"{_dtype(tensor.elem_type)}[unknown rank]"
    return _dtype(tensor.elem_type) + _shape(
        [axis.dim_value if axis.HasField("dim_value") else axis.dim_param or "?" for axis in tensor.shape.dim]
    )


def _dtype(elem_type: int) -> str:
    return str(helper.tensor_dtype_to_np_dtype(elem_type)) if elem_type else "unknown"


def _shape(sizes: list[int] | list[int | str]) -> str:
    return f"[{'x'.join(str(size) for size in sizes)}]"
