"""A build's latency beside a baseline's: loaded afresh, sure where it is, and limits that mean something."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from relaxtune.pipeline.bench.measure import Arm
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.gate.latency import LatencyLimit, Speed, compare_latency


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
