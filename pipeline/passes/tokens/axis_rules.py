"""Axes of the result of an operation, by the axes of its operands: where rows, places and padding lie in its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import ELEMENTWISE, array_of, is_constant, is_op, number_of, transposed_axes
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, sizes_of
from relaxtune.pipeline.passes.tokens.axes import (
    Axes,
    Axis,
    Factor,
    Kind,
    MixesTokensError,
    Pad,
    broadcast,
    degraded,
    is_clean,
    is_low,
    kinds,
    plain_axes,
    regrouped,
)

OF_ELEMENTS = (
    *ELEMENTWISE,
    *("where", "equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "logical_not", "logical_and"),
    *("logical_or", "isnan", "isinf", "sin", "cos", "floor", "ceil", "round", "sign", "mod", "floor_mod"),
)
_REDUCTIONS = ("sum", "mean", "max", "min", "prod", "variance", "std", "argmax", "argmin")
NORMS = ("nn.layer_norm", "nn.rms_norm")
# Places of a row that a graph may read one by one: [CLS], say.
_KEPT_MAX = 4


@dataclass
class Followed:
    """Known facts of a graph."""

    # Variable -> its axes, as it lies in the padded form. Others are the graph's everywhere.
    axes: dict[relax.Var, Axes] = field(default_factory=dict)
    packed: dict[relax.Var, int] = field(default_factory=dict)  # -> how many leading axes the tokens take the place of.
    # Places of a row that are computed even where the mask hides them; from the end where negative.
    kept: set[int] = field(default_factory=set)

    def of(self, expr: tvm.ir.Expr) -> Axes | None:
        """Return the axes of a tensor, None where nothing is known."""
        return self.axes.get(expr) if isinstance(expr, relax.Var) else None


class AxisRules:
    """The rules of a graph's operations.

    `found` knows the operands; places that an operation reads one by one are added to its `kept`. `sizes` are the rows
    and places of the mask.
    """

    def __init__(self, graph: Graph, found: Followed, sizes: tuple[Size, Size]) -> None:
        self._graph = graph
        self._found = found
        self._sizes = sizes
        self._rules: dict[str, Callable[[relax.Call], Axes | None]] = {
            **dict.fromkeys(OF_ELEMENTS, self._elementwise),
            **dict.fromkeys(_REDUCTIONS, self._reduction),
            **dict.fromkeys(NORMS, self._norm),
            "matmul": self._matmul, "nn.softmax": self._softmax,
            "reshape": self._regrouped, "squeeze": self._regrouped, "expand_dims": self._expand,
            "permute_dims": lambda value: tuple(map(self._data(value).__getitem__, transposed_axes(value))),
            "broadcast_to": lambda value: broadcast("broadcast_to", shape_of(value), [self._data(value)]),
            "strided_slice": self._slice, "take": self._take, "concat": self._concat,
        }  # fmt: skip

    def apply(self, value: tvm.ir.Expr, read: Sequence[relax.Var]) -> Axes | None:
        """Return the axes of what an operation makes of some variables, None where it is the graph's everywhere.

        Raises `MixesTokensError`: it mixes tokens and padding, or rows, or may do so.
        """
        is_operator = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
        rule = self._rules.get(str(value.op.name).removeprefix("relax.")) if is_operator else None
        if rule is not None:
            return rule(value)
        if not all(is_clean(self._found.axes[one]) for one in read):
            raise MixesTokensError("its effect on tokens is unknown")
        return None

    def _elementwise(self, value: relax.Call) -> Axes:
        operands: list[Axes | float | None] = []
        for one in value.args:
            if is_constant(one):
                operands.append(number_of(one, value))
            else:
                number = isinstance(one, tirx.FloatImm | tirx.IntImm)
                operands.append(float(one.value) if number else self._found.of(one))
        return broadcast(str(value.op.name).removeprefix("relax."), shape_of(value), operands)

    def _reduction(self, value: relax.Call) -> Axes | None:
        axes = self._data(value)
        read = axes_read(value)
        for axis in read:
            for factor in axes[axis]:
                clean = factor.is_clean or (is_op(value, "max") and is_low(factor.pad))
                if factor.kind is Kind.PLACE and not clean:
                    raise MixesTokensError(
                        f"it takes the {value.op.name.removeprefix('relax.')} over the sequence, padding included"
                    )
                if factor.kind is Kind.BATCH and not is_clean(axes):
                    raise MixesTokensError("it mixes the rows of the batch")
        kept = [() if at in read else axis for at, axis in enumerate(degraded(axes))]
        if not bool(value.attrs.keepdims):
            kept = [axis for at, axis in enumerate(kept) if at not in read]
        return None if is_clean(tuple(kept)) else tuple(kept)

    def _norm(self, value: relax.Call) -> Axes:
        axes = self._data(value)
        for axis in axes_read(value):
            self._needs_clean(axes[axis], "it normalises over the sequence")
        return degraded(axes)

    def _softmax(self, value: relax.Call) -> Axes:
        axes = self._data(value)
        (over,) = axes_read(value)
        result = list(degraded(axes))
        if len(axes[over]) == 1 and axes[over][0].kind is Kind.PLACE and is_low(axes[over][0].pad):
            result[over] = (Factor(Kind.PLACE, axes[over][0].size, 0.0),)
        else:
            self._needs_clean(axes[over], "its softmax reads padding that no mask hides")
        return tuple(result)

    def _matmul(self, value: relax.Call) -> Axes:
        left, right = value.args
        shape = shape_of(value)
        if any(len(sizes_of(one) or ()) < 2 for one in (left, right)):
            raise MixesTokensError("it multiplies a vector by tokens")
        a, b = (self._found.of(one) or plain_axes(sizes_of(one) or ()) for one in (left, right))
        self._contract(a[-1], b[-2])
        outer = broadcast("matmul", shape[:-2], [a[:-2], b[:-2]])
        result = (*outer, a[-2], b[-1])
        if sum(kinds(axis).count(Kind.BATCH) for axis in result) > 1:
            raise MixesTokensError("it combines each row of the batch with each other row")
        return degraded(result)

    def _contract(self, a: Axis, b: Axis) -> None:
        """Check that a sum over two axes is the graph's."""
        for axis, other in ((a, b), (b, a)):
            for at, factor in enumerate(axis):
                padding = other[at].pad if len(other) == len(axis) and other[at].kind is factor.kind else Pad.EXACT
                if not factor.is_clean and padding != 0.0:
                    raise MixesTokensError("it sums over the sequence, padding included")

    def _regrouped(self, value: relax.Call) -> Axes | None:
        return self._moved(value, regrouped(self._data(value), shape_of(value)))

    def _expand(self, value: relax.Call) -> Axes:
        axes = list(self._data(value))
        rank = len(axes) + len(value.attrs.axis)
        for axis in sorted(positive(axis, rank) for axis in value.attrs.axis):
            axes.insert(axis, ())
        return tuple(axes)

    def _slice(self, value: relax.Call) -> Axes | None:
        axes, before, after = list(self._data(value)), shape_of(value.args[0]), shape_of(value)
        bounds = [numbers_of(one) for one in value.args[1:5]]
        sliced = bounds[0]
        if sliced is None:
            return self._moved(value, None)
        starts, ends = bounds[1], bounds[2]
        for at, given in enumerate(sliced):
            axis = positive(given, len(before))
            if before[axis] == after[axis]:
                continue
            if set(kinds(axes[axis])) - {Kind.OTHER} and not all(one.is_clean for one in axes[axis]):
                one_by_one = len(bounds) < 4 or set(bounds[3] or ()) == {1}
                wanted = list(range(starts[at], ends[at])) if starts and ends and one_by_one else None
                self._keep(axes[axis], wanted)
            elif Kind.BATCH in kinds(axes[axis]):
                return self._moved(value, None)
            axes[axis] = plain_axes((after[axis],))[0]
        return None if is_clean(tuple(axes)) else tuple(axes)

    def _take(self, value: relax.Call) -> Axes | None:
        index = value.args[1]
        axes, axis = self._data(value), value.attrs.axis
        if is_clean(axes):
            return None
        if self._found.of(index) is not None or axis is None:
            raise MixesTokensError("it looks tokens up by tokens")
        axis = positive(axis, len(axes))
        if Kind.BATCH in kinds(axes[axis]) or not all(one.is_clean for one in axes[axis]):
            self._keep(axes[axis], [int(one) for one in array_of(index).reshape(-1)] if is_constant(index) else None)
        result = (*axes[:axis], *plain_axes(sizes_of(index) or ()), *axes[axis + 1 :])
        return None if is_clean(result) else result

    def _keep(self, axis: Axis, wanted: list[int] | None) -> None:
        """Compute some places of each row even where the mask hides them."""
        if kinds(axis) != (Kind.PLACE,) or wanted is None or not 0 < len(wanted) <= _KEPT_MAX:
            raise MixesTokensError("it reads a part of the sequence that only the run tells, or a long one")
        self._found.kept |= set(wanted)

    def _concat(self, value: relax.Call) -> Axes | None:
        parts = list(value.args[0].fields) if isinstance(value.args[0], relax.Tuple) else [value.args[0]]
        shape, known = shape_of(value), [self._found.of(part) for part in parts]
        axis = positive(value.attrs.axis, len(shape))
        for one in known:
            if one is not None:
                self._needs_clean(one[axis], "it joins sequences")
        rest = broadcast(
            "concat",
            (*shape[:axis], 1, *shape[axis + 1 :]),
            [None if one is None else (*one[:axis], (), *one[axis + 1 :]) for one in known],
        )
        return (*rest[:axis], plain_axes((shape[axis],))[0], *rest[axis + 1 :])

    def _data(self, value: relax.Call) -> Axes:
        axes = self._found.of(value.args[0])
        if axes is None:
            raise MixesTokensError("it reads tokens in another place than its first operand")
        return axes

    def _moved(self, value: relax.Call, axes: Axes | None) -> Axes | None:
        if axes is None and not is_clean(self._data(value)):
            raise MixesTokensError(f"it cuts tokens up, from {shape_of(value.args[0])} to {shape_of(value)}")
        return axes

    def _needs_clean(self, axis: Axis, otherwise: str) -> None:
        if set(kinds(axis)) - {Kind.OTHER} and not all(one.is_clean for one in axis):
            raise MixesTokensError(otherwise)


def shape_of(expr: tvm.ir.Expr) -> Shape:
    """Return the sizes of a tensor; raise `MixesTokensError` where they are not known."""
    shape = sizes_of(expr)
    if shape is None:
        raise MixesTokensError("a shape of it is not known")
    return shape


def axes_read(value: relax.Call) -> list[int]:
    """Return the axes that a reduction, norm or softmax runs over."""
    rank = len(shape_of(value.args[0]))
    given = value.attrs.axes if is_op(value, *NORMS) else value.attrs.axis
    if given is None:
        return list(range(rank))
    many: Sequence[int] = [given] if isinstance(given, int | tirx.IntImm) else given
    return [positive(axis, rank) for axis in many]


def positive(axis: int | tirx.IntImm | None, rank: int) -> int:
    """Return the number of an axis from the front; None is the first."""
    return int(axis or 0) % max(rank, 1)


def numbers_of(expr: tvm.ir.Expr) -> list[int] | None:
    """Return a tuple of numbers, None where one is not known."""
    fields = list(expr.fields) if isinstance(expr, relax.Tuple) else [expr]
    known = [int(one) for one in fields if isinstance(one, tirx.IntImm)]
    return known if len(known) == len(fields) else None
