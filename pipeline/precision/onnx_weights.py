"""The constant that an ONNX matmul multiplies by, and a copy of a graph whose matmuls multiply by quantised ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer.normalise import node_label
from relaxtune.pipeline.precision.policy import PolicyEntry
from relaxtune.pipeline.precision.quantise import quantise, quantise_float8, quantise_to_int8
from relaxtune.schedules.functions.byte_rows import BYTE_MAX, LEAST_RANGE

_MATMULS = ("MatMul", "Gemm")
# Operators between an initialiser and a matmul.
_COPIES = ("Cast", "Identity")


class MatmulWeights:
    """The constant right operands of a model's matmuls, by the name that the importer gives each node."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model
        graph = model.proto.graph
        self._nodes: dict[str, onnx.NodeProto] = {}
        for node in graph.node:
            self._nodes.setdefault(label_of(node), node)
        self._producers = {output: node for node in graph.node for output in node.output}
        self._shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}

    def is_matmul(self, name: str) -> bool:
        """Whether a node of this name is a matmul."""
        node = self._nodes.get(name)
        return node is not None and node.op_type in _MATMULS

    def shape(self, name: str) -> tuple[int, int] | None:
        """Return [K, N] of the constant that a matmul multiplies by from the right, None where there is none."""
        found = self._find(name)
        if found is None:
            return None
        source, turned = found
        shape = self._shapes[source] if source in self._shapes else tuple(self._constant(source).shape)
        if len(shape) != 2:
            return None
        return (shape[1], shape[0]) if turned else (shape[0], shape[1])

    def array(self, name: str) -> np.ndarray:
        """Return the constant [K, N] of a matmul that has one."""
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        source, turned = found
        array = self._model.array(source) if source in self._shapes else self._constant(source)
        return array.T if turned else array

    def left(self, name: str) -> str:
        """Return the tensor that a matmul multiplies from the left."""
        return str(self._nodes[name].input[0])

    def is_turned(self, name: str) -> bool:
        """Whether the node itself reads its operand as [N, K]."""
        return _integer(self._nodes[name], "transB") == 1

    def _find(self, name: str) -> tuple[str, bool] | None:
        """Return the constant's name, and whether it is stored as [N, K]."""
        node = self._nodes.get(name)
        if node is None or node.op_type not in _MATMULS or _real(node, "alpha", 1.0) != 1.0:
            return None
        source, turned = node.input[1], _integer(node, "transB") == 1
        while source not in self._shapes:
            producer = self._producers.get(source)
            if producer is None:
                return None
            if producer.op_type == "Constant":
                return (source, turned) if _tensor_of(producer) is not None else None
            if producer.op_type == "Transpose":
                turned = not turned
            elif producer.op_type not in _COPIES:
                return None
            source = producer.input[0]
        return source, turned

    def _constant(self, source: str) -> np.ndarray:
        tensor = _tensor_of(self._producers[source])
        assert tensor is not None
        array: np.ndarray = numpy_helper.to_array(tensor)
        return array


def with_quantised_weights(model: OnnxModel, policy: PolicyEntry | None) -> OnnxModel:
    """Return the model with the weights that a policy has quantised replaced by what their quantised form stands for.

    Each weight is first rounded to float16, as the pass that quantises finds it, except under "int8". Under this and
    "fp8", what these matmuls read is rounded too: each row, or with a static scale all of it. A model without quantised
    weights is returned as it is.
    """
    if policy is None or not policy.rewrites:
        return model
    bits = policy.weight_bits
    constants = dict(_FLOAT8_CONSTANTS if policy.float8 else _BYTE_CONSTANTS)
    static = policy.static.scales if policy.static is not None else {}
    weights = MatmulWeights(model)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.inline_proto())
    wanted = dict.fromkeys(policy.quantised_nodes)
    opset = next(one.version for one in proto.opset_import if one.domain in ("", "ai.onnx"))
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        label = label_of(node)
        nodes.append(node)
        if label not in wanted:
            continue
        array = weights.array(label)
        half = array.astype(np.float16)
        if bits is not None:
            rounded = quantise(half, bits, policy.group_size or 0).dequantised().astype(array.dtype)
        else:
            if policy.float8:
                levels, scales = quantise_float8(half)
                levels = levels.T
            else:
                levels, scales = quantise_to_int8(array)
            rounded = (levels.astype(np.float32) * scales).astype(array.dtype)
            if policy.float8:
                scale = f"{label}__scale" if node.input[0] in static else ""
                constants.update({scale: np.array(static[node.input[0]], np.float32)} if scale else {})
                rounding = _left_in_float8(node, opset, scale)
            else:
                rounding = _rows_in_bytes(node, opset)
            nodes[-1:] = [*rounding, node]
            node.input[0] = nodes[-2].output[0]
        if weights.is_turned(label):
            rounded = rounded.T
        name = f"{label}__quantised"
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(rounded, order="C"), name))
        node.input[1] = name
    if bits is None:
        proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
    return replace(model, proto=proto, data_dir=None)


