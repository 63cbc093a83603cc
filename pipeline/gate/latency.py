"""Whether a build is slower than a baseline by more than a limit: blocks of interleaved runs, looked at now and then.

What a shared machine does to a run is of two kinds. Other work only adds time, often in bursts: so both builds run
alternately within a block, and the block gives the ratio of their lower quartiles, which bursts hardly move. And where
code and data happen to lie in memory makes a build faster or slower for as long as it is loaded: so both are loaded
afresh for the blocks.

The blocks' ratios scatter about the true one, symmetrically, since the builds share all that is done to them. Their
signed ranks give bounds of it that hold for any shape of scatter (`pipeline.bench.signed_rank`). Neighbouring blocks
are joined, and joined again while they are alike, so that what lasts for some blocks counts once.

The comparison ends at the first look that leaves no doubt. Looks are planned before the first run, the blocks doubling
from one to the next, and share the doubt allowed: half for the last look, a quarter for the one before, and so on. So
the doubt holds for all looks together, whenever it ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np

from relaxtune.pipeline.bench.measure import Arm, ArmResult, measure
from relaxtune.pipeline.bench.signed_rank import Bounds, centre
from relaxtune.pipeline.errors import UsageError

BASELINE_ARM, NEW_ARM = "baseline", "new"

# Blocks before the first look; half as many where a model is slow.
_FIRST_LOOK, _FEWEST = 16, 8
_GROUPS = 32
# Runs of each build in a block: as many as take this long, within these limits.
_BLOCK_SECONDS = 0.1
_LEAST_RUNS, _MOST_RUNS = 4, 200
_WARMUP = 2
_QUANTILE = 0.25
# What the detectable difference is stated for: how often it would be found.
_POWER = 0.95
_NO_ARMS: tuple[Arm, Arm] = (lambda: None, lambda: None)


class Speed(StrEnum):
    """What is known of a build's latency, beside a limit."""

    WITHIN = "within the limit"
    SLOWER = "slower"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class LatencyLimit:
    """What a build may take.

    Attributes
    ----------
    max_slowdown
        0.02 allows 2 % more than the baseline.
    alpha
        The probability with which a build at the limit may be called slower, and as much for one beyond it to be called
        within.
    seconds
        What the runs may take; they end sooner where all is clear.
    """

    max_slowdown: float = 0.02
    alpha: float = 0.05
    seconds: float = 60.0

    def __post_init__(self) -> None:
        """Refuse limits that mean nothing.

        Raises
        ------
        UsageError
            Names the limit.
        """
        if not 0 <= self.max_slowdown < 10:
            raise UsageError(f"a slowdown of {self.max_slowdown:g} is no limit; expected a share such as 0.02 (2 %)")
        if not 0 < self.alpha < 0.5:
            raise UsageError(f"alpha is {self.alpha:g}; expected a probability between 0 and 0.5, such as 0.05")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"{self.seconds:g} seconds are no time to measure in; expected more than 0, such as 60")


@dataclass(frozen=True)
class LatencyComparison:
    """The latency of a build beside a baseline's.

    Attributes
    ----------
    slowdown
        By how much longer the build takes, as a part of the baseline's latency; negative where it is faster.
    least, most
        Its bounds. Each is wrong with a probability of at most `alpha`, all looks together; None where the runs were
        too few for any.
    speed
        The verdict.
    detectable
        The smallest slowdown that as many blocks, as noisy, would call slower in 95 of 100 comparisons; None without
        bounds.
    runs
        Timed runs of each build.
    blocks, loadings, looks, planned_looks
        What they were taken in, how often both were loaded, and how often it was looked.
    seconds
        What it took.
    baseline, new
        The latencies, in the order taken.
    """

    limit: LatencyLimit
    slowdown: float
    least: float | None
    most: float | None
    speed: Speed
    detectable: float | None
    runs: int
    blocks: int
    loadings: int
    looks: int
    planned_looks: int
    seconds: float
    baseline: ArmResult
    new: ArmResult


def compare_latency(load: Callable[[], tuple[Arm, Arm]], limit: LatencyLimit) -> LatencyComparison:
    """Return the latency of a build beside a baseline's.

    Parameters
    ----------
    load : callable
        Loads both and returns the arms of the baseline and of the build; called again for other blocks.
    limit : LatencyLimit
        What it may take.
    """
    began = time.monotonic()
    arms = load()
    loading_s = time.monotonic() - began
    plan = _plan(arms, loading_s, limit.seconds)
    taken: tuple[list[float], list[float]] = ([], [])
    blocks, loadings = 0, 1

    def block() -> float:
        nonlocal arms, blocks, loadings
        if blocks and blocks % plan.blocks_a_loading == 0:
            arms = _NO_ARMS  # the memory of two builds, not of four
            arms = load()
            loadings += 1
        latencies = _block(arms, plan.runs, backwards=blocks % 2 == 1)
        blocks += 1
        for side, values in zip(taken, latencies, strict=True):
            side.extend(values)
        return math.log(np.quantile(latencies[1], _QUANTILE) / np.quantile(latencies[0], _QUANTILE))

    # The machine may become slower than the plan supposes.
    decision = decide(block, plan.looks, limit, out_of_time=lambda: time.monotonic() - began > 2 * limit.seconds)
    bounds = decision.bounds
    known = math.isfinite(bounds.least)
    return LatencyComparison(
        limit=limit,
        slowdown=math.expm1(bounds.estimate),
        least=math.expm1(bounds.least) if known else None,
        most=math.expm1(bounds.most) if known else None,
        speed=decision.speed,
        detectable=_detectable(decision, limit.max_slowdown) if known else None,
        runs=len(taken[0]),
        blocks=blocks,
        loadings=loadings,
        looks=decision.looks,
        planned_looks=len(plan.looks),
        seconds=time.monotonic() - began,
        baseline=ArmResult(BASELINE_ARM, tuple(taken[0])),
        new=ArmResult(NEW_ARM, tuple(taken[1])),
    )


