"""Build the errors of the importer: every message names operator, domain, version, node, inputs and the way on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.models.onnx_model import list_graphs
from relaxtune.models.spec import shape_text
from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer.nearest import nearest_supported, supported_operators
from relaxtune.pipeline.importer.normalise import NormalisedGraph
from relaxtune.polynomials import read_size

# The notation of TVM's expressions and of Python's values.
_NOTATION = re.compile(r"\b[TRI]\.\w|metadata|Metadata|<class|object at 0x|argument must be|NoneType|\w+\(\[")
_AXIS_MAX = 40


def check_operators(model: OnnxModel, graph: NormalisedGraph) -> None:
    """Raise if the graph holds an operator that nothing converts; the message lists all of them at once.

    Raises
    ------
    ImportFailedError
        Names the first such node in full, then every such operator with its count.
    """
    unsupported = [node for node in list_nodes(graph.proto.graph) if not has_converter(node)]
    if not unsupported:
        return
    classical = sorted({node.op_type for node in unsupported if node.domain == "ai.onnx.ml"})
    if classical:
        raise ImportFailedError(
            f"model {model.name!r} computes with {', '.join(classical)} of ai.onnx.ml (decision trees and the like), "
            "which is not supported; run it in ONNX Runtime, and compile the models around it"
        )
    first = unsupported[0]
    counts = Counter(_operator(node, graph) for node in unsupported)
    listed = ", ".join(f"{operator} x{count}" for operator, count in sorted(counts.items()))
    raise ImportFailedError(
        f"model {model.name!r}: no converter for {describe_node(graph, first)}.\n"
        f"Nearest supported: {nearest_supported(first, 'no converter')}.\n"
        f"Unsupported operators in this model: {listed}; `relaxtune inspect` lists their nodes.\n"
        f"Export the model with standard ONNX operators (domain ai.onnx), or add a converter to "
        f"pipeline/importer/converters."
    )


def conversion_failed(
    model: OnnxModel, graph: NormalisedGraph, node: onnx.NodeProto, cause: Exception, unknown: Sequence[str]
) -> ImportFailedError:
    """Return the error of a node whose converter raised `cause`; the sizes of the inputs `unknown` are not known."""
    msg = (
        f"model {model.name!r}: cannot convert {describe_node(graph, node)}.\n"
        f"Cause: {reason_of(cause, unknown)}\n"
        f"If a size in the inputs above is symbolic, give it a number (--shape); otherwise export the model with "
        f"another opset or exporter."
    )
    return ImportFailedError(msg)


def describe_node(graph: NormalisedGraph, node: onnx.NodeProto) -> str:
    """Return operator, domain, version, name and inputs of a node, e.g. for an error message."""
    types = value_types(graph.proto.graph)
    inputs = ", ".join(f"{name or '(left out)'}: {types.get(name, 'unknown')}" for name in node.input)
    names = ", ".join(graph.sources.get(node.name, (node.name,)))
    return f"{_operator(node, graph)}, node {names!r}, inputs ({inputs})"


def _operator(node: onnx.NodeProto, graph: NormalisedGraph) -> str:
    domain, version = operator_version(node, graph)
    return f"{domain}.{node.op_type} (opset {'not imported' if version is None else version})"


def has_converter(node: onnx.NodeProto) -> bool:
    """Return whether there is a converter for a node's operator, ours or TVM's."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return (domain, node.op_type) in supported_operators()


def operator_version(node: onnx.NodeProto, graph: NormalisedGraph) -> tuple[str, int | None]:
    """Return a node's domain, `ai.onnx` for the main one, and the version of it that the model imports."""
    domain = node.domain or "ai.onnx"
    versions = {item.domain or "ai.onnx": int(item.version) for item in graph.proto.opset_import}
    return domain, versions.get(domain)


def reason_of(cause: BaseException, unknown: Sequence[str] = ()) -> str:
    """Return an exception on one line, or whose sizes are not known."""
    if unknown:
        return f"the sizes of {', '.join(unknown)} are not known; expected sizes that follow from the inputs' axes"
    lines = str(cause).strip().splitlines()
    # A slip inside of a converter says nothing, nor do types of TVM.
    clear = (
        isinstance(cause, ValueError | TypeError | NotImplementedError) and lines and not _NOTATION.search(lines[-1])
    )
    return lines[-1] if clear else "the converter has no case for inputs of these types and sizes"


def list_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of the graphs inside them."""
    return (node for part in list_graphs(graph) for node in part.node)


def element_types(graph: onnx.GraphProto) -> Mapping[str, int]:
    """Return value name -> ONNX element type, of the values whose type is known."""
    types = {
        info.name: int(info.type.tensor_type.elem_type) for info in (*graph.value_info, *graph.input, *graph.output)
    }
    types.update((tensor.name, int(tensor.data_type)) for tensor in graph.initializer)
    return types


def value_types(graph: onnx.GraphProto) -> Mapping[str, str]:
    """Return value name -> its type as text, such as `float32[1x128]`."""
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
        [axis.dim_value if axis.HasField("dim_value") else _axis_text(axis.dim_param) for axis in tensor.shape.dim]
    )


def _axis_text(name: str) -> str:
    """Return the name of an axis, or a short sum of names; `?` for what onnx made up."""
    short = len(name) < _AXIS_MAX and read_size(name) is not None
    return "?" if not short or re.match(r"unk__\d", name) else name


def _dtype(elem_type: int) -> str:
    return str(helper.tensor_dtype_to_np_dtype(elem_type)) if elem_type else "unknown"


def _shape(sizes: list[int] | list[int | str]) -> str:
    return f"[{shape_text(sizes)}]"
