"""Integer matmuls and convolutions of a reference, with weights that ONNX Runtime multiplies exactly on any processor.

On an x86 processor without VNNI, ONNX Runtime multiplies unsigned activations by signed weights with `vpmaddubsw`. It
adds two products in 16 bits and saturates, so sums are off where values are large (ONNX Runtime's page on quantisation
names it for AVX2 and AVX512). Unsigned weights are multiplied exactly. ONNX Runtime makes signed ones unsigned itself
where it is asked (`session.x64quantprecision`), but only constants, and only beside optimisations that a reference goes
without.

A weight w with the zero point z stands for w - z, and so does w + 128 with z + 128: the sums are the same integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_SUFFIX = "__unsigned"
_SHIFT = 128
_INT8, _UINT8 = int(TensorProto.INT8), int(TensorProto.UINT8)
_CONTRIB = "com.microsoft"
# Their results have the type of their first input.
_MOVES_ELEMENTS = frozenset(
    {"Concat", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad", "Reshape", "Slice", "Split", "Squeeze",
     "Tile", "Transpose", "Unsqueeze"}
)  # fmt: skip


class _Operands(NamedTuple):
    """Where an operator has its activations' zero point, its weights and theirs; None: its activations are unsigned."""

    activation_zero: int | None
    weight: int
    weight_zero: int


# Operators that multiply 8-bit integers, by domain and name, as ONNX and ONNX Runtime's ContribOperators.md have them.
# The activations are input 0.
_OPERATORS = {
    ("", "MatMulInteger"): _Operands(2, 1, 3),
    ("", "ConvInteger"): _Operands(2, 1, 3),
    ("", "QLinearMatMul"): _Operands(2, 3, 5),
    ("", "QLinearConv"): _Operands(2, 3, 5),
    (_CONTRIB, "QGemm"): _Operands(2, 3, 5),
    (_CONTRIB, "QAttention"): _Operands(6, 1, 7),
    (_CONTRIB, "MatMulIntegerToFloat"): _Operands(4, 1, 5),
    (_CONTRIB, "DynamicQuantizeMatMul"): _Operands(None, 1, 3),
}


def with_unsigned_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph whose unsigned activations meet unsigned weights; itself where no weights are signed.

    Weights and zero points that are constants are changed, others get operators that add 128 to them. Bodies of If,
    Loop and Scan are left as they are.
    """
    if not any((node.domain, node.op_type) in _OPERATORS for node in proto.graph.node):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
    types = _Types(graph)
    nodes: list[onnx.NodeProto] = []
    done: set[str] = set()
    for node in graph.node:
        operands = _OPERATORS.get((node.domain, node.op_type))
        if operands is not None and _is_mixed(node, operands, types):
            for place in (operands.weight, operands.weight_zero):
                nodes.extend(_made_unsigned(graph, node, place, done))
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    # Drop the constants that only integer operators read.
    read = {name for node in _all_nodes(graph) for name in node.input} | {value.name for value in graph.output}
    kept = [one for one in graph.initializer if one.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return copy


def _is_mixed(node: onnx.NodeProto, operands: _Operands, types: _Types) -> bool:
    """Return whether a node multiplies unsigned activations by signed weights."""
    if types.of(_input(node, operands.weight)) != _INT8:
        return False
    if operands.activation_zero is None:
        return True
    zero = _input(node, operands.activation_zero)
    return types.of(zero or _input(node, 0)) == _UINT8


def _made_unsigned(
    graph: onnx.GraphProto, node: onnx.NodeProto, place: int, done: set[str]
) -> Iterator[onnx.NodeProto]:
    """Have a node read an operand that is 128 more; yield the nodes that compute it."""
    while len(node.input) <= place:
        node.input.append("")
    name = node.input[place]
    node.input[place] = shifted = (name or "zero") + _SUFFIX
    if shifted in done:
        return
    done.add(shifted)
    tensor = next((one for one in graph.initializer if one.name == name), None)
    if tensor is not None or not name:
        # A zero point that is not given is 0.
        values = np.zeros((), np.int8) if tensor is None else numpy_helper.to_array(tensor)
        graph.initializer.append(numpy_helper.from_array((values.astype(np.int16) + _SHIFT).astype(np.uint8), shifted))
        return
    wide, sum_, by = (f"{shifted}_{part}" for part in ("wide", "sum", "by"))
    graph.initializer.append(numpy_helper.from_array(np.array(_SHIFT, np.int32), by))
    yield helper.make_node("Cast", [name], [wide], to=TensorProto.INT32)
    yield helper.make_node("Add", [wide, by], [sum_])
    yield helper.make_node("Cast", [sum_], [shifted], to=_UINT8)


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _all_nodes(attribute.g)


class _Types:
    """Element types of a graph's 8-bit tensors, as far as the graph or the operator that writes one gives them."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._known = {one.name: one.data_type for one in graph.initializer}
        for value in (*graph.value_info, *graph.input, *graph.output):
            if value.type.tensor_type.elem_type:
                self._known.setdefault(value.name, value.type.tensor_type.elem_type)
        self._makers = {name: node for node in graph.node for name in node.output}

    def of(self, name: str) -> int | None:
        """Return a tensor's type; None where it is not known."""
        while name and name not in self._known:
            node = self._makers.get(name)
            if node is None:
                return None
            attributes = {one.name: one for one in node.attribute}
            match node.op_type:
                case "DynamicQuantizeLinear":
                    # Its scale is a float, for which nothing here asks.
                    return _UINT8
                case "Constant":
                    return int(attributes["value"].t.data_type) if "value" in attributes else None
                case "Cast":
                    return int(attributes["to"].i)
                case "QuantizeLinear" if not _input(node, 2):
                    wanted = attributes.get("output_dtype")
                    return int(wanted.i) if wanted is not None and wanted.i else _UINT8
                case "QuantizeLinear":
                    name = _input(node, 2)
                case moved if moved in _MOVES_ELEMENTS:
                    name = _input(node, 0)
                case _:
                    return None
        return self._known.get(name)


def _input(node: onnx.NodeProto, place: int) -> str:
    return node.input[place] if place < len(node.input) else ""
