"""`StridedView`: where the elements of a tensor lie in another one, seen through reshapes, transposes and slices.

Each axis of a view is a list of factors (size, stride), the outermost first: a reshape of a broadcast tensor has axes
that no single stride describes (the heads of grouped-query attention are [(kv_heads, s), (group, 0)]). Sizes and
strides may be symbolic; a symbolic size counts as several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import tvm
from tvm import relax

from relaxtune.models.dims import TO_THE_END
from relaxtune.pipeline.passes.kit.ir import array_of, is_constant, is_op, static_shape, transposed_axes
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, fits, listed_sizes, plain, quotient, sizes_of

# (size, stride in elements)
Factor: TypeAlias = "tuple[Size, Size]"
Factors: TypeAlias = "tuple[Factor, ...]"


@dataclass(frozen=True)
class StridedView:
    """A tensor of which element (i, j, ...) is element `offset + sum of digit * stride` of a row-major base tensor."""

    offset: Size  # In elements.
    axes: tuple[Factors, ...]  # None for an axis of size 1. Neighbouring factors that count on are one.

    @property
    def shape(self) -> Shape:
        """Sizes of the axes."""
        return tuple(size_of_axis(axis) for axis in self.axes)

    def permuted(self, axes: Sequence[int]) -> StridedView:
        """Return the view with its axes in another order."""
        return replace(self, axes=tuple(self.axes[axis] for axis in axes))

    def reshaped(self, shape: Sequence[Size]) -> StridedView | None:
        """Return the view in another shape of as many elements, None when no strides describe it."""
        parts = regrouped(merged(factor for axis in self.axes for factor in axis), shape)
        return None if parts is None else replace(self, axes=parts)

    def broadcast(self, shape: Sequence[Size]) -> StridedView | None:
        """Return the view repeated to a shape, its axes aligned right; None when it does not broadcast to it."""
        missing = len(shape) - len(self.axes)
        if missing < 0:
            return None
        axes = []
        for axis, size in zip(((),) * missing + self.axes, shape, strict=True):
            if size_of_axis(axis) not in (1, size):
                return None
            axes.append(axis if size_of_axis(axis) == size else ((size, 0),))
        return replace(self, axes=tuple(axes))

    def sliced(self, axis: int, start: Size, stop: Size, step: int = 1) -> StridedView | None:
        """Return the view of every `step`-th position of an axis, None when no strides describe it."""
        found = _slice(self.axes[axis], start, stop, step)
        if found is None:
            return None
        offset, factors = found
        return StridedView(self.offset + offset, (*self.axes[:axis], factors, *self.axes[axis + 1 :]))

    def without(self, axis: int) -> StridedView:
        """Return the view less an axis of size 1."""
        return replace(self, axes=(*self.axes[:axis], *self.axes[axis + 1 :]))

    def repeated(self, axis: int, times: int, *, inner: bool) -> StridedView:
        """Return the view with an axis repeated, each element beside itself (`inner`) or the axis as a whole."""
        again: Factors = ((times, 0),) if times > 1 else ()
        factors = (*self.axes[axis], *again) if inner else (*again, *self.axes[axis])
        return replace(self, axes=(*self.axes[:axis], merged(factors), *self.axes[axis + 1 :]))


def whole(shape: Sequence[Size]) -> StridedView:
    """Return the view of a row-major tensor as it is."""
    axes = [() if size == 1 else ((size, math.prod(shape[axis + 1 :])),) for axis, size in enumerate(shape)]
    return StridedView(0, tuple(axes))


def size_of_axis(factors: Factors) -> Size:
    """Return the size of an axis."""
    return math.prod(size for size, _ in factors)


def merged(factors: Iterable[Factor]) -> Factors:
    """Return the factors with those of size 1 left out and neighbours that count on made one."""
    result: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return tuple(result)


def regrouped(factors: Factors, sizes: Sequence[Size]) -> tuple[Factors, ...] | None:
    """Return the factors shared out to axes of the given sizes, splitting them where needed; None when none fit."""
    left = list(factors)
    parts: list[Factors] = []
    for size in sizes:
        wanted: Size = size
        axis: list[Factor] = []
        while wanted != 1 and left:
            count, stride = left.pop(0)
            if (more := quotient(wanted, count)) is not None:
                axis.append((count, stride))
                wanted = more
            elif (inner := quotient(count, wanted)) is not None:
                axis.append((wanted, stride * inner))
                left.insert(0, (inner, stride))
                wanted = 1
            else:
                return None
        if wanted != 1:
            return None
        parts.append(merged(axis))
    return None if left else tuple(parts)


def _slice(factors: Factors, start: Size, stop: Size, step: int) -> tuple[Size, Factors] | None:
    length = plain(stop - start)
    if isinstance(length, int):
        if length <= 0:
            return None
        if length <= step:
            length, stop, step = 1, start + 1, 1
    if start == 0 and length == size_of_axis(factors) and step == 1:
        return 0, factors
    if not isinstance(length, int):
        return (start * factors[0][1], ((length, factors[0][1]),)) if len(factors) == 1 and step == 1 else None
    if len(factors) == 1:
        stride = factors[0][1]
        return start * stride, merged([(-(-length // step), stride * step)])
    (_, stride), *rest = factors
    inner = size_of_axis(tuple(rest))
    if not isinstance(start, int) or not isinstance(stop, int) or not isinstance(inner, int):
        return None
    if start // inner == (stop - 1) // inner:
        block = start // inner
        found = _slice(tuple(rest), start - block * inner, stop - block * inner, step)
        return None if found is None else (block * stride + found[0], found[1])
    if start % inner == 0 and stop % inner == 0 and step == 1:
        return start // inner * stride, merged([((stop - start) // inner, stride), *rest])
    return None


def view_through(call: relax.Call, inner: StridedView) -> StridedView | None:
    """Return the view that an operator makes of its first operand, None when the operator is none or has no strides."""
    name = str(call.op.name).removeprefix("relax.") if isinstance(call.op, tvm.ir.Op) else ""
    see = _VIEWS.get(name)
    return None if see is None else see(call, inner)


def _reshape(call: relax.Call, inner: StridedView) -> StridedView | None:
    shape = sizes_of(call)
    return None if shape is None else inner.reshaped(shape)


def _permute(call: relax.Call, inner: StridedView) -> StridedView:
    return inner.permuted(transposed_axes(call))


def _broadcast(call: relax.Call, inner: StridedView) -> StridedView | None:
    shape = sizes_of(call)
    return None if shape is None else inner.broadcast(shape)


def _strided_slice(call: relax.Call, inner: StridedView) -> StridedView | None:
    parts = [listed_sizes(arg) for arg in call.args[1:]]
    if any(part is None for part in parts):
        return None
    axes, starts, stops, *rest = (part or [] for part in parts)
    steps = rest[0] if rest else [1] * len(axes)
    view: StridedView | None = inner
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        if view is None or not isinstance(step, int) or step < 1 or not isinstance(axis, int):
            return None
        index = axis % len(inner.axes)
        size = inner.shape[index]
        first, last = _place(start, size), _place(stop, size)
        view = None if first is None or last is None else view.sliced(index, first, last, step)
    return view


def _place(end: Size, size: Size) -> Size | None:
    """Return an end of a slice as a place in an axis of some size, None where it is not known."""
    if isinstance(end, int) and isinstance(size, int):
        return min(max(end + size if end < 0 else end, 0), size)
    if isinstance(end, int) and end >= TO_THE_END:
        return size
    place = plain(end + size) if isinstance(end, int) and end < 0 else end
    return place if fits(0, place) and fits(place, size) else None


def _take(call: relax.Call, inner: StridedView) -> StridedView | None:
    """See `x[..., i, ...]` for a constant i, which removes the axis."""
    index = call.args[1]
    if call.attrs.axis is None or not is_constant(index) or static_shape(index) != ():
        return None
    axis = int(call.attrs.axis) % len(inner.axes)
    size, at = inner.shape[axis], int(array_of(index))
    if not isinstance(size, int) or not -size <= at < size:
        return None
    view = inner.sliced(axis, at % size, at % size + 1)
    return None if view is None else view.without(axis)


def _repeat(call: relax.Call, inner: StridedView) -> StridedView | None:
    if call.attrs.axis is None:
        return None
    return inner.repeated(int(call.attrs.axis) % len(inner.axes), int(call.attrs.repeats), inner=True)


def _tile(call: relax.Call, inner: StridedView) -> StridedView | None:
    repeats = [int(times) for times in call.attrs.repeats]
    view: StridedView | None = inner
    if len(repeats) > len(inner.axes):
        view = inner.reshaped([1] * (len(repeats) - len(inner.axes)) + list(inner.shape))
    first = len(inner.axes) - len(repeats)
    for position, times in enumerate(repeats):
        view = None if view is None else view.repeated(max(first, 0) + position, times, inner=False)
    return view


_VIEWS: Mapping[str, Callable[[relax.Call, StridedView], StridedView | None]] = {
    "reshape": _reshape,
    "expand_dims": _reshape,
    "squeeze": _reshape,
    "flatten": _reshape,
    "permute_dims": _permute,
    "broadcast_to": _broadcast,
    "strided_slice": _strided_slice,
    "take": _take,
    "repeat": _repeat,
    "tile": _tile,
}


def is_view(expr: tvm.ir.Expr | None) -> bool:
    """Return whether an expression is one of the operators that `view_through` sees through."""
    return is_op(expr, *_VIEWS)
