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

from relaxtune.pipeline.passes.kit.ir import is_op, transposed_axes
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, listed_sizes, quotient, sizes_of

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

    def sliced(self, axis: int, start: int, stop: int, step: int = 1) -> StridedView | None:
        """Return the view of every `step`-th position of an axis, None when no strides describe it."""
        factors, length = self.axes[axis], stop - start
        if length == size_of_axis(factors) and step == 1:
            return self
        if length <= 0 or len(factors) != 1:
            return None
        stride = factors[0][1]
        taken = merged([(-(-length // step), stride * step)])
        return StridedView(self.offset + start * stride, (*self.axes[:axis], taken, *self.axes[axis + 1 :]))


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


def view_through(call: relax.Call, inner: StridedView) -> StridedView | None:
    """Return the view that an operator makes of its first operand, None when the operator is none or has no strides."""
    name = str(call.op.name).removeprefix("relax.") if isinstance(call.op, tvm.ir.Op) else ""
    see = _VIEWS.get(name)
    return None if see is None else see(call, inner)


def _strided_slice(call: relax.Call, inner: StridedView) -> StridedView | None:
    """See a slice of axes of known sizes, at places that are numbers."""
    parts = [listed_sizes(arg) for arg in call.args[1:]]
    view: StridedView | None = None if None in parts else inner
    for axis, start, stop, *steps in zip(*(part or () for part in parts), strict=False):
        size = inner.shape[axis] if isinstance(axis, int) else None
        if view is None or not isinstance(size, int) or not isinstance(start, int) or not isinstance(stop, int):
            return None
        step = steps[0] if steps else 1
        first, last, _ = slice(start, stop).indices(size)
        view = view.sliced(axis, first, last, step) if isinstance(step, int) and step > 0 else None
    return view


def _to_its_shape(call: relax.Call, inner: StridedView) -> StridedView | None:
    shape = sizes_of(call)
    if shape is None:
        return None
    return inner.broadcast(shape) if is_op(call, "broadcast_to") else inner.reshaped(shape)


_VIEWS: Mapping[str, Callable[[relax.Call, StridedView], StridedView | None]] = {
    **dict.fromkeys(("reshape", "expand_dims", "squeeze", "flatten", "broadcast_to"), _to_its_shape),
    "permute_dims": lambda call, inner: inner.permuted(transposed_axes(call)),
    "strided_slice": _strided_slice,
}


def is_view(expr: tvm.ir.Expr | None) -> bool:
    """Return whether an expression is one of the operators that `view_through` sees through."""
    return is_op(expr, *_VIEWS)
