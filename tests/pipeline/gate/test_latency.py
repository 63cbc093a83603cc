"""Decisions on blocks keep their error rates, all looks together, and real arms are told apart."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from relaxtune.pipeline.bench.measure import Arm
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.gate.latency import Decision, LatencyLimit, Speed, compare_latency, decide

LOOKS = (16, 32, 64, 128)


def blocks(kind: str, slowdown: float, seed: int) -> Callable[[], float]:
    """Return a source of blocks whose logarithms scatter by about 1.3 %."""
    rng, before = np.random.default_rng(seed), [0.0]

    def block() -> float:
        if kind == "normal":
            scatter = rng.normal(0, 0.013)
        elif kind == "bursts":
            scatter = 0.008 * rng.standard_t(2)
        else:  # what disturbs a block disturbs the next ones, too
            before[0] = scatter = 0.5 * before[0] + rng.normal(0, 0.01)
        return math.log1p(slowdown) + scatter

    return block


def decisions(kind: str, slowdown: float, count: int = 200) -> list[Decision]:
    return [decide(blocks(kind, slowdown, seed), LOOKS, LatencyLimit(0.02)) for seed in range(count)]


def share(found: list[Decision], speed: Speed) -> float:
    return Counter(one.speed for one in found)[speed] / len(found)


@pytest.mark.parametrize("kind", ["normal", "bursts", "lasting"])
def test_three_percent_are_caught_and_equal_builds_pass(kind: str) -> None:
    assert share(decisions(kind, 0.03), Speed.SLOWER) >= 0.95
    equal = decisions(kind, 0.0)
    assert share(equal, Speed.WITHIN) >= 0.95
    assert share(equal, Speed.SLOWER) == 0


@pytest.mark.parametrize("kind", ["normal", "bursts"])
def test_a_build_at_the_limit_is_called_slower_no_more_often_than_alpha(kind: str) -> None:
    at_limit = decisions(kind, 0.02, 300)
    # 300 decisions scatter about alpha = 0.05 by 0.013.
    assert share(at_limit, Speed.SLOWER) < 0.09
    assert share(at_limit, Speed.WITHIN) < 0.09


def test_a_clear_case_ends_at_the_first_look() -> None:
    assert {one.looks for one in decisions("normal", 0.1, 20)} == {1}


def test_a_plan_that_is_out_of_time_ends_with_what_is_known() -> None:
    decision = decide(blocks("normal", 0.02, 0), LOOKS, LatencyLimit(0.02), out_of_time=lambda: True)
    assert decision.looks == 1


def arm(loops: int) -> Arm:
    def run() -> None:
        sum(range(loops))

    return run


def test_a_slower_arm_is_slower_and_a_faster_one_within() -> None:
    loaded: list[int] = []

    def load(first: int, second: int) -> Callable[[], tuple[Arm, Arm]]:
        def both() -> tuple[Arm, Arm]:
            loaded.append(1)
            return arm(first), arm(second)

        return both

    limit = LatencyLimit(0.1, seconds=1.0)
    slower = compare_latency(load(2_000, 3_000), limit)
    assert slower.speed is Speed.SLOWER
    assert slower.least is not None
    assert slower.most is not None
    assert 0.1 < slower.least < slower.slowdown < slower.most
    assert slower.detectable is not None
    assert slower.detectable > 0.1
    assert slower.loadings == slower.blocks == len(loaded) >= 16
    assert len(slower.new.latencies_ms) == len(slower.baseline.latencies_ms) == slower.runs
    assert compare_latency(load(3_000, 2_000), limit).speed is Speed.WITHIN


def test_slow_arms_are_loaded_less_often_and_run_less() -> None:
    loaded: list[int] = []

    def load() -> tuple[Arm, Arm]:
        loaded.append(1)
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            pass
        return arm(20_000), arm(20_000)

    found = compare_latency(load, LatencyLimit(0.5, seconds=0.4))
    assert found.planned_looks == 1
    assert found.runs <= 30 * found.blocks
    assert 1 < len(loaded) == found.loadings < found.blocks


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_slowdown": -0.1}, "slowdown of -0.1"),
        ({"alpha": 0.7}, "alpha is 0.7"),
        ({"seconds": 0.0}, "0 seconds"),
    ],
)
def test_limits_that_mean_nothing_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LatencyLimit(**wrong)
