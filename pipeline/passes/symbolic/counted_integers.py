"""`CountedIntegers`: which tensors hold integers that grow evenly along each axis, at all sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_op
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, fits, plain, size_of, sizes_of
from relaxtune.pipeline.passes.symbolic.symbolic_moves import group_axes

# Operations that are followed from a tensor back.
_DEPTH_MAX = 64
_EXTREMES = ("minimum", "maximum")


@dataclass(frozen=True)
class Count:
    """The integers `start + sum(step * place)` over the axes of a tensor; along an axis of size 1 the step is 0."""

    start: Size
    steps: tuple[Size, ...]

    def broadcast(self, rank: int) -> Count:
        """Return the count of a tensor that is broadcast to a rank, or has it."""
        return Count(self.start, (*[0] * (rank - len(self.steps)), *self.steps))

    def plus(self, other: Count, factor: Size = 1) -> Count:
        """Return the count of a sum, in which the other tensor has a factor; ranks may differ."""
        rank = max(len(self.steps), len(other.steps))
        steps = zip(self.broadcast(rank).steps, other.broadcast(rank).steps, strict=True)
        return Count(plain(self.start + factor * other.start), tuple(plain(a + factor * b) for a, b in steps))


class CountedIntegers:
    """How the integers of a graph's tensors count."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._counts: dict[relax.Var, Count | None] = {}

    def of(self, expr: tvm.ir.Expr, depth: int = 0) -> Count | None:
        """Return how the int32 or int64 of a tensor count, None where they do not, or where that is not known."""
        if isinstance(expr, relax.Var) and expr in self._counts:
            return self._counts[expr]
        shape = sizes_of(expr)
        if shape is None or depth == _DEPTH_MAX or dtype_of(expr) not in ("int32", "int64"):
            return None
        number = self._graph.uniform.of(expr)
        count = self._count_of(expr, shape, depth) if number is None else Count(int(number), ())
        if count is not None:
            steps = zip(count.broadcast(len(shape)).steps, shape, strict=True)
            count = Count(count.start, tuple(0 if size == 1 else step for step, size in steps))
        if isinstance(expr, relax.Var):
            self._counts[expr] = count
        return count

    def _count_of(self, expr: tvm.ir.Expr, shape: Shape, depth: int) -> Count | None:
        value = self._graph.values.get(expr, expr) if isinstance(expr, relax.Var) else expr
        if is_constant(value):
            return count_of_array(array_of(value))
        if is_op(value, "arange"):
            start, _, step = map(size_of, value.args)
            return None if start is None or step is None else Count(start, (step,))
        if is_op(value, "shape_to_tensor"):
            sizes = list(value.args[0].values) if isinstance(value.args[0], relax.ShapeExpr) else []
            size = size_of(sizes[0]) if len(sizes) == 1 else None
            return None if size is None else Count(size, ())
        if is_op(value, "astype", "broadcast_to", "expand_dims", "squeeze", "reshape"):
            inner, before = self.of(value.args[0], depth + 1), sizes_of(value.args[0])
            if inner is None or before is None or is_op(value, "astype", "broadcast_to"):
                return inner
            return _regrouped(inner, before, shape)
        if is_op(value, "add", "subtract", "multiply", "where", *_EXTREMES):
            return self._of_two(value, depth)
        return None

    def _of_two(self, value: relax.Call, depth: int) -> Count | None:
        known = self._graph.uniform.of(value.args[0]) if is_op(value, "where") else None
        if known is not None:
            return self.of(value.args[1 if known else 2], depth + 1)
        left, right = (self.of(arg, depth + 1) for arg in value.args[-2:])
        if left is None or right is None:
            return None
        if is_op(value, "add", "subtract"):
            return left.plus(right, 1 if is_op(value, "add") else -1)
        if is_op(value, "multiply"):
            counts, factor = (right, left) if any(right.steps) else (left, right)
            return None if any(factor.steps) else Count(0, ()).plus(counts, factor.start)
        if is_op(value, *_EXTREMES):
            return self._extreme(value, left, right)
        rank = max(len(left.steps), len(right.steps))
        return left if left.broadcast(rank) == right.broadcast(rank) else None

    def _extreme(self, value: relax.Call, left: Count, right: Count) -> Count | None:
        """Return the count of the operand that is the lower or the higher one everywhere."""
        ends, other_ends = (self._graph.uniform.bounds_of(arg) for arg in value.args)
        if ends is None or other_ends is None:
            return None
        if fits(ends[1], other_ends[0]):
            return left if is_op(value, "minimum") else right
        if fits(other_ends[1], ends[0]):
            return right if is_op(value, "minimum") else left
        return None


def _regrouped(count: Count, before: Shape, after: Shape) -> Count | None:
    """Return the count of a reshape that takes axes apart, None where it merges some along which integers grow."""
    if not any(count.steps):
        return Count(count.start, ())
    groups = group_axes(before, after)
    if groups is None or any(len(inputs) > 1 for inputs, _ in groups):
        return None
    steps: list[Size] = [0] * len(after)
    for (axis,), outputs in groups:
        for place, output in enumerate(outputs):
            steps[output] = plain(count.steps[axis] * math.prod(after[other] for other in outputs[place + 1 :]))
    return Count(count.start, tuple(steps))


def count_of_array(array: np.ndarray) -> Count | None:
    """Return how the integers of an array count, None where they do not."""
    if array.size == 0:
        return None
    start, origin = int(array.flat[0]), (0,) * array.ndim
    steps = tuple(
        int(array[(*origin[:axis], 1, *origin[axis + 1 :])]) - start if size > 1 else 0
        for axis, size in enumerate(array.shape)
    )
    expected = np.full(array.shape, start)
    for axis, step in enumerate(steps):
        expected = expected + step * np.arange(array.shape[axis]).reshape([-1, *[1] * (array.ndim - axis - 1)])
    return Count(start, steps) if np.array_equal(array, expected) else None
