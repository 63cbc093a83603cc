"""`KnownValues`: what is known of tensors at all sizes: their one number, bounds of integers, integers that count.

`ConstantOfShape` fills tensors with one number. A tensor of symbolic shape is no constant, so that folding leaves a
mask of ones in the graph, with its comparisons.
Comparisons of positions with sizes are known, too, where they come out the same at all sizes: the one token of a decode
step, at place `past`, sees each of the `past + 1` keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_filled, is_op
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, fits, group_axes, plain, size_of, sizes_of

# A score this low leaves its key out: the weight is exp(-10000) of a visible key's, 0 in float32.
MASKED = -1e4
# Elementwise operation -> what it makes of numbers.
COMPUTED: Mapping[str, Callable[..., np.generic]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "equal": np.equal,
    "not_equal": np.not_equal, "greater": np.greater, "greater_equal": np.greater_equal, "less": np.less,
    "less_equal": np.less_equal, "logical_not": np.logical_not, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "negative": np.negative, "maximum": np.maximum, "minimum": np.minimum,
    "astype": np.positive, "isnan": np.isnan, "isinf": np.isinf,
    "where": lambda condition, chosen, other: chosen if condition else other,
}  # fmt: skip
# A quotient of integers may be infinite.
_COMPUTED = tuple(COMPUTED.keys() - {"divide"})
_MOVED = ("broadcast_to", "expand_dims", "permute_dims", "reshape", "squeeze", "strided_slice")
_GATHERED = ("take", "gather_elements", "gather_nd")
_FILLED = {"ones": 1, "ones_like": 1, "zeros": 0, "zeros_like": 0}
# Comparison -> whether its operands change places to make one of "less" of it, and by how much the right one is larger.
_LESS: Mapping[str, tuple[bool, int]] = {
    "less": (False, 1),
    "less_equal": (False, 0),
    "greater": (True, 1),
    "greater_equal": (True, 0),
}
_EXTREMES = ("minimum", "maximum")
# Operations that are followed from a tensor back.
_DEPTH_MAX = 64
# The least and the largest of a tensor's integers.
Bounds = tuple[Size, Size]
Fact = TypeVar("Fact")


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


class KnownValues:
    """Facts about tensors, by the bindings of a function and by numbers that are `known` of its inputs."""

    def __init__(
        self, values: Mapping[relax.Var, tvm.ir.Expr], known: Mapping[relax.Var, np.generic] | None = None
    ) -> None:
        self._values = values
        self._uniform: dict[relax.Var, np.generic | None] = dict(known or {})
        self._bounds: dict[relax.Var, Bounds | None] = {}
        self._counts: dict[relax.Var, Count | None] = {}

    def _followed(
        self,
        expr: tvm.ir.Expr,
        depth: int,
        known: dict[relax.Var, Fact | None],
        rule: Callable[[tvm.ir.Expr, int], Fact | None],
    ) -> Fact | None:
        """Return a fact about a tensor: what is known of it, else what the rule says of its binding."""
        if not isinstance(expr, relax.Var):
            return rule(expr, depth)
        if expr not in known and depth < _DEPTH_MAX and expr in self._values:
            known[expr] = rule(self._values[expr], depth)
        return known.get(expr)

    def of(self, expr: tvm.ir.Expr, depth: int = 0) -> np.generic | None:
        """Return the number that every element of a tensor is, None where that is not known."""
        return self._followed(expr, depth, self._uniform, self._uniform_of)

    def _uniform_of(self, value: tvm.ir.Expr, depth: int) -> np.generic | None:
        if is_constant(value):
            array = array_of(value)
            return array.flat[0] if is_filled(array) else None
        if not isinstance(value, relax.Call) or not dtype_of(value).startswith(("bool", "int", "uint", "float")):
            return None
        filled: np.generic | int | bool | None = None
        if is_op(value, *_FILLED):
            filled = _FILLED[value.op.name.removeprefix("relax.")]
        elif is_op(value, "full", "full_like"):
            filled = self.of(value.args[1], depth + 1)
        elif is_op(value, *_MOVED, *_GATHERED, "astype"):
            filled = self.of(value.args[0], depth + 1)
        elif is_op(value, *_COMPUTED):
            operands = [self.of(arg, depth + 1) for arg in value.args]
            if is_op(value, "multiply") and 0 in operands and "float" not in dtype_of(value):
                filled = 0
            elif any(operand is None for operand in operands):
                filled = self._compared(value, depth) if is_op(value, *_LESS) else None
            else:
                with np.errstate(all="ignore"):
                    filled = COMPUTED[value.op.name.removeprefix("relax.")](*operands)
        if filled is None:
            return None
        with np.errstate(all="ignore"):
            rounded: np.generic = np.dtype(dtype_of(value)).type(filled)
        return rounded

    def _compared(self, value: relax.Call, depth: int) -> bool | None:
        """Return what a comparison of integers is at all sizes."""
        if is_op(value, "less") and self._counts_some(value.args[0]):
            number = self.of(value.args[1])
            if number is not None and 0 < float(number) <= 1:
                return False
        swapped, more = _LESS[value.op.name.removeprefix("relax.")]
        left, right = (self.bounds_of(arg, depth + 1) for arg in value.args)
        if left is None or right is None:
            return None
        (low, high), (other_low, other_high) = (right, left) if swapped else (left, right)
        if fits(high + more, other_low):
            return True
        return False if fits(other_high + 1 - more, low) else None

    def _counts_some(self, expr: tvm.ir.Expr) -> bool:
        """Return whether a tensor counts along the last axis which keys are no further than a query, and one is.

        A causal mask hides no row whole; exporters ask in each layer how many keys a query sees.
        """
        value = self._value(expr)
        data = self._value(value.args[0]) if is_op(value, "sum") else None
        last = (-1, len(sizes_of(data) or ()) - 1) if is_op(data, "astype") else ()
        if not is_op(data, "astype") or len(value.attrs.axis or ()) != 1 or int(value.attrs.axis[0]) not in last:
            return False
        seen, sizes = self.of(data.args[0]), sizes_of(data)
        if seen is not None and seen and sizes:
            return fits(1, sizes[-1]) or sizes[-1] in sizes[:-1]
        mask = self._value(data.args[0])
        while is_op(mask, "broadcast_to") and (sizes_of(mask) or (0,))[-1] == (sizes_of(mask.args[0]) or (1,))[-1]:
            mask = self._value(mask.args[0])
        sizes = sizes_of(mask) if is_op(mask, "less_equal", "greater_equal") else None
        if not sizes or not (fits(1, sizes[-1]) or sizes[-1] in sizes[:-1]):
            return False
        keys, queries = mask.args if is_op(mask, "less_equal") else mask.args[::-1]
        *others, along = sizes_of(keys) or (0,)
        if along != sizes[-1] or any(size != 1 for size in others):
            return False
        lowest, query = self.bounds_of(keys), self.bounds_of(queries)
        while is_op(keys := self._value(keys), *_MOVED) and not is_op(keys, "strided_slice"):
            keys = keys.args[0]
        return is_op(keys, "arange") and lowest is not None and query is not None and fits(lowest[0], query[0])

    def _value(self, expr: tvm.ir.Expr) -> tvm.ir.Expr:
        return self._values.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def bounds_of(self, expr: tvm.ir.Expr, depth: int = 0) -> Bounds | None:
        """Return between which sizes the integers of a tensor are, None where that is not known."""
        return self._followed(expr, depth, self._bounds, self._bounds_of_value)

    def _bounds_of_value(self, value: tvm.ir.Expr, depth: int) -> Bounds | None:
        if dtype_of(value) not in ("int32", "int64"):
            return None
        if is_constant(value):
            array = array_of(value)
            return (int(array.min()), int(array.max())) if array.size else None
        if is_op(value, "arange"):
            start, stop, step = (size_of(arg) for arg in value.args)
            return (start, plain(stop - 1)) if start is not None and stop is not None and step == 1 else None
        if is_op(value, "shape_to_tensor"):
            count = self.count_of(value)
            return None if count is None else (count.start, count.start)
        if is_op(value, *_MOVED, "astype"):
            return self.bounds_of(value.args[0], depth + 1)
        if is_op(value, "add", "subtract", "multiply"):
            left, right = (self.bounds_of(arg, depth + 1) for arg in value.args)
            if left is None or right is None:
                return None
            if is_op(value, "subtract"):
                return plain(left[0] - right[1]), plain(left[1] - right[0])
            if is_op(value, "add"):
                return plain(left[0] + right[0]), plain(left[1] + right[1])
            if fits(0, left[0]) and fits(0, right[0]):
                return plain(left[0] * right[0]), plain(left[1] * right[1])
        return None

    def count_of(self, expr: tvm.ir.Expr, depth: int = 0) -> Count | None:
        """Return how the int32 or int64 of a tensor count, None where they do not, or where that is not known."""
        return self._followed(expr, depth, self._counts, self._count_of_value)

    def _count_of_value(self, value: tvm.ir.Expr, depth: int) -> Count | None:
        shape = sizes_of(value)
        if shape is None or dtype_of(value) not in ("int32", "int64"):
            return None
        number = self.of(value)
        count = self._count_by_operation(value, shape, depth) if number is None else Count(int(number), ())
        if count is None:
            return None
        steps = zip(count.broadcast(len(shape)).steps, shape, strict=True)
        return Count(count.start, tuple(0 if size == 1 else step for step, size in steps))

    def _count_by_operation(self, value: tvm.ir.Expr, shape: Shape, depth: int) -> Count | None:
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
            inner, before = self.count_of(value.args[0], depth + 1), sizes_of(value.args[0])
            if inner is None or before is None or is_op(value, "astype", "broadcast_to"):
                return inner
            return _regrouped(inner, before, shape)
        if is_op(value, "add", "subtract", "multiply", "where", *_EXTREMES):
            return self._count_of_two(value, depth)
        return None

    def _count_of_two(self, value: relax.Call, depth: int) -> Count | None:
        known = self.of(value.args[0]) if is_op(value, "where") else None
        if known is not None:
            return self.count_of(value.args[1 if known else 2], depth + 1)
        left, right = (self.count_of(arg, depth + 1) for arg in value.args[-2:])
        if left is None or right is None:
            return None
        if is_op(value, "add", "subtract"):
            return left.plus(right, 1 if is_op(value, "add") else -1)
        if is_op(value, "multiply"):
            counts, factor = (right, left) if any(right.steps) else (left, right)
            return None if any(factor.steps) else Count(0, ()).plus(counts, factor.start)
        if is_op(value, *_EXTREMES):
            return self._count_of_extreme(value, left, right)
        rank = max(len(left.steps), len(right.steps))
        return left if left.broadcast(rank) == right.broadcast(rank) else None

    def _count_of_extreme(self, value: relax.Call, left: Count, right: Count) -> Count | None:
        """Return the count of the operand that is the lower or the higher one everywhere."""
        ends, other_ends = (self.bounds_of(arg) for arg in value.args)
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
