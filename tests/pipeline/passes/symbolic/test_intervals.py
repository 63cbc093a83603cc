"""What an operation makes of numbers is between the bounds that its operands' bounds give."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from tvm import relax

from relaxtune.pipeline.passes.symbolic.intervals import Interval, interval_after, interval_of

UNARY = {
    "log": np.log, "exp": np.exp, "sqrt": np.sqrt, "ceil": np.ceil, "floor": np.floor, "trunc": np.trunc,
    "sign": np.sign, "negative": np.negative, "abs": np.abs,
}  # fmt: skip
BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "minimum": np.minimum,
    "maximum": np.maximum, "less": np.less, "less_equal": np.less_equal, "greater": np.greater,
    "greater_equal": np.greater_equal,
}  # fmt: skip
ENDS = (-3.0, -1.0, 0.0, 0.5, 2.0)
RANGES = [(low, high) for low, high in itertools.product(ENDS, ENDS) if low <= high]


def call(name: str, *dtypes: str) -> relax.Call:
    params = [relax.Var(f"x{place}", relax.TensorType([4], dtype)) for place, dtype in enumerate(dtypes)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        value: relax.Call = builder.normalize(relax.Call(tvm.ir.Op.get(f"relax.{name}"), params))
        builder.emit_func_output(builder.emit(value))
    return value


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_functions_stay_within_their_bounds(name: str, low: float, high: float) -> None:
    found = interval_after(call(name, "float32"), [Interval(low, high, settled=False)])
    with np.errstate(all="ignore"):
        results = UNARY[name](np.linspace(low, high, 31, dtype="float32"))
    if found is None:
        assert not np.isfinite(results).all()
        return
    assert found.low <= results.min()
    assert results.max() <= found.high
    assert found.settled == (found.low == found.high)


@pytest.mark.parametrize("name", BINARY)
def test_operations_of_two_stay_within_their_bounds(name: str) -> None:
    for left, right in itertools.product(RANGES, RANGES):
        pair = [Interval(*left, settled=False), Interval(*right, settled=False)]
        found = interval_after(call(name, "float32", "float32"), pair)
        if found is None:
            assert name == "divide"
            assert right[0] <= 0 <= right[1]
            continue
        grid = np.meshgrid(np.linspace(*left, 9, dtype="float32"), np.linspace(*right, 9, dtype="float32"))
        results = BINARY[name](*grid)
        assert found.low <= results.min()
        assert results.max() <= found.high


def test_a_choice_whose_condition_is_known_is_what_it_chooses() -> None:
    choice = call("where", "bool", "float32", "float32")
    one, other = Interval(1, 2, settled=False), Interval(7, 7, settled=True)
    assert interval_after(choice, [Interval(0, 0, settled=False), one, other]) == other
    assert interval_after(choice, [Interval(1, 1, settled=False), one, other]) == one
    assert interval_after(choice, [Interval(0, 1, settled=False), one, other]) == Interval(1, 7, settled=False)


def test_what_is_taken_from_a_known_place_is_settled() -> None:
    x = relax.Var("x", relax.TensorType([2], "int64"))
    taken = relax.op.take(relax.const(np.array([3.0, 5.0], "float32")), x, axis=0)
    table = interval_of(taken.args[0])
    assert table == Interval(3, 5, settled=True)
    assert interval_after(taken, [table, Interval(1, 1, settled=False)]) == Interval(3, 5, settled=True)
    assert interval_after(taken, [table, Interval(0, 1, settled=False)]) == Interval(3, 5, settled=False)


def test_what_is_computed_of_settled_numbers_is_settled() -> None:
    """T5's decoder takes the logarithm of no distance, where it does not want it."""
    found = interval_after(call("log", "float32"), [Interval(0, 0, settled=True)])
    assert found == Interval(-np.inf, np.inf, settled=True)
    chosen = interval_after(
        call("where", "bool", "float32", "float32"), [Interval(1, 1, settled=True), Interval(4, 4, settled=True), found]
    )
    assert chosen == Interval(4, 4, settled=True)
    assert interval_after(call("tan", "float32"), [Interval(0, 1, settled=True)]) == found


def test_what_has_no_rule_has_no_bounds() -> None:
    assert interval_after(call("tan", "float32"), [Interval(0, 1, settled=False)]) is None
    assert interval_of(relax.const(np.zeros((0,), "float32"))) is None
