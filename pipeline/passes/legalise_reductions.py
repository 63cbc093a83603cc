"""Sums, products, means, maxima and minima over axes, and places, as ONNX defines them at the edges.

TVM starts a maximum at the least finite number: the maximum of a row of -inf, such as a mask that hides every key,
would be -3.4e38, and its place -1. A NaN wins here, as in NumPy; ONNX Runtime keeps or loses one by its place.

A kernel sets its result in the first step of its reduction. Over a symbolic axis without elements in a call there is no
such step, and what was in memory would be the result: there it is what `fill_empty` gives over an axis that has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tvm
from tvm import relax, te, tirx, topi

from relaxtune.pipeline.importer.ordered_keys import keys_of, numbers_of
from relaxtune.pipeline.passes.fill_empty import number_of_none
from relaxtune.pipeline.passes.kit.sizes import Size, fits, size_of

Legaliser = Callable[[relax.BlockBuilder, tvm.ir.Call], tvm.ir.Expr]
Reduce = Callable[..., te.Tensor]
# Of an operator's attributes: a number, several, or None for all; TVM's classes carry no types.
Axes: TypeAlias = Any


def reduction_legalisers() -> Mapping[str, Legaliser]:
    """Return how each operator is lowered."""
    return {
        "relax.max": _legaliser("max", _by_keys(topi.max, nan_last=True)),
        "relax.min": _legaliser("min", _by_keys(topi.min, nan_last=False)),
        "relax.argmax": _place("argmax", topi.argmax, nan_last=True),
        "relax.argmin": _place("argmin", topi.argmin, nan_last=False),
        "relax.mean": _of_any_size("mean", _mean),
        "relax.prod": _of_any_size("prod", topi.prod),
        "relax.sum": _of_any_size("sum", topi.sum),
    }


def _legaliser(operator: str, reduce: Reduce) -> Legaliser:
    """Return how an operator is lowered whose result over no elements is known."""

    def legalise(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        axes, kept = call.attrs.axis, bool(call.attrs.keepdims)
        none = number_of_none(operator, str(call.ty.dtype.dtype))

        def compute(x: te.Tensor) -> te.Tensor:
            return _unless_none(x, axes, reduce(x, axes, kept), none)

        return builder.call_te(compute, call.args[0], primfunc_name_hint=operator)

    return legalise


def _of_any_size(operator: str, reduce: Reduce) -> Legaliser:
    """Return how an operator is lowered whose kernel is TVM's as long as sizes are known."""
    stock = tvm.ir.Op.get(f"relax.{operator}").get_attr("FLegalize")
    own = _legaliser(operator, reduce)

    def legalise(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        known = not _sizes_that_may_be_none(call.args[0].ty.shape, call.attrs.axis)
        return stock(builder, call) if known else own(builder, call)

    return legalise


def _place(operator: str, reduce: Reduce, *, nan_last: bool) -> Legaliser:
    """Return how the place of an extreme is found; integers have no NaN, and TVM finds theirs. Of none it is 0."""
    stock = tvm.ir.Op.get(f"relax.{operator}").get_attr("FLegalize")

    def legalise(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        axis = call.attrs.axis
        if not _is_float(str(call.args[0].ty.dtype.dtype)):
            return stock(builder, call)
        if all(isinstance(size, tirx.IntImm) and int(size) == 1 for size in _sizes(call.args[0].ty.shape, axis)):
            return relax.op.zeros(call.ty.shape, str(call.ty.dtype.dtype))

        def compute(x: te.Tensor) -> te.Tensor:
            return _unless_none(x, axis, reduce(keys_of(x, nan_last=nan_last), axis, bool(call.attrs.keepdims)), 0)

        return builder.call_te(compute, call.args[0], primfunc_name_hint=operator)

    return legalise


def _by_keys(reduce: Reduce, *, nan_last: bool) -> Reduce:
    """Return an extreme that keeps a NaN; integers have none."""

    def extreme(x: te.Tensor, axes: Axes, kept: bool) -> te.Tensor:
        if not _is_float(str(x.dtype)):
            return reduce(x, axes, kept)
        return numbers_of(reduce(keys_of(x, nan_last=nan_last), axes, kept), str(x.dtype))

    return extreme


def _mean(x: te.Tensor, axes: Axes, kept: bool) -> te.Tensor:
    count = math.prod(_sizes(x.shape, axes), start=tirx.const(1, "int64"))
    # TVM divides by it, and a mean of none is not what this gives.
    return topi.divide(topi.sum(x, axes, kept), tirx.Max(count, tirx.const(1, "int64")).astype(x.dtype))


def _unless_none(x: te.Tensor, axes: Axes, found: te.Tensor, none: float) -> te.Tensor:
    """Return what a reduction found, or where it had no elements in this call, the number for that."""
    symbolic = _sizes_that_may_be_none(x.shape, axes)
    if not symbolic:
        return found
    empty = tirx.any(*(size == 0 for size in symbolic))
    number = tirx.const(none, found.dtype)
    return te.compute(
        found.shape, lambda *place: tirx.Select(empty, number, found(*place)), name="unless_none", tag="elemwise"
    )


def _sizes(shape: Sequence[tvm.ir.Expr], axes: Axes) -> list[tvm.ir.Expr]:
    """Return the sizes of the axes that are reduced; None stands for all."""
    places = _places(axes, shape)
    return [size for place, size in enumerate(shape) if place in places]


def _sizes_that_may_be_none(shape: Sequence[tvm.ir.Expr], axes: Axes) -> list[tvm.ir.Expr]:
    """Return the reduced sizes that may be 0 while the result has elements.

    The keys of a mask are no fewer than its queries: a sum over keys that has none is of no query.
    """
    places = _places(axes, shape)
    kept = [size_of(size) for place, size in enumerate(shape) if place not in places]

    def is_no_larger(size: Size | None, than: Size | None) -> bool:
        return size is not None and than is not None and size != 0 and fits(size, than)

    return [
        size
        for size in _sizes(shape, axes)
        if not isinstance(size, tirx.IntImm) and not any(is_no_larger(other, size_of(size)) for other in kept)
    ]


def _places(axes: Axes, shape: Sequence[tvm.ir.Expr]) -> set[int]:
    if axes is None:
        return set(range(len(shape)))
    listed = [axes] if isinstance(axes, int | tirx.IntImm) else list(axes)
    return {int(axis) % len(shape) for axis in listed}


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))
