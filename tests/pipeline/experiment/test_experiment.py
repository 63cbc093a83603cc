"""Verdicts on blocks keep their error rates, all looks and arms together; real arms are put on their sides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from relaxtune.pipeline.bench.measure import Arm, ArmResult
from relaxtune.pipeline.experiment.experiment import (
    LEAST_GAIN,
    Contrast,
    Question,
    Side,
    decide,
    run_experiment,
    slower_sizes,
)

LOOKS = (16, 32, 64, 128)
QUESTION = Question(border=0.02, doubt=0.05, seconds=60.0)


def blocks(kind: str, slowdown: float, seed: int) -> Callable[[], dict[str, float]]:
    """Return a source of blocks of one arm whose logarithms scatter by about 1.3 %."""
    rng, before = np.random.default_rng(seed), [0.0]

    def block() -> dict[str, float]:
        if kind == "normal":
            scatter = rng.normal(0, 0.013)
        elif kind == "bursts":
            scatter = 0.008 * rng.standard_t(2)
        else:  # what disturbs a block disturbs the next ones, too
            before[0] = scatter = 0.5 * before[0] + rng.normal(0, 0.01)
        return {"new": math.log1p(slowdown) + scatter}

    return block


def verdicts(kind: str, slowdown: float, count: int = 200) -> list[tuple[Contrast, int]]:
    found = [decide(blocks(kind, slowdown, seed), LOOKS, QUESTION) for seed in range(count)]
    return [(contrasts["new"], looks) for contrasts, looks in found]


def share(found: list[tuple[Contrast, int]], side: Side) -> float:
    return Counter(one.side for one, _ in found)[side] / len(found)


@pytest.mark.parametrize("kind", ["normal", "bursts", "lasting"])
def test_three_percent_are_found_and_equal_arms_are_below(kind: str) -> None:
    assert share(verdicts(kind, 0.03), Side.ABOVE) >= 0.95
    equal = verdicts(kind, 0.0)
    assert share(equal, Side.BELOW) >= 0.95
    assert share(equal, Side.ABOVE) == 0


@pytest.mark.parametrize("kind", ["normal", "bursts"])
def test_an_arm_at_the_border_is_put_on_a_side_no_more_often_than_the_doubt(kind: str) -> None:
    at_border = verdicts(kind, 0.02, 300)
    # 300 verdicts scatter about 0.05 by 0.013.
    assert share(at_border, Side.ABOVE) < 0.09
    assert share(at_border, Side.BELOW) < 0.09


def test_many_equal_arms_share_the_doubt() -> None:
    question = Question(border=0.0, doubt=0.05, seconds=60.0)
    wrong = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        contrasts, _ = decide(lambda rng=rng: {str(n): rng.normal(0, 0.01) for n in range(8)}, (16, 32), question)
        wrong += any(one.side is Side.BELOW for one in contrasts.values())
    # 100 scatter about 5 by 2.2.
    assert wrong <= 11


def test_a_clear_case_ends_at_the_first_look() -> None:
    assert {looks for _, looks in verdicts("normal", 0.1, 20)} == {1}


def test_an_experiment_that_is_out_of_time_ends_with_what_is_known() -> None:
    assert decide(blocks("normal", 0.02, 0), LOOKS, QUESTION, out_of_time=lambda: True)[1] == 1


def arm(ms: float, calls: list[str], name: str) -> Arm:
    def run() -> float:
        calls.append(name)
        return ms

    return run


def test_sizes_at_which_an_arm_takes_longer_are_named() -> None:
    noise = np.random.default_rng(0).normal(1.0, 0.01, (4, 40))
    base = ArmResult("untuned", (), by_sizes={"short": tuple(1.0 * noise[0]), "long": tuple(9.0 * noise[1])})
    arm_ = ArmResult("tuned", (), by_sizes={"short": tuple(1.04 * noise[2]), "long": tuple(9.0 * noise[3])})
    assert slower_sizes(arm_, base, 0.02) == ("short",)
    assert slower_sizes(base, arm_, 0.02) == ()


def test_all_arms_run_equally_often() -> None:
    calls: list[str] = []
    latencies = {"untuned": 10.0, "tuned": 9.0}
    question = Question(border=-LEAST_GAIN, doubt=0.02, seconds=8.0)
    found = run_experiment(lambda: {name: arm(ms, calls, name) for name, ms in latencies.items()}, question)
    assert list(found.contrasts) == ["tuned"]
    contrast = found.contrasts["tuned"]
    assert (contrast.side, contrast.gain, contrast.least_gain) == (Side.BELOW, pytest.approx(0.1), pytest.approx(0.1))
    assert {name: one.median_ms for name, one in found.arms.items()} == latencies
    assert {len(one.latencies_ms) for one in found.arms.values()} == {found.runs}
    assert len(set(Counter(calls).values())) == 1


@pytest.mark.parametrize(("ms", "runs", "blocks_"), [(5e3, 6, 6), (500.0, 8, 8)])
def test_slow_arms_run_only_as_often_as_a_verdict_needs(ms: float, runs: int, blocks_: int) -> None:
    calls: list[str] = []
    question = Question(border=-LEAST_GAIN, doubt=0.02, seconds=8.0)
    latencies = {"untuned": ms, "tuned": 0.5 * ms}
    found = run_experiment(lambda: {name: arm(one, calls, name) for name, one in latencies.items()}, question)
    assert (found.runs, found.blocks, found.looks) == (runs, blocks_, 1)
    assert found.contrasts["tuned"].side is Side.BELOW
    # Two rounds say how slow they are.
    assert len(calls) == 2 * (2 + runs)
    # Every second block begins with the other arm.
    assert calls[4:8] == ["untuned", "tuned", "tuned", "untuned"]
