"""`FunctionsOfPositions`: which tensors depend on nothing but counted integers, and what they are at given ones.

Integers that are counted, `arange`, sizes, and sums and differences of several of those, are roots. What is computed of
one root and constants, element by element or by moving axes, is a function of it: along each axis of the tensor it
depends on one axis of the root, or on none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import ELEMENTWISE, dtype_of, is_constant, is_op, shape_of
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, group_axes, sizes_of
from relaxtune.pipeline.passes.symbolic.intervals import Interval, interval_after, interval_of

# Positions that are thought of where an axis has no maximum; and at most, where each has one.
POSITIONS = 4096
_POSITIONS_MAX = 4 * POSITIONS
# More than any position is.
_LARGEST = 2**62
_COSTLY = ("cos", "sin", "exp", "log", "power", "sqrt", "rsqrt", "tanh")
_BY_ELEMENT = (
    *ELEMENTWISE,
    *("cos", "sin", "floor", "ceil", "round", "trunc", "sign", "floor_divide", "floor_mod", "mod", "where"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("logical_and", "logical_or", "logical_not"),
)
# Of each axis of a tensor, which axis of a root it is; None where what is there does not depend on the root.
Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Root:
    """Integers that differ along `axes`, from `low` to `high`; lower and higher ones, too, where these are `open`."""

    low: int
    high: int
    open: tuple[bool, bool]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Function:
    """Along which axes of a root a tensor depends on it, and whether that costs something to compute."""

    axes: Axes
    costly: bool


class FunctionsOfPositions:
    """The functions of positions in a graph; `maxima` are the largest sizes of symbolic axes, by name."""

    def __init__(self, graph: Graph, maxima: Mapping[str, int]) -> None:
        self._graph, self._maxima = graph, maxima
        # Variable -> what is known of its integers.
        self.roots: dict[relax.Var, Root] = {}
        # Variable -> root -> how it depends on that; the root that is nearest to it is the last.
        self.functions: dict[tvm.ir.Expr, dict[relax.Var, Function]] = {}
        for binding in graph.bindings:
            found = self._functions_of(binding)
            if not found and (root := self._root(binding.var)) is not None:
                self.roots[binding.var] = root
                axes = tuple(axis if axis in root.axes else None for axis in range(len(shape_of(binding.var) or ())))
                found = {binding.var: Function(axes, costly=False)}
            if found:
                self.functions[binding.var] = found

    def last_costly(self) -> dict[relax.Var, relax.Var]:
        """Return the tensors that cost something and are read by what depends on more than their root, with that."""
        found: dict[relax.Var, relax.Var] = {}
        for var, functions in self.functions.items():
            root = next(reversed(functions))
            readers = self._graph.readers(var)
            if functions[root].costly and any(
                reader == var or root not in self.functions.get(reader, ()) for reader in readers
            ):
                found[var] = root
        return found

    def shape(self, var: relax.Var, root: relax.Var, positions: tirx.Expr | int | None = None) -> list[tirx.Expr | int]:
        """Return the shape of a tensor without copies: a symbolic axis that the root does not have has one place.

        With `positions`, the root is so many along its first axis, and one along others.
        """
        shape: list[tirx.Expr | int] = []
        for axis, size in zip(self.functions[var][root].axes, shape_of(var) or (), strict=True):
            if axis is None or positions is None:
                shape.append(1 if axis is None and not isinstance(size, tirx.IntImm) else size)
            else:
                shape.append(positions if axis == self.roots[root].axes[0] else 1)
        return shape

    def computed(
        self,
        var: tvm.ir.Expr,
        root: relax.Var,
        made: dict[tuple[relax.Var, relax.Var], tvm.ir.Expr],
        bind: Callable[[relax.Var, tvm.ir.Expr], relax.Var],
        positions: int | None = None,
    ) -> tvm.ir.Expr:
        """Return a tensor computed again, of `shape`, by values of the root that are in `made`; all others are added.

        `bind` binds what a variable is to a new one.
        """
        if var not in self.functions:
            return self._number(var)
        if (var, root) not in made:
            value = self._graph.values[var]
            operands = [self.computed(one, root, made, bind, positions) for one in _operands(value)]
            if is_op(value, "reshape", "squeeze", "broadcast_to"):
                move = relax.op.broadcast_to if is_op(value, "broadcast_to") else relax.op.reshape
                again = move(operands[0], relax.ShapeExpr(self.shape(var, root, positions)))
            elif is_op(value, "concat"):
                again = relax.op.concat(operands, value.attrs.axis)
            else:
                again = relax.Call(value.op, operands, value.attrs)
            made[var, root] = bind(var, again)
        return made[var, root]

    def settles(self, var: relax.Var, root: relax.Var) -> bool:
        """Return whether a tensor is the same for all integers below those that are known of its root, and above."""
        known = self.roots[root]
        beyond = ((-_LARGEST, known.low), (known.high, _LARGEST))
        found = (
            self._interval(var, root, {root: Interval(*ends, settled=False)})
            for is_open, ends in zip(known.open, beyond, strict=True)
            if is_open
        )
        return all(one is not None and one.settled for one in found)

    def _interval(
        self, expr: tvm.ir.Expr, root: relax.Var, known: dict[tvm.ir.Expr, Interval | None]
    ) -> Interval | None:
        """Return between which numbers a tensor is, by what `known` has of the root; all others are added."""
        if expr not in known and expr not in self.functions:
            known[expr] = interval_of(self._number(expr))
        elif expr not in known:
            value = self._graph.values[expr]
            operands = [self._interval(one, root, known) for one in _operands(value)]
            sure = [one for one in operands if one is not None]
            known[expr] = interval_after(value, sure) if len(sure) == len(operands) else None
        return known[expr]

    def _root(self, var: relax.Var) -> Root | None:
        """Return integers as a root, None where the least and the largest are not known or are one number."""
        bounds, shape = self._graph.known.bounds_of(var), sizes_of(var)
        if bounds is None or not shape or any(isinstance(size, int) and size != 1 for size in shape):
            return None
        if self._graph.known.of(var) is not None:
            return None
        axes = tuple(axis for axis, size in enumerate(shape) if size != 1) or (0,)
        (low, from_low), (high, to_high) = self._extreme(bounds[0], -1), self._extreme(bounds[1], 1)
        least, most = (low, high) if high - low < _POSITIONS_MAX else (1 - POSITIONS, POSITIONS - 1)
        known = max(low, least), min(high, most)
        is_open = not from_low or known[0] > low, not to_high or known[1] < high
        return Root(*known, is_open, axes) if known[0] <= known[1] else None

    def _extreme(self, size: Size, sign: int) -> tuple[int, bool]:
        """Return the least (`sign` -1) or largest (1) that a size can be, and whether that is certain."""
        if isinstance(size, int):
            return size, True
        total, certain = 0, True
        for names, factor in size.terms:
            # No axis is negative: at least, or at most, a term is nothing.
            if not names or factor * sign > 0:
                certain = certain and all(name in self._maxima for name in names)
                total += factor * math.prod(self._maxima.get(name, POSITIONS) for name in names)
        return total, certain

    def _functions_of(self, binding: relax.Binding) -> dict[relax.Var, Function]:
        """Return on which roots alone a tensor depends."""
        value, shape = binding.value, sizes_of(binding.var)
        operands = _operands(value)
        parts = [self.functions[one] for one in operands if one in self.functions]
        if shape is None or not parts:
            return {}
        if any(one not in self.functions and self._number(one) is None for one in operands):
            return {}
        found: dict[relax.Var, Function] = {}
        for root in parts[0]:
            axes = self._axes(value, shape, root) if all(root in part for part in parts) else None
            own = sizes_of(root) or ()
            # A copy along an axis of the root, or a join, does not depend on it place by place.
            if axes is not None and all(
                axis is None or size == own[axis] for axis, size in zip(axes, shape, strict=True)
            ):
                found[root] = Function(axes, is_op(value, *_COSTLY) or any(part[root].costly for part in parts))
        return found

    def _number(self, expr: tvm.ir.Expr) -> tvm.ir.Expr | None:
        """Return what is the same at all sizes as a constant."""
        if is_constant(expr):
            return expr
        number = self._graph.known.of(expr)
        return None if number is None else relax.const(number, dtype_of(expr))

    def _axes(self, value: relax.Call, shape: Shape, root: relax.Var) -> Axes | None:
        """Return along which axes an operation's result depends on a root, None where it does otherwise."""
        operands = [one for one in _operands(value) if one in self.functions]
        own = self.functions[operands[0]][root].axes
        if is_op(value, "permute_dims"):
            return tuple(own[int(axis)] for axis in value.attrs.axes)
        if is_op(value, "take"):
            return (*own, *[None] * (len(shape) - len(own)))
        if is_op(value, "expand_dims"):
            new = {int(axis) % len(shape) for axis in value.attrs.axis}
            rest = iter(own)
            return tuple(None if axis in new else next(rest) for axis in range(len(shape)))
        if is_op(value, "reshape", "squeeze"):
            return _regrouped(own, sizes_of(operands[0]) or (), shape)
        if is_op(value, "concat") and not isinstance(shape[int(value.attrs.axis)], int):
            return None
        return self._axes_by_element(value, shape, root)

    def _axes_by_element(self, value: relax.Call, shape: Shape, root: relax.Var) -> Axes | None:
        merged: list[int | None] = []
        for at in range(-len(shape), 0):
            axes: set[int | None] = set()
            sizes: set[Size] = set()
            for one in _operands(value):
                own = self.functions[one][root].axes if one in self.functions else ()
                axes |= {own[at]} if len(own) >= -at else set()
                sizes |= {size[at]} if len(size := sizes_of(one) or ()) >= -at else set()
            axes -= {None}
            if len(axes) > 1 or (axes and any(isinstance(size, int) and size != 1 for size in sizes)):
                return None
            merged.append(axes.pop() if axes else None)
        found = [axis for axis in merged if axis is not None]
        return tuple(merged) if len(found) == len(set(found)) else None


def _operands(value: tvm.ir.Expr) -> Sequence[tvm.ir.Expr]:
    """Return the tensors that an operation computes with; none where it may not be computed again from others."""
    if is_op(value, *_BY_ELEMENT):
        return list(value.args)
    if is_op(value, "permute_dims", "expand_dims", "reshape", "squeeze", "broadcast_to"):
        return [value.args[0]]
    if is_op(value, "concat") and isinstance(value.args[0], relax.Tuple):
        return list(value.args[0].fields)
    axis = value.attrs.axis if is_op(value, "take") and is_constant(value.args[0]) else None
    return [] if axis is None or int(axis) != 0 else list(value.args)


def _regrouped(own: Axes, before: Shape, after: Shape) -> Axes | None:
    """Return the axes of a reshape, in which those of the root stay as they are."""
    groups = group_axes(before, after)
    found: list[int | None] = [None] * len(after)
    if groups is None or any(axis is not None and size == 1 for axis, size in zip(own, before, strict=True)):
        return None
    for inputs, outputs in groups:
        axes = [own[axis] for axis in inputs if own[axis] is not None]
        if axes and (len(inputs), len(outputs)) != (1, 1):
            return None
        found[outputs[0]] = axes[0] if axes else None
    return tuple(found)
