"""Arithmetic on symbolic shapes, done at import: `Shape -> Gather -> Unsqueeze -> Concat -> Reshape` leaves no kernel.

A *shape value* stands for a small integer tensor made of sizes: a `relax.ShapeExpr` for a vector, a TIR expression
for a scalar, which may also be a condition on sizes. `fold_shape_value` computes a node on such values and returns a
shape value, a constant, or None where the node must be converted like any other; its inputs then become tensors
(`as_tensor`). Values of int64 and int32 qualify; a tensor gets the type that the ONNX graph says. Static sizes are
folded before, on the ONNX graph.

Most constants are folded on the ONNX graph before. Those left (`fold_small_constants`) come of sizes that only the
conversion knows, such as the width of a tensor whose other axes are symbolic, and end up where TVM needs a number:
repeats, depths, split sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import tvm
import tvm_ffi
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from tvm import relax, tirx

from relaxtune.pipeline.importer.converter_input import ConverterInput, constant, constant_value
from relaxtune.pipeline.importer.sizes import is_shape_value, simplify

# Vectors of sizes are as long as ranks; anything longer is data.
_MAX_LENGTH = 64
_TO_THE_END = (2**31 - 1, 2**63 - 1)


@dataclass(frozen=True, eq=False)
class _Sizes:
    """The elements of a shape value or of a small integer constant, and its rank (0 or 1)."""

    values: tuple[tvm.ir.Expr | int, ...]
    rank: int


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


def size_list(expr: tvm.ir.Expr | None) -> list[tvm.ir.Expr | int] | None:
    """Return the elements of a shape value or small integer constant, None for anything else."""
    sizes = _read(expr)
    return None if sizes is None else list(sizes.values)


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
    conditions = any(_is_condition(value) for sizes in operands for value in sizes.values)
    if len(operands) < len(node.inputs) or (conditions and op_type not in _OF_CONDITIONS):
        return None
    return rule(node, operands)


def _read(expr: tvm.ir.Expr | None) -> _Sizes | None:
    if isinstance(expr, relax.ShapeExpr):
        return _Sizes(tuple(simplify(value) for value in expr.values), 1)
    value = None if expr is None else constant_value(expr)
    if value is not None:
        is_small = value.dtype.kind in "bi" and value.ndim <= 1 and value.size <= _MAX_LENGTH
        return _Sizes(tuple(int(item) for item in value.reshape(-1)), value.ndim) if is_small else None
    if expr is not None and tvm.ir.is_prim_expr(expr):
        return _Sizes((simplify(expr),), 0)
    return None


def _write(values: Sequence[tvm.ir.Expr | int], rank: int) -> tvm.ir.Expr:
    """Return numbers as a constant, sizes as a shape value."""
    simple = [simplify(value) for value in values]
    if all(isinstance(value, int) for value in simple):
        array = np.array(simple, "int64")
        return constant(array.reshape(()) if rank == 0 else array)
    if rank == 0:
        return simple[0]
    return relax.ShapeExpr(simple)


def _elementwise(
    function: Callable[[tvm.ir.Expr | int, tvm.ir.Expr | int], tvm.ir.Expr | int],
) -> Callable[[ConverterInput, list[_Sizes]], tvm.ir.Expr | None]:
    def rule(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
        del node
        left, right = operands
        pairs = _broadcast(left, right)
        return None if pairs is None else _write([function(a, b) for a, b in pairs], max(left.rank, right.rank))

    return rule


def _each(
    function: Callable[[tvm.ir.Expr | int], tvm.ir.Expr | int],
) -> Callable[[ConverterInput, list[_Sizes]], tvm.ir.Expr | None]:
    def rule(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
        del node
        return _write([function(value) for value in operands[0].values], operands[0].rank)

    return rule


def _broadcast(left: _Sizes, right: _Sizes) -> list[tuple[tvm.ir.Expr | int, tvm.ir.Expr | int]] | None:
    length = max(len(left.values), len(right.values))
    if any(len(item.values) not in (1, length) for item in (left, right)):
        return None
    stretched = [item.values * length if len(item.values) == 1 else item.values for item in (left, right)]
    return list(zip(*stretched, strict=True))


def _mod(a: tvm.ir.Expr | int, b: tvm.ir.Expr | int) -> tvm.ir.Expr | int:
    """Return the remainder with the sign of the divisor, as ONNX has it for integers."""
    return a % b if isinstance(a, int) and isinstance(b, int) else tirx.floormod(a, b)


def _divide(a: tvm.ir.Expr | int, b: tvm.ir.Expr | int) -> tvm.ir.Expr | int:
    """Return the quotient as ONNX rounds it, towards zero; floor division simplifies better where they agree."""
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return tirx.floordiv(a, b) if _is_size(a) and _is_size(b) else tirx.truncdiv(a, b)


def _is_size(expr: tvm.ir.Expr | int) -> bool:
    """Return whether a value cannot be negative, given that no axis is."""
    if isinstance(expr, int):
        return expr >= 0
    return bool(_analyzer(expr).can_prove(tirx.GE(expr, tirx.IntImm("int64", 0))))


def _analyzer(expr: tvm.ir.Expr) -> tvm.sym.Analyzer:
    """Return an analyzer that knows that no axis of an expression is negative."""
    analyzer = tvm.sym.Analyzer()
    for var in tirx.analysis.undefined_vars(expr):
        analyzer.update(var, tvm.sym.ConstIntBound(0, tvm.sym.ConstIntBound.POS_INF))
    return analyzer


def _gather(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    data, indices = operands
    if data.rank != 1 or not all(isinstance(index, int) for index in indices.values):
        return None
    return _write([data.values[int(index)] for index in indices.values], indices.rank)


def _slice(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    data, *rest = operands
    numbers = [item.values[0] if len(item.values) == 1 else None for item in rest]
    if data.rank != 1 or not all(isinstance(number, int) for number in numbers):
        return None
    step = int(numbers[3]) if len(numbers) > 3 else 1  # type: ignore[arg-type]
    places = onnx_slice(len(data.values), int(numbers[0]), int(numbers[1]), step)  # type: ignore[arg-type]
    return _write([data.values[place] for place in places], 1)


def _concat(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    del node
    if any(item.rank != 1 for item in operands):
        return None
    return _write([value for item in operands for value in item.values], 1)


def _unsqueeze(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    del node
    return _write(operands[0].values, 1) if operands[0].rank == 0 else None


def _squeeze(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    del node
    data = operands[0]
    return _write(data.values, 0) if data.rank == 1 and len(data.values) == 1 else None


def _reshape(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    del node
    data, shape = operands
    if len(shape.values) == 1:
        return _write(data.values, 1)
    return _write(data.values, 0) if not shape.values else None


def _cast(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    to, (data,) = node.integer("to", 0), operands
    if to == TensorProto.BOOL:
        return None if data.rank else _truth(_as_condition(data.values[0]))
    if to not in (TensorProto.INT64, TensorProto.INT32):
        return None
    return _write([_as_number(value) for value in data.values], data.rank)


def _is_condition(value: tvm.ir.Expr | int) -> bool:
    return not isinstance(value, int) and str(value.ty.dtype) == "bool"


def _as_number(value: tvm.ir.Expr | int) -> tvm.ir.Expr | int:
    """Return a condition as 1 or 0, a number as it is."""
    return tirx.Select(value, tirx.IntImm("int64", 1), tirx.IntImm("int64", 0)) if _is_condition(value) else value


def _as_condition(value: tvm.ir.Expr | int) -> tvm.ir.Expr:
    return value if _is_condition(value) else tirx.NE(tirx.IntImm("int64", 0) + value, tirx.IntImm("int64", 0))


def _truth(condition: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return a condition in its simplest form, a constant where it holds for all sizes or for none."""
    simple = _analyzer(condition).simplify(condition)
    return constant(np.array(bool(simple))) if isinstance(simple, tirx.IntImm) else simple


