"""Between which numbers the elements of a tensor are, given between which those are that it is computed of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of

# The bounds of floats are widened by so much of themselves, many times what an operation of float32 rounds by.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`; `settled` if each element is one number, whatever the integers are that it depends on."""

    low: float
    high: float
    settled: bool


def interval_of(constant: tvm.ir.Expr) -> Interval | None:
    """Return the interval of a tensor constant."""
    array = array_of(constant)
    return Interval(float(array.min()), float(array.max()), settled=True) if array.size else None


def interval_after(value: relax.Call, operands: Sequence[Interval]) -> Interval | None:
    """Return the interval of what an operation makes of tensors, None where it is not known."""
    name = value.op.name.removeprefix("relax.")
    settled = all(one.settled for one in operands)
    if name == "take":
        # One place of a constant, or any.
        table, index = operands
        return Interval(table.low, table.high, settled=settled or index.low == index.high)
    if name == "where" and (condition := operands[0]).low == condition.high:
        return operands[1 if condition.low else 2]
    if name in _MOVES or name == "where":
        hull = operands[1:] if name == "where" else operands
        return Interval(min(one.low for one in hull), max(one.high for one in hull), settled)
    # A function of settled numbers is settled, whatever its value.
    unknown = Interval(-np.inf, np.inf, settled=True) if settled else None
    if name not in _RULES or (name == "astype" and dtype_of(value) == "bool"):
        return unknown
    with np.errstate(all="ignore"):
        bounds = _RULES[name](*operands)
    if bounds is None or not np.isfinite(bounds).all():
        return unknown
    low, high = (float(bound) for bound in bounds)
    if name == "astype" and "int" in dtype_of(value):
        low, high = float(np.trunc(low)), float(np.trunc(high))
    if name in _ROUNDED and "float" in dtype_of(value) and not settled:
        low, high = low - abs(low) * _ROUNDING, high + abs(high) * _ROUNDING
    return Interval(low, high, settled=settled or low == high)


_MOVES = ("expand_dims", "reshape", "squeeze", "permute_dims", "broadcast_to", "concat")
_ROUNDED = ("add", "subtract", "multiply", "divide", "log", "exp", "sqrt", "astype")
_Bounds = tuple[float, float] | None


def _rising(function: Callable[[float], float]) -> Callable[[Interval], _Bounds]:
    return lambda one: (function(one.low), function(one.high))


def _extremes(function: Callable[[float, float], float]) -> Callable[[Interval, Interval], _Bounds]:
    """Return the rule of an operation whose extremes are at the ends of its operands."""

    def rule(left: Interval, right: Interval) -> _Bounds:
        ends = [function(*pair) for pair in product((left.low, left.high), (right.low, right.high))]
        return min(ends), max(ends)

    return rule


def _divide(left: Interval, right: Interval) -> _Bounds:
    return None if right.low <= 0 <= right.high else _extremes(np.divide)(left, right)


def _absolute(one: Interval) -> _Bounds:
    low, high = sorted((abs(one.low), abs(one.high)))
    return (0.0 if one.low <= 0 <= one.high else low), high


def _less(left: Interval, right: Interval) -> _Bounds:
    return float(left.high < right.low), float(left.low < right.high)


def _less_equal(left: Interval, right: Interval) -> _Bounds:
    return float(left.high <= right.low), float(left.low <= right.high)


_RULES: Mapping[str, Callable[..., _Bounds]] = {
    **{name: _rising(getattr(np, name)) for name in ("log", "exp", "sqrt", "ceil", "floor", "trunc", "sign")},
    "astype": lambda one: (one.low, one.high),
    "negative": lambda one: (-one.high, -one.low),
    "abs": _absolute,
    **{name: _extremes(getattr(np, name)) for name in ("add", "subtract", "multiply", "minimum", "maximum")},
    "divide": _divide,
    "less": _less,
    "less_equal": _less_equal,
    "greater": lambda left, right: _less(right, left),
    "greater_equal": lambda left, right: _less_equal(right, left),
    "logical_and": lambda left, right: (min(left.low, right.low), min(left.high, right.high)),
    "logical_or": lambda left, right: (max(left.low, right.low), max(left.high, right.high)),
    "logical_not": lambda one: (1 - one.high, 1 - one.low),
}
