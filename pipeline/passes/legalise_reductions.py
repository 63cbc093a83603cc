"""Maxima and minima over axes, and their places, with kernels that keep a NaN and know rows of infinities.

TVM starts at the least finite number: the maximum of a row of -inf, such as a mask that hides every key, would be
-3.4e38, and its place -1. A NaN wins here, as in NumPy; ONNX Runtime keeps or loses one by its place in the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import tvm
from tvm import relax, te, tirx

Wins = Callable[[tvm.ir.Expr, tvm.ir.Expr], tvm.ir.Expr]
Legaliser = Callable[[relax.BlockBuilder, tvm.ir.Call], tvm.ir.Expr]


def is_nan(value: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return whether a floating point number is NaN, as TIR."""
    narrow = str(value.ty.dtype) in ("float16", "bfloat16")
    return tirx.isnan(value.astype("float32") if narrow else value)


def _beats(wins: Wins, a: tvm.ir.Expr, b: tvm.ir.Expr) -> tvm.ir.Expr:
    return tirx.Or(wins(a, b), is_nan(a))


def _extreme(wins: Wins, start: float) -> Callable[..., tvm.ir.Expr]:
    reducer: Callable[..., tvm.ir.Expr] = te.comm_reducer(
        lambda a, b: tirx.Select(_beats(wins, a, b), a, b), lambda dtype: tirx.const(start, dtype), name="extreme"
    )
    return reducer


def _place(wins: Wins, start: float) -> Callable[..., Sequence[te.Tensor]]:
    """Return the reducer of (place, value): the first place of a NaN, else that of the value that wins."""

    def pick(one: Sequence[tvm.ir.Expr], other: Sequence[tvm.ir.Expr]) -> tuple[tvm.ir.Expr, tvm.ir.Expr]:
        (i, a), (j, b) = one, other
        alike = tirx.Or(a == b, tirx.And(is_nan(a), is_nan(b)))
        better = tirx.Or(wins(a, b), tirx.And(is_nan(a), tirx.Not(is_nan(b))))
        first = tirx.Or(better, tirx.And(alike, i < j))
        return tirx.Select(first, i, j), tirx.Select(tirx.Or(better, alike), a, b)

    reducer: Callable[..., Sequence[te.Tensor]] = te.comm_reducer(
        pick,
        lambda place, value: (tirx.const(int(tirx.max_value(place).value), place), tirx.const(start, value)),
        name="place",
    )
    return reducer


def _greater(a: tvm.ir.Expr, b: tvm.ir.Expr) -> tvm.ir.Expr:
    return a > b


def _less(a: tvm.ir.Expr, b: tvm.ir.Expr) -> tvm.ir.Expr:
    return a < b


def _over(
    x: te.Tensor, axes: Sequence[int], kept: bool
) -> tuple[list[tvm.ir.Expr], dict[int, tirx.IterVar], Callable[..., list[tvm.ir.Expr]]]:
    """Return the shape of a reduction, its reduction axes, and where an element of its result reads."""
    inner = {axis: te.reduce_axis((0, x.shape[axis]), name=f"k{axis}") for axis in axes}
    outer = [axis for axis in range(len(x.shape)) if kept or axis not in inner]

    def at(*places: tirx.Var) -> list[tvm.ir.Expr]:
        by_axis = dict(zip(outer, places, strict=True)) | {axis: one.var for axis, one in inner.items()}
        return [by_axis[axis] for axis in range(len(x.shape))]

    return [1 if axis in inner else x.shape[axis] for axis in outer], inner, at


def _reduced(x: te.Tensor, axes: Sequence[int], kept: bool, reducer: Callable[..., tvm.ir.Expr]) -> te.Tensor:
    shape, inner, at = _over(x, axes, kept)
    return te.compute(shape, lambda *places: reducer(x(*at(*places)), list(inner.values())), name="reduce")


def _places(
    x: te.Tensor, axes: Sequence[int], kept: bool, reducer: Callable[..., Sequence[te.Tensor]], dtype: str
) -> te.Tensor:
    shape, inner, at = _over(x, axes, kept)

    def pick(*places: tirx.Var) -> Sequence[tvm.ir.Expr]:
        index = at(*places)
        flat: tvm.ir.Expr = tirx.const(0, dtype)
        for axis in sorted(inner):
            flat = flat * x.shape[axis].astype(dtype) + index[axis].astype(dtype)
        return reducer((flat, x(*index)), list(inner.values()))

    found, _ = te.compute(shape, pick, name="place")
    return te.compute(shape, lambda *places: found(*places), name="taken")


def legalisers() -> Mapping[str, Legaliser]:
    """Return how each operator of floating point numbers is lowered; integers have no NaN, and TVM lowers them."""
    return {
        "relax.max": _values("relax.max", _extreme(_greater, -math.inf)),
        "relax.min": _values("relax.min", _extreme(_less, math.inf)),
        "relax.argmax": _indices("relax.argmax", _place(_greater, -math.inf)),
        "relax.argmin": _indices("relax.argmin", _place(_less, math.inf)),
    }


def _values(operator: str, reducer: Callable[..., tvm.ir.Expr]) -> Legaliser:
    def compute(call: tvm.ir.Call, x: te.Tensor) -> te.Tensor:
        rank, given = len(x.shape), call.attrs.axis
        axes = sorted({int(axis) % rank for axis in (range(rank) if given is None else given)})
        return _reduced(x, axes, bool(call.attrs.keepdims), reducer)

    return _of_floats(operator, compute)


def _indices(operator: str, reducer: Callable[..., Sequence[te.Tensor]]) -> Legaliser:
    def compute(call: tvm.ir.Call, x: te.Tensor) -> te.Tensor:
        rank, given = len(x.shape), call.attrs.axis
        axes = list(range(rank)) if given is None else [int(given) % rank]
        return _places(x, axes, bool(call.attrs.keepdims), reducer, str(call.ty.dtype.dtype))

    return _of_floats(operator, compute)


def _of_floats(operator: str, compute: Callable[[tvm.ir.Call, te.Tensor], te.Tensor]) -> Legaliser:
    stock = tvm.ir.Op.get(operator).get_attr("FLegalize")

    def legalise(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        if not str(call.args[0].ty.dtype.dtype).startswith(("float", "bfloat")):
            return stock(builder, call)
        name = operator.rpartition(".")[2]
        return builder.call_te(lambda x: compute(call, x), call.args[0], primfunc_name_hint=name)

    return legalise