def _not(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    del node
    return None if operands[0].rank else _truth(tirx.Not(_as_condition(operands[0].values[0])))


def _and(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    del node
    if any(item.rank for item in operands):
        return None
    return _truth(tirx.And(*(_as_condition(item.values[0]) for item in operands)))


def _sign(value: tvm.ir.Expr | int) -> tvm.ir.Expr | int:
    if isinstance(value, int):
        return (value > 0) - (value < 0)
    minus, one = tirx.IntImm("int64", -1), tirx.IntImm("int64", 1)
    return tirx.min(tirx.max(value, minus), one)


def _subtract(a: tvm.ir.Expr | int, b: tvm.ir.Expr | int) -> tvm.ir.Expr | int:
    """Return a difference; a quotient, less one where signs differ and there is a remainder, is a floor division.

    PyTorch's exporter writes floor divisions so.
    """
    if isinstance(a, tirx.FloorDiv | tirx.Div) and isinstance(b, tirx.Select) and isinstance(a.b, tirx.IntImm):
        rest = tirx.NE(tirx.floormod(a.a, a.b), tirx.IntImm("int64", 0))
        differ = tirx.Not(tirx.EQ(simplify(_sign(a.a)), tirx.IntImm("int64", _sign(int(a.b)))))
        less = simplify(_as_number(_truth(tirx.And(_truth(differ), _truth(rest)))))
        if tvm_ffi.structural_equal(less, simplify(b)):
            return tirx.floordiv(a.a, a.b)
    return a - b


def _product(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    if operands[0].rank != 1 or node.integer("keepdims", 1) != 0:
        return None
    total: tvm.ir.Expr | int = 1
    for value in operands[0].values:
        total = total * value
    return _write([total], 0)


def _equal(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    del node
    pairs = _broadcast(operands[0], operands[1])
    answers = None if pairs is None else [_is_equal(a, b) for a, b in pairs]
    rank = max(operands[0].rank, operands[1].rank)
    if pairs is not None and rank == 0 and answers == [None]:
        return _truth(tirx.EQ(*(tirx.IntImm("int64", 0) + value for value in pairs[0])))
    if answers is None or None in answers:
        return None
    array = np.array(answers, "bool")
    return constant(array.reshape(()) if rank == 0 else array)


def _is_equal(a: tvm.ir.Expr | int, b: tvm.ir.Expr | int) -> bool | None:
    """Return whether two sizes are equal, None if that is not known; a size is never negative."""
    difference = simplify(a - b)
    if isinstance(difference, int):
        return difference == 0
    for value, other in ((a, b), (b, a)):
        if isinstance(value, int) and value < 0 and _is_size(other):
            return False
    return None


def _where(node: ConverterInput, operands: list[_Sizes]) -> tvm.ir.Expr | None:
    del node
    condition, x, y = operands
    length = max(len(item.values) for item in operands)
    if any(len(item.values) not in (1, length) for item in operands):
        return None
    if not all(isinstance(value, int) for value in condition.values):
        return None
    columns = [item.values * length if len(item.values) == 1 else item.values for item in (condition, x, y)]
    return _write([a if c else b for c, a, b in zip(*columns, strict=True)], max(item.rank for item in operands))


_RULES: Mapping[str, Callable[[ConverterInput, list[_Sizes]], tvm.ir.Expr | None]] = {
    "Add": _elementwise(lambda a, b: a + b),
    "And": _and,
    "Cast": _cast,
    "Concat": _concat,
    "Div": _elementwise(_divide),
    "Equal": _equal,
    "Gather": _gather,
    "Identity": _each(lambda value: value),
    "Max": _elementwise(lambda a, b: max(a, b) if isinstance(a, int) and isinstance(b, int) else tirx.max(a, b)),
    "Min": _elementwise(lambda a, b: min(a, b) if isinstance(a, int) and isinstance(b, int) else tirx.min(a, b)),
    "Mod": _elementwise(_mod),
    "Mul": _elementwise(lambda a, b: a * b),
    "Not": _not,
    "ReduceProd": _product,
    "Reshape": _reshape,
    "Sign": _each(_sign),
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _elementwise(_subtract),
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
# Rules that take conditions; elsewhere they become tensors.
_OF_CONDITIONS = frozenset({"And", "Cast", "Not"})
# What sizes are computed with. onnx's reference is wrong for others (GatherElements of indices of another width).
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
        value = None if item is None else constant_value(item)
        if item is not None and (value is None or not _is_small(value)):
            return None
        if value is not None:
            feeds[name] = value
    imports = [onnx.helper.make_opsetid("", opset)]
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    alone.domain = ""
    graph = onnx.helper.make_graph(
        [alone],
        "constants",
        [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in feeds.items()
        ],
        [onnx.ValueInfoProto(name=node.output[0])],
    )
    model = onnx.helper.make_model(graph, opset_imports=imports)
    (result,) = ReferenceEvaluator(model).run(None, feeds)
    folded = np.asarray(result)
    return constant(folded) if _is_small(folded) else None


def _is_small(value: np.ndarray) -> bool:
    return value.dtype.kind in "biu" and value.size <= _MAX_LENGTH
