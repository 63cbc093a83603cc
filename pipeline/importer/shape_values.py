"""Arithmetic on symbolic shapes, done at import: `Shape -> Gather -> Unsqueeze -> Concat -> Reshape` leaves no kernel.

A *shape value* stands for a small integer tensor made of sizes: a `relax.ShapeExpr` for a vector, a TIR expression
for a scalar, which may also be a condition on sizes. `fold_shape_value` computes a node on such values and returns a
shape value, a constant, or None where the node must be converted like any other; its inputs then become tensors
(`as_tensor`). Values of int64 and int32 qualify; a tensor gets the type that the ONNX graph says. Static sizes are
folded before, on the ONNX graph.

Most constants are folded on the ONNX graph before. The others (`fold_small_constants`) come from sizes that only the
conversion knows, such as the width of a tensor whose other axes are symbolic, and end up where TVM needs a number:
repeats, depths, split sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import tvm
import tvm_ffi
from onnx import TensorProto
from tvm import relax, tirx

from relaxtune.models.onnx_model import SHAPE_ELEMENTS_MAX, result_of
from relaxtune.pipeline.importer.converter_input import ConverterInput, constant, constant_value
from relaxtune.pipeline.importer.sizes import BROADCASTING, is_never_negative, is_shape_value, with_axes
from relaxtune.schedules.sizes import Size, simplify

_TO_THE_END = (2**31 - 1, 2**63 - 1)
# Of a node and the elements of its inputs, as arrays of sizes, numbers or conditions: those of the result.
_Rule = Callable[..., "np.ndarray | Size | None"]


def as_tensor(builder: relax.BlockBuilder, expr: tvm.ir.Expr, *, narrow: bool = False) -> tvm.ir.Expr:
    """Return the tensor of a shape value, or of a variable of type shape: int64, or where `narrow` int32."""
    scalar = tvm.ir.is_prim_expr(expr)
    condition = scalar and _is_condition(expr)
    sizes = relax.ShapeExpr([_as_number(expr) if condition else expr]) if scalar else expr
    tensor = builder.emit(relax.op.shape_to_tensor(sizes))
    tensor = builder.emit(relax.op.reshape(tensor, [])) if scalar else tensor
    if condition:
        return builder.emit(relax.op.astype(tensor, "bool"))
    return builder.emit(relax.op.astype(tensor, "int32")) if narrow else tensor


def size_list(expr: tvm.ir.Expr | None) -> list[Size] | None:
    """Return the elements of a shape value or small integer constant, None for anything else."""
    sizes = _read(expr)
    return None if sizes is None else list(sizes.flat)


def onnx_slice(size: int, start: int, end: int, step: int) -> range:
    """Return the places that a Slice of ONNX takes of an axis, as ONNX Runtime does.

    Unlike NumPy's, a start before the axis is its first place going down too, and the largest int is "to the end".
    """
    if end in _TO_THE_END:
        end = size if step > 0 else -size - 1
    start, end = (place + size if place < 0 else place for place in (start, end))
    if step > 0:
        return range(min(max(start, 0), size), min(max(end, 0), size), step)
    return range(min(max(start, 0), size - 1), min(max(end, -1), size), step)


def fold_shape_value(op_type: str, node: ConverterInput) -> tvm.ir.Expr | None:
    """Return the value of a node computed on sizes, or None if the node is no such arithmetic."""
    rule = _RULES.get(op_type)
    if rule is None or not any(is_shape_value(item) for item in node.inputs):
        return None
    operands = [sizes for item in node.inputs if (sizes := _read(item)) is not None]
    conditions = any(_is_condition(value) for sizes in operands for value in sizes.flat)
    if len(operands) < len(node.inputs) or (conditions and op_type not in _OF_CONDITIONS):
        return None
    if op_type in (*BROADCASTING, "Mod") and len({sizes.size for sizes in operands} - {1}) > 1:
        return None
    found = rule(node, *operands)
    return None if found is None else _write(found if isinstance(found, np.ndarray) else _array([found], ()))


def _read(expr: tvm.ir.Expr | None) -> np.ndarray | None:
    """Return the elements of a shape value or of a small integer constant, of rank 0 or 1."""
    if isinstance(expr, relax.ShapeExpr):
        return _array([simplify(value) for value in expr.values], (len(expr.values),))
    value = constant_value(expr)
    if value is not None:
        is_small = value.dtype.kind in "bi" and value.ndim <= 1 and value.size <= SHAPE_ELEMENTS_MAX
        return value.astype("int64").astype(object) if is_small else None
    return _array([simplify(expr)], ()) if expr is not None and tvm.ir.is_prim_expr(expr) else None


def _array(values: Sequence[Size], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(values), object)
    for place, value in enumerate(values):
        array[place] = value
    return array.reshape(shape)


def _write(found: np.ndarray) -> tvm.ir.Expr:
    """Return numbers as a constant, sizes as a shape value, a condition as it is."""
    if found.dtype == bool:
        return constant(found)
    simple = [value if _is_condition(value) else simplify(value) for value in found.flat]
    if all(isinstance(value, int) for value in simple):
        return constant(np.array(simple, "int64").reshape(found.shape))
    return simple[0] if found.ndim == 0 else relax.ShapeExpr(simple)


def _each(function: Callable[..., Size], operands: int = 2) -> _Rule:
    """Return the rule of an elementwise operator; NumPy broadcasts."""
    apply = np.frompyfunc(function, operands, 1)
    return lambda _, *arrays: apply(*arrays)


def _number(value: Size) -> tvm.ir.Expr:
    return tirx.IntImm("int64", 0) + value


def _divide(a: Size, b: Size) -> Size:
    """Return the quotient as ONNX rounds it, towards zero; floor division simplifies better where they agree."""
    divide = tirx.floordiv if is_never_negative(a) and is_never_negative(b) else tirx.truncdiv
    return divide(_number(a), _number(b))


def _gather(node: ConverterInput, data: np.ndarray, indices: np.ndarray) -> np.ndarray | Size | None:
    if data.ndim != 1 or not all(isinstance(index, int) for index in indices.flat):
        return None
    return data[indices.astype(int)]


def _slice(node: ConverterInput, data: np.ndarray, *bounds: np.ndarray) -> np.ndarray | None:
    numbers = [bound.item() for bound in bounds if bound.size == 1 and isinstance(bound.item(), int)]
    if data.ndim != 1 or len(numbers) < len(bounds):
        return None
    return data[list(onnx_slice(len(data), numbers[0], numbers[1], numbers[3] if len(numbers) > 3 else 1))]


def _reshape(node: ConverterInput, data: np.ndarray, shape: np.ndarray) -> np.ndarray | None:
    return data.reshape([-1] * shape.size) if shape.size < 2 else None


def _cast(node: ConverterInput, data: np.ndarray) -> np.ndarray | Size | None:
    to = node.integer("to", 0)
    if to == TensorProto.BOOL:
        return None if data.ndim else _truth(_as_condition(data.item()))
    return np.frompyfunc(_as_number, 1, 1)(data) if to in (TensorProto.INT64, TensorProto.INT32) else None


def _is_condition(value: Size) -> bool:
    return not isinstance(value, int) and str(value.ty.dtype) == "bool"


def _as_number(value: Size) -> Size:
    """Return a condition as 1 or 0, a number as it is."""
    return tirx.Select(value, tirx.IntImm("int64", 1), tirx.IntImm("int64", 0)) if _is_condition(value) else value


def _as_condition(value: Size) -> tvm.ir.Expr:
    return value if _is_condition(value) else tirx.NE(tirx.IntImm("int64", 0) + value, tirx.IntImm("int64", 0))


def _truth(condition: tvm.ir.Expr) -> np.ndarray | tvm.ir.Expr:
    """Return a condition in its simplest form, a truth value where it holds for all sizes or for none."""
    simple = with_axes(condition).simplify(condition)
    return np.array(bool(simple)) if isinstance(simple, tirx.IntImm) else simple


def _not(node: ConverterInput, data: np.ndarray) -> np.ndarray | Size | None:
    return None if data.ndim else _truth(tirx.Not(_as_condition(data.item())))


def _and(node: ConverterInput, *operands: np.ndarray) -> np.ndarray | Size | None:
    if any(one.ndim for one in operands):
        return None
    return _truth(tirx.And(*(_as_condition(one.item()) for one in operands)))


def _sign(value: Size) -> tvm.ir.Expr:
    return tirx.min(tirx.max(_number(value), tirx.IntImm("int64", -1)), tirx.IntImm("int64", 1))


def _subtract(a: Size, b: Size) -> Size:
    """Return a difference; a quotient, less one where signs differ and there is a remainder, is a floor division.

    PyTorch's exporter writes floor divisions so.
    """
    if isinstance(a, tirx.FloorDiv | tirx.Div) and isinstance(b, tirx.Select) and isinstance(a.b, tirx.IntImm):
        rest = tirx.NE(tirx.floormod(a.a, a.b), tirx.IntImm("int64", 0))
        differ = tirx.Not(tirx.EQ(simplify(_sign(a.a)), _sign(a.b)))
        parts = [_truth(differ), _truth(rest)]
        conditions = [tirx.const(bool(one), "bool") if isinstance(one, np.ndarray) else one for one in parts]
        both = _truth(tirx.And(*conditions))
        less = int(both) if isinstance(both, np.ndarray) else simplify(_as_number(both))
        if tvm_ffi.structural_equal(less, simplify(b)):
            return tirx.floordiv(a.a, a.b)
    return a - b


def _equal(node: ConverterInput, a: np.ndarray, b: np.ndarray) -> np.ndarray | Size | None:
    answers = np.asarray(np.frompyfunc(_is_equal, 2, 1)(a, b))
    if answers.ndim == 0 and answers.item() is None:
        return _truth(tirx.EQ(_number(a.item()), _number(b.item())))
    return None if any(answer is None for answer in answers.flat) else answers.astype(bool)


def _is_equal(a: Size, b: Size) -> bool | None:
    """Return whether two sizes are equal, None if that is not known; a size is never negative."""
    difference = simplify(a - b)
    if isinstance(difference, int):
        return difference == 0
    opposed = any(isinstance(one, int) and one < 0 and is_never_negative(other) for one, other in ((a, b), (b, a)))
    return False if opposed else None


def _where(node: ConverterInput, condition: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    known = all(isinstance(value, int) for value in condition.flat)
    return np.where(condition.astype(bool), x, y) if known else None


_RULES: Mapping[str, _Rule] = {
    "Add": lambda _, a, b: a + b,
    "And": _and,
    "Cast": _cast,
    "Concat": lambda _, *parts: np.concatenate(parts) if all(part.ndim for part in parts) else None,
    "Div": _each(_divide),
    "Equal": _equal,
    "Gather": _gather,
    "Identity": lambda _, data: data,
    "Max": _each(lambda a, b: tirx.max(_number(a), _number(b))),
    "Min": _each(lambda a, b: tirx.min(_number(a), _number(b))),
    "Mod": _each(lambda a, b: tirx.floormod(_number(a), _number(b))),  # With the divisor's sign, as ONNX has it.
    "Mul": lambda _, a, b: a * b,
    "Not": _not,
    "ReduceProd": lambda node, data: math.prod(data) if data.ndim and node.integer("keepdims", 1) == 0 else None,
    "Reshape": _reshape,
    "Sign": _each(_sign, 1),
    "Slice": _slice,
    "Squeeze": lambda _, data, *axes: data.reshape(()) if data.shape == (1,) else None,
    "Sub": _each(_subtract),
    "Unsqueeze": lambda _, data, *axes: data.reshape(1) if data.ndim == 0 else None,
    "Where": _where,
}
# Rules that take conditions; elsewhere they become tensors.
_OF_CONDITIONS = frozenset({"And", "Cast", "Not"})
# Operators of sizes. onnx's reference is wrong for others (GatherElements of indices of another width).
_OF_CONSTANTS = frozenset(
    {
        *("Abs", "Add", "And", "Cast", "Ceil", "Concat", "Div", "Equal", "Expand", "Floor", "Gather", "Greater"),
        *("GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range"),
        *("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Sign", "Slice", "Squeeze", "Sub", "Sum"),
        *("OneHot", "Tile", "Transpose", "Unsqueeze", "Where"),
    }
)


def fold_small_constants(node: onnx.NodeProto, inputs: Sequence[tvm.ir.Expr | None], opset: int) -> tvm.ir.Expr | None:
    """Return the value of a node of the main domain over small integer constants, or None for any other node.

    Inputs and results are integers or booleans of 64 elements at most.
    """
    if node.op_type not in _OF_CONSTANTS or not inputs:
        return None
    feeds: dict[str, np.ndarray] = {}
    for name, item in zip(node.input, inputs, strict=True):
        value = constant_value(item)
        if item is not None and (value is None or not _is_small(value)):
            return None
        if value is not None:
            feeds[name] = value
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    alone.domain = ""
    folded = result_of(alone, feeds, {"": opset})
    return constant(folded) if _is_small(folded) else None


def _is_small(value: np.ndarray) -> bool:
    return value.dtype.kind in "biu" and value.size <= SHAPE_ELEMENTS_MAX