def _left_in_float8(matmul: onnx.NodeProto, opset: int, static: str) -> list[onnx.NodeProto]:
    """Return nodes that round a matmul's left operand to float8 e4m3, in operators of every opset.

    `static`: the name of its scale; "" for the scale of each row.

    Of a number a, a * c - (a * c - a) with c = 2^20 + 1 has 4 bits of mantissa (T. J. Dekker, "A Floating-Point
    Technique for Extending the Available Precision", 1971); a + d - d with d = 1.5 * 2^14 is a multiple of 2^-9, the
    least subnormal.
    """
    made: list[onnx.NodeProto] = []
    add, data = _adder(matmul, made), matmul.input[0]
    scale = static
    if not scale:
        largest = _reduced("ReduceMax", add("Abs", data), matmul, opset, add)
        scale = add("Mul", add("Max", largest, "float8__least"), "float8__unit")
    value = add("Div", data, scale)
    if static:
        value = add("Max", add("Min", value, "float8__most"), "float8__lowest")
    split = add("Mul", value, "float8__split")
    normal = add("Sub", split, add("Sub", split, value))
    small = add("Sub", add("Add", value, "float8__shift"), "float8__shift")
    rounded = add("Where", add("Less", add("Abs", value), "float8__normal"), small, normal)
    add("Mul", rounded, scale)
    return made


def _rows_in_bytes(matmul: onnx.NodeProto, opset: int) -> list[onnx.NodeProto]:
    """Return nodes that round each row of a matmul's left operand to 256 levels: `schedules.functions.byte_rows`."""
    made: list[onnx.NodeProto] = []
    add, data = _adder(matmul, made), matmul.input[0]
    low = add("Min", _reduced("ReduceMin", data, matmul, opset, add), "bytes__0")
    high = add("Max", _reduced("ReduceMax", data, matmul, opset, add), "bytes__0")
    scale = add("Mul", add("Max", add("Sub", high, low), "bytes__least"), "bytes__unit")
    inverse = add("Div", "bytes__1", scale)
    zero = add("Min", add("Round", add("Mul", add("Neg", low), inverse)), "bytes__most")
    level = add("Add", add("Round", add("Mul", data, inverse)), zero)
    level = add("Min", add("Max", level, "bytes__0"), "bytes__most")
    add("Mul", add("Sub", level, zero), scale)
    return made


def _adder(matmul: onnx.NodeProto, made: list[onnx.NodeProto]) -> Callable[..., str]:
    """Return what appends a node before a matmul, and returns the name of its result."""

    def add(op: str, *inputs: str, **attributes: object) -> str:
        name = f"{label_of(matmul)}__rounded_{len(made)}"
        made.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    return add


def _reduced(op: str, data: str, matmul: onnx.NodeProto, opset: int, add: Callable[..., str]) -> str:
    """Reduce the rows of a matmul's left operand; the axes of ReduceMin and ReduceMax are an input from opset 18 on."""
    axis = 0 if _integer(matmul, "transA") else -1
    if opset >= 18:
        return add(op, data, f"rows__axis_{axis}", keepdims=1)
    return add(op, data, keepdims=1, axes=[axis])


_AXES = {"rows__axis_0": np.array([0], np.int64), "rows__axis_-1": np.array([-1], np.int64)}
_BYTE_CONSTANTS = {
    **_AXES,
    "bytes__0": np.array(0, np.float32),
    "bytes__1": np.array(1, np.float32),
    "bytes__least": np.array(LEAST_RANGE, np.float32),
    "bytes__unit": np.array(1 / BYTE_MAX, np.float32),
    "bytes__most": np.array(BYTE_MAX, np.float32),
}
_FLOAT8_CONSTANTS = {
    **_AXES,
    "float8__most": np.array(448, np.float32),
    "float8__lowest": np.array(-448, np.float32),
    "float8__least": np.array(1e-30, np.float32),
    "float8__unit": np.array(1 / 448, np.float32),
    "float8__split": np.array(2**20 + 1, np.float32),
    "float8__shift": np.array(1.5 * 2**14, np.float32),
    "float8__normal": np.array(2**-6, np.float32),
}


def label_of(node: onnx.NodeProto) -> str:
    """Return what source maps call a node: its name, or what it writes."""
    return node_label(node.name, list(node.output), node.op_type)


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)


def _integer(node: onnx.NodeProto, name: str) -> int:
    attribute = _attribute(node, name)
    return 0 if attribute is None else int(attribute.i)


def _real(node: onnx.NodeProto, name: str, default: float) -> float:
    attribute = _attribute(node, name)
    return default if attribute is None else float(attribute.f)


def _tensor_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    attribute = _attribute(node, "value")
    return None if attribute is None else attribute.t
