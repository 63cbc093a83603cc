"""Take a mask over attention scores apart: the causal part that the graph proves, conditions, and what is added.

A mask comes as a condition (`where(keep, scores, -1e9)`) or as a sum (`scores + where(keep, 0, -1e9)`,
`scores + not(keep) * -1e9`). It is taken apart into conditions that all have to hold. Constant conditions of the
causal or sliding-window form become two numbers, from which a kernel knows what to leave out without reading a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_op, number_of, numbers_beside
from relaxtune.pipeline.passes.kit.known_values import MASKED
from relaxtune.pipeline.passes.kit.sizes import Size, fits, plain, sizes_of

_QUERIES, _KEYS = -2, -1
# Comparison -> whether it bounds the difference of its operands from above, and the bound.
_BOUNDS: Mapping[str, tuple[bool, int]] = {
    "less_equal": (True, 0),
    "less": (True, -1),
    "greater_equal": (False, 0),
    "greater": (False, 1),
}


@dataclass(frozen=True)
class Condition:
    """A boolean tensor that broadcasts to the scores: a key is seen where it is true (`negated`: where it is false)."""

    expr: tvm.ir.Expr
    negated: bool = False


@dataclass(frozen=True)
class Mask:
    """A mask taken apart."""

    causal: bool = False  # Whether query i sees only keys `j <= i + keys - queries`.
    window: int = 0  # Whether only the last `window` of them; 0 for all.
    conditions: tuple[Condition, ...] = ()  # Further conditions for a visible key.
    fills: tuple[float, ...] = ()  # Of the scores of keys that are not seen: what is added, or takes their place.
    addends: tuple[tvm.ir.Expr, ...] = ()  # Tensors that are added to the scores.

    def joined(self, other: Mask) -> Mask:
        """Return both masks as one."""
        windows = [window for window in (self.window, other.window) if window]
        return Mask(
            self.causal or other.causal,
            min(windows, default=0),
            self.conditions + other.conditions,
            self.fills + other.fills,
            self.addends + other.addends,
        )


@dataclass(frozen=True)
class MaskReader:
    """Takes the masks of scores [..., queries, keys] apart."""

    graph: Graph
    queries: Size
    keys: Size

    def condition(self, expr: tvm.ir.Expr, *, negated: bool, fill: float) -> Mask:
        """Return the parts of `where(expr, scores, fill)`, or when negated of `where(expr, fill, scores)`."""
        mask = Mask(fills=(fill,))
        for condition in self._conjuncts(expr, negated):
            mask = mask.joined(self._classified(condition))
        return mask

    def addend(self, expr: tvm.ir.Expr) -> Mask:
        """Return the parts of a tensor that is added to the scores."""
        mask = Mask()
        for term in self._terms(expr):
            mask = mask.joined(self._masked_constant(term) if is_constant(term) else self._term(term))
        return mask

    def _terms(self, expr: tvm.ir.Expr) -> Iterable[tvm.ir.Expr]:
        value = self._seen_through(expr)
        if is_op(value, "add"):
            for arg in value.args:
                yield from self._terms(arg)
        else:
            yield value if is_constant(value) else expr

    def _term(self, term: tvm.ir.Expr) -> Mask:
        if self.graph.known.of(term) == 0:
            return Mask()
        value = self._seen_through(term)
        if is_op(value, "where"):
            condition, chosen, other = value.args
            left, right = self._number(chosen), self._number(other)
            if right is not None and right <= MASKED:
                return self.condition(condition, negated=False, fill=right).joined(self._kept(chosen))
            if left is not None and left <= MASKED:
                return self.condition(condition, negated=True, fill=left).joined(self._kept(other))
        if is_op(value, "multiply"):
            for arg, fill in numbers_beside(value):
                hidden = self._zero_or_one(arg)
                if hidden is not None and fill <= MASKED:
                    return self.condition(hidden.expr, negated=not hidden.negated, fill=fill)
        return Mask(addends=(term,))

    def _number(self, expr: tvm.ir.Expr) -> float | None:
        """Return the number that every element of a tensor is, None where there is none."""
        number = self.graph.known.of(expr)
        return None if number is None else float(number)

    def _kept(self, expr: tvm.ir.Expr) -> Mask:
        """Return what is added where a key is seen."""
        return Mask() if number_of(expr, expr) == 0.0 else self.addend(expr)

    def _zero_or_one(self, expr: tvm.ir.Expr) -> Condition | None:
        """Return the condition that a number is 1 where it holds and 0 where it does not."""
        value = self._value(expr)
        if is_op(value, "astype") and dtype_of(value.args[0]) == "bool":
            return Condition(value.args[0])
        if is_op(value, "astype"):
            return self._zero_or_one(value.args[0])
        if is_op(value, "subtract") and number_of(value.args[0], value) == 1.0:
            inner = self._zero_or_one(value.args[1])
            return None if inner is None else Condition(inner.expr, not inner.negated)
        return None

    def _masked_constant(self, constant: tvm.ir.Expr) -> Mask:
        array = array_of(constant).astype("float32")
        hidden = array <= MASKED
        if np.isnan(array).any() or not hidden.any():
            return Mask(addends=(constant,))
        rest = np.where(hidden, np.float32(0), array)
        mask = self._classified(Condition(relax.const(~hidden, "bool")))
        mask = mask.joined(Mask(fills=(float(array.min()),)))
        return mask.joined(Mask(addends=(relax.const(rest, "float32"),))) if rest.any() else mask

    def _conjuncts(self, expr: tvm.ir.Expr, negated: bool) -> Iterable[Condition]:
        """Yield conditions that together say what `expr`, or its negation, says."""
        value = self._seen_through(expr)
        both = ("logical_or",) if negated else ("logical_and",)
        bits = ("bitwise_or",) if negated else ("bitwise_and",)
        if is_op(value, "logical_not") or (is_op(value, "bitwise_not") and dtype_of(expr) == "bool"):
            yield from self._conjuncts(value.args[0], not negated)
        elif is_op(value, *both) or (is_op(value, *bits) and dtype_of(expr) == "bool"):
            for arg in value.args:
                yield from self._conjuncts(arg, negated)
        elif is_constant(value) and negated:
            yield Condition(relax.const(~array_of(value).astype(bool), "bool"))
        else:
            yield Condition(value if is_constant(value) else expr, negated)

    def _classified(self, condition: Condition) -> Mask:
        """Return a condition as what it is: always true, causal, causal with a window, or a condition."""
        known = self.graph.known.of(condition.expr)
        if known is not None and bool(known) != condition.negated:
            return Mask()
        kept = self._plane(condition)
        if kept is None:
            return Mask(causal=True) if self._is_causal(condition) else Mask(conditions=(condition,))
        if not isinstance(self.queries, int) or not isinstance(self.keys, int):
            return Mask(conditions=(condition,))
        ahead = np.arange(self.keys)[None, :] - np.arange(self.queries)[:, None] - (self.keys - self.queries)
        causal = ahead <= 0
        # A kernel skips keys that no query sees: each query needs one that it sees, or nothing is computed for it.
        if not kept.any(axis=1).all():
            return Mask(conditions=(condition,))
        if np.array_equal(kept, causal):
            return Mask(causal=True)
        window = int(kept[-1].sum())
        if window and np.array_equal(kept, causal & (ahead > -window)):
            return Mask(causal=True, window=window)
        return Mask(conditions=(condition,))

    def _plane(self, condition: Condition) -> np.ndarray | None:
        """Return a constant condition over queries and keys when it is the same for every batch and head."""
        if not is_constant(condition.expr):
            return None
        array = array_of(condition.expr).astype(bool) ^ condition.negated
        planes = array.reshape((-1, *(1, 1, *array.shape)[-2:]))
        rows, columns = planes.shape[1:]
        if rows not in (1, self.queries) or columns not in (1, self.keys) or (planes != planes[:1]).any():
            return None
        # A symbolic axis is one along which the condition does not change.
        return np.broadcast_to(planes[0], [size if isinstance(size, int) else 1 for size in (self.queries, self.keys)])

    def _is_causal(self, condition: Condition) -> bool:
        """Return whether a comparison of positions says that query i sees key j up to `i + keys - queries`."""
        value = self._seen_through(condition.expr)
        if not is_op(value, *_BOUNDS) or not fits(self.queries, self.keys):
            return False
        places = [self._position(arg) for arg in value.args]
        if places[0] is None or places[1] is None:
            return False
        (first, left), (second, right) = places[0], places[1]
        # left - right is at most, or at least, a bound; negated it is the other way round.
        is_upper, bound = _BOUNDS[value.op.name.removeprefix("relax.")]
        if condition.negated:
            is_upper, bound = not is_upper, bound + (1 if is_upper else -1)
        if (first, second) == (_QUERIES, _KEYS):
            is_upper, bound, left, right = not is_upper, -bound, right, left
        elif (first, second) != (_KEYS, _QUERIES):
            return False
        return is_upper and plain(right - left + bound) == plain(self.keys - self.queries)

    def _position(self, expr: tvm.ir.Expr) -> tuple[int, Size] | None:
        """Return the axis, from the end, whose positions a tensor holds, and the first one's number."""
        count = self.graph.known.count_of(expr)
        grows = [] if count is None else [axis - len(count.steps) for axis, step in enumerate(count.steps) if step != 0]
        return (grows[0], count.start) if count is not None and len(grows) == 1 and count.steps[grows[0]] == 1 else None

    def _value(self, expr: tvm.ir.Expr) -> tvm.ir.Expr | None:
        return self.graph.values.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def _seen_through(self, expr: tvm.ir.Expr) -> tvm.ir.Expr | None:
        """Return what binds `expr`, seen through casts between floats and through axes put in front."""
        value = self._value(expr)
        while isinstance(value, relax.Call):
            if is_op(value, "astype"):
                same = (dtype_of(value) == "bool") == (dtype_of(value.args[0]) == "bool")
                if not same or "int" in dtype_of(value.args[0]):
                    break
            elif is_op(value, "expand_dims", "reshape", "squeeze", "broadcast_to"):
                if not is_op(value, "broadcast_to") and not _differ_in_leading_ones(value, value.args[0]):
                    break
            else:
                break
            value = self._value(value.args[0])
        return value


def _differ_in_leading_ones(left: tvm.ir.Expr, right: tvm.ir.Expr) -> bool:
    """Return whether two tensors have one shape but for axes of size 1 in front."""
    shapes = [sizes_of(expr) for expr in (left, right)]
    if shapes[0] is None or shapes[1] is None:
        return False
    first, second = (list(itertools.dropwhile(lambda size: size == 1, shape or ())) for shape in shapes)
    return first == second
