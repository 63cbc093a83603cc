"""Tensors of integers that count on along their axes: positions, distances, and what is added to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_op
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, plain, size_of, sizes_of

# Operations that are followed from a tensor back.
_DEPTH_MAX = 64


@dataclass(frozen=True)
class Counted:
    """A tensor of which element (i, j, ...) is `start` and each index times its axis's step; 0 of an axis of size 1."""

    start: Size
    steps: Shape

    def stretched(self, axes: int) -> Shape:
        """Return the steps with axes put in front, so that there are so many."""
        return (0,) * (axes - len(self.steps)) + self.steps


def counted(expr: tvm.ir.Expr, values: Mapping[relax.Var, tvm.ir.Expr], depth: int = 0) -> Counted | None:
    """Return how a tensor of int32 or int64 counts, by what variables are bound to; None where it is not known."""
    value = values.get(expr, expr) if isinstance(expr, relax.Var) else expr
    shape = sizes_of(value)
    if depth > _DEPTH_MAX or shape is None or dtype_of(value) not in ("int32", "int64"):
        return None
    if is_constant(value):
        array = array_of(value)
        return Counted(int(array.flat[0]), (0,) * array.ndim) if array.size == 1 else None
    if is_op(value, "arange"):
        start, _, step = (size_of(arg) for arg in value.args)
        return None if start is None or step is None else Counted(start, (0 if shape == (1,) else step,))
    if is_op(value, "shape_to_tensor") and isinstance(value.args[0], relax.ShapeExpr) and shape == (1,):
        size = size_of(value.args[0].values[0])
        return None if size is None else Counted(size, (0,))
    if is_op(value, "add", "subtract"):
        left, right = (counted(arg, values, depth + 1) for arg in value.args)
        if left is None or right is None:
            return None
        sign = 1 if is_op(value, "add") else -1
        steps = zip(left.stretched(len(shape)), right.stretched(len(shape)), strict=True)
        return Counted(plain(left.start + sign * right.start), tuple(plain(one + sign * other) for one, other in steps))
    if not is_op(value, "astype", "broadcast_to", "expand_dims", "permute_dims", "reshape", "squeeze"):
        return None
    inner, before = counted(value.args[0], values, depth + 1), sizes_of(value.args[0])
    if inner is None or before is None or is_op(value, "astype"):
        return inner
    if is_op(value, "broadcast_to"):
        return Counted(inner.start, inner.stretched(len(shape)))
    if is_op(value, "permute_dims"):
        axes = value.attrs.axes
        order = range(len(before))[::-1] if axes is None else [int(axis) for axis in axes]
        return Counted(inner.start, tuple(inner.steps[axis] for axis in order))
    # Only axes of size 1 come or go.
    if [size for size in shape if size != 1] != [size for size in before if size != 1]:
        return None
    steps_left = iter([step for step, size in zip(inner.steps, before, strict=True) if size != 1])
    return Counted(inner.start, tuple(0 if size == 1 else next(steps_left) for size in shape))
