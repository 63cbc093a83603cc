"""A model's half-precision parts computed in float32, so that a reference does not round where the model does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx

from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.precision.graph_dtypes import HALF_TYPES

# Attributes that hold an element type.
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})


ROUNDED_TYPES = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16})


_CAST_SUFFIX = "__as_float32"


def upcast_to_float32(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the graph in which all half-precision work is done in float32.

    Inputs keep their dtype (a Cast follows them), but bfloat16 becomes float32, as outputs do.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for function in copy.functions:
        _upcast_nodes(function.node)
    _upcast_graph(copy.graph)
    casts = []
    for value in copy.graph.input:
        if value.type.tensor_type.elem_type in HALF_TYPES:
            _rename_uses(copy.graph, value.name, value.name + _CAST_SUFFIX)
            casts.append(
                onnx.helper.make_node("Cast", [value.name], [value.name + _CAST_SUFFIX], to=onnx.TensorProto.FLOAT)
            )
            if value.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16:
                # ONNX Runtime takes no NumPy array of bfloat16.
                value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    nodes = [*casts, *copy.graph.node]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    for value in copy.graph.output:
        if value.type.tensor_type.elem_type in HALF_TYPES:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return copy


def with_exact_activations(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph whose MatMulNBits keep their activations as they are; itself where none may round them.

    `accuracy_level` is the least accuracy that a runtime must keep, no definition: with 4 ONNX Runtime rounds
    activations to 8 bits, which is off by half a percent.
    """

    def rounded(node: onnx.NodeProto) -> bool:
        return node.op_type == "MatMulNBits" and any(one.name == "accuracy_level" and one.i for one in node.attribute)

    if not any(map(rounded, proto.graph.node)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in filter(rounded, copy.graph.node):
        kept = [one for one in node.attribute if one.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
    return copy


def without_bfloat16(array: np.ndarray) -> np.ndarray:
    """Return an array in float32 where it is bfloat16, which ONNX Runtime's CPU kernels lack."""
    return array.astype(np.float32) if array.dtype == numpy_dtype("bfloat16") else array


def _upcast_graph(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for tensor in graph.initializer:
        _upcast_tensor(tensor)
    _upcast_nodes(graph.node)


def _upcast_nodes(nodes: Iterator[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _upcast_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _upcast_graph(attribute.g)
                for value in attribute.g.output:
                    if value.type.tensor_type.elem_type in HALF_TYPES:
                        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            elif attribute.name in _TYPE_ATTRIBUTES and attribute.i in HALF_TYPES:
                attribute.i = onnx.TensorProto.FLOAT


def _upcast_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in HALF_TYPES:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def _rename_uses(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename_uses(attribute.g, old, new)
    for value in graph.output:
        if value.name == old:
            graph.node.append(onnx.helper.make_node("Identity", [new], [old]))