@dataclass(frozen=True)
class Decision:
    """What blocks say: bounds of the logarithm of the ratio, each wrong with probability `doubt` at this look."""

    bounds: Bounds
    speed: Speed
    looks: int
    doubt: float


def decide(
    block: Callable[[], float],
    looks: tuple[int, ...],
    limit: LatencyLimit,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Decision:
    """Return what is known after as many blocks as it takes, or as were planned.

    Parameters
    ----------
    block : callable
        Measures one more block; returns the logarithm of the build's latency over the baseline's.
    looks : tuple of int
        Blocks after which it is looked, rising; at least one.
    limit : LatencyLimit
        What the build may take.
    out_of_time : callable
        Whether this look is to be the last.
    """
    ratios: list[float] = []
    border = math.log1p(limit.max_slowdown)
    look = 0
    for blocks, doubt in zip(looks, _doubts(len(looks), limit.alpha), strict=True):
        look += 1
        ratios += [block() for _ in range(blocks - len(ratios))]
        bounds = centre(_joined(ratios), doubt=doubt)
        slower, within = bounds.least > border, bounds.most < border
        speed = Speed.SLOWER if slower else Speed.WITHIN if within else Speed.UNDECIDED
        if slower or within or blocks == looks[-1] or out_of_time():
            break
    return Decision(bounds, speed, look, doubt)


@dataclass(frozen=True)
class _Plan:
    """What is decided before the first timed run: runs of a block, the blocks of each look, blocks of one loading."""

    runs: int
    looks: tuple[int, ...]
    blocks_a_loading: int


def _plan(arms: tuple[Arm, Arm], loading_s: float, seconds: float) -> _Plan:
    """Return a plan that fits the seconds, or the least one there is."""
    for arm in arms:
        for _ in range(_WARMUP):
            arm()
    rounds = []
    for _ in range(3):
        started = time.perf_counter()
        for arm in arms:
            arm()
        rounds.append(time.perf_counter() - started)
    round_s = min(rounds)
    # Each timed run has an untimed one before it.
    wanted = max(_BLOCK_SECONDS, loading_s) / (2 * round_s)
    affordable = seconds / (2 * _FIRST_LOOK) / (2 * round_s) - _WARMUP / 2
    runs = max(_LEAST_RUNS, min(_MOST_RUNS, int(wanted), int(affordable)))
    block_s = (2 * runs + _WARMUP) * round_s
    # Half of the seconds at most go into loading, for the blocks of the first look.
    blocks_a_loading = max(1, math.ceil(_FIRST_LOOK * loading_s / (seconds / 2)))
    affordable_blocks = seconds / (block_s + loading_s / blocks_a_loading)
    looks = [_FIRST_LOOK if affordable_blocks >= _FIRST_LOOK else _FEWEST]
    while 2 * looks[-1] <= affordable_blocks:
        looks.append(2 * looks[-1])
    return _Plan(runs, tuple(looks), blocks_a_loading)


def _doubts(looks: int, alpha: float) -> list[float]:
    """Return what each look may be wrong with: together alpha, half of it for the last."""
    doubts = [alpha / 2 ** (looks - look) for look in range(looks)]
    doubts[0] *= 2
    return doubts


def _joined(ratios: list[float]) -> np.ndarray:
    """Return the means of groups of neighbours: at most `_GROUPS`, fewer while groups are like those beside them."""
    size = math.ceil(len(ratios) / _GROUPS)
    while True:
        groups = np.array([np.mean(ratios[start : start + size]) for start in range(0, len(ratios), size)])
        off = groups - groups.mean()
        alike = float(off[1:] @ off[:-1]) > float(off @ off) / math.sqrt(groups.size)
        if not alike or groups.size < 2 * _FEWEST:
            return groups
        size *= 2


def _detectable(decision: Decision, max_slowdown: float) -> float:
    """Return the slowdown whose least bound is above the limit with a probability of `_POWER`."""
    reach = (decision.bounds.most - decision.bounds.least) / 2
    more = NormalDist().inv_cdf(_POWER) / NormalDist().inv_cdf(1 - decision.doubt)
    return math.expm1(math.log1p(max_slowdown) + reach * (1 + more))


def _block(arms: tuple[Arm, Arm], runs: int, *, backwards: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the latencies of the baseline and of the build in one block; `backwards` lets the build begin."""
    named = [(BASELINE_ARM, arms[0]), (NEW_ARM, arms[1])]
    report = measure(dict(named[::-1] if backwards else named), runs=runs, warmup=_WARMUP, mirrored=True)
    return report.arm(BASELINE_ARM).latencies_ms, report.arm(NEW_ARM).latencies_ms
