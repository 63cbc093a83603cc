"""Whether arms are faster or slower than a baseline, by more than a border: blocks of runs, looked at now and then.

A shared machine disturbs a run in two ways. Other work only adds time, often in bursts: so all arms run alternately
within a block, and the block gives the ratio of their lower quartiles, which bursts hardly move. Every second block
goes through the arms backwards, so no place in it is better. And the place of code and data in memory makes an arm
faster or slower for as long as it is loaded: so `load` may be called again for later blocks.

The logarithms of the blocks' ratios scatter about the true one, symmetrically, since the arms share all disturbances.
Their signed ranks give bounds that hold for any shape of scatter (`bounds`). Neighbouring blocks are joined, and joined
again while they are alike, so that a disturbance that lasts for some blocks counts once.

An experiment ends at the first look that leaves no doubt about any arm, or when its seconds are over. Looks are planned
before the first run. The number of blocks doubles from one to the next. The looks share the doubt allowed: half for the
last look, a quarter for the one before, and so on. So the doubt holds for all looks together, whenever it ends.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from relaxtune.pipeline.bench.measure import Arm, ArmResult

# Bounds of a centre by signed ranks: Wilcoxon's test turned into an interval, with its exact distribution.
#
# Of n independent differences that scatter symmetrically about m, the sum of the ranks of those above m has a known
# distribution, whatever the shape of the scatter. The values of m that this test does not refute lie between two of the
# n(n+1)/2 pairwise means (Walsh averages), whose median is the estimate (Hodges and Lehmann). One wild value moves no
# bound far, and where the scatter is normal the interval is 1.02 times as wide as Student's.


@dataclass(frozen=True)
class Bounds:
    """An estimate of a centre between two bounds, each infinite where there are too few values for the doubt."""

    estimate: float
    least: float
    most: float


def centre(differences: Sequence[float] | np.ndarray, *, doubt: float) -> Bounds:
    """Return the centre of differences; each bound is wrong with a probability of at most `doubt`.

    `differences`: independent, at least one. `doubt`: between 0 and 0.5.
    """
    values = np.asarray(differences, np.float64)
    pairs = np.triu_indices(values.size)
    means = np.sort((values[pairs[0]] + values[pairs[1]]) / 2)
    rank = _rank(values.size, doubt)
    return Bounds(
        estimate=float(np.median(means)),
        least=float(means[rank - 1]) if rank else -math.inf,
        most=float(means[-rank]) if rank else math.inf,
    )


@functools.cache
def _rank(count: int, doubt: float) -> int:
    """Return which of the sorted pairwise means is a bound, counted from 1; 0 when none is."""
    # The sum of ranks adds up 1..n, each taken or not with probability 1/2.
    chances = np.ones(1)
    for number in range(1, count + 1):
        taken = np.concatenate([np.zeros(number), chances])
        chances = (np.concatenate([chances, np.zeros(number)]) + taken) / 2
    return int(np.searchsorted(np.cumsum(chances), doubt, side="right"))


#: A relative difference below this is nothing, however steady the machine.
LEAST_GAIN = 0.003

# The fewest blocks that can leave a doubt below 2 %.
FEWEST_BLOCKS = 6
# Blocks before the first look, runs of each arm in a block, and whether an untimed run precedes each timed one: the
# first plan that fits the seconds, else the last.
_BEGINNINGS = ((16, 4, True), (8, 4, True), (8, 2, True), (8, 1, False), (FEWEST_BLOCKS, 1, False))
_GROUPS, _FEWEST_GROUPS = 32, 8
# Runs of each arm in a block: as many as take this long, up to a limit.
_BLOCK_SECONDS = 0.03
_MOST_RUNS = 200
# A round that takes less than this part of the seconds is tried with untimed runs, as its blocks will be.
_QUICK = 0.02
_WARMUP = 2
# An experiment ends when it has taken this part of its seconds, after the fewest blocks.
_LATE = 1.1
_QUANTILE = 0.25
# How often the detectable difference would be found.
_POWER = 0.95


class Side(StrEnum):
    """On which side of the border the difference of an arm surely is."""

    BELOW = "below"
    ABOVE = "above"
    UNSURE = "unsure"


@dataclass(frozen=True)
class Question:
    """The question of an experiment."""

    # A relative difference of latency: 0.02 separates arms that take over 2 % more than the baseline from the others,
    # -`LEAST_GAIN` those that are faster.
    border: float
    doubt: float  # The probability with which any arm at the border may be put on a side, for each of the two sides.
    seconds: float  # The time that the runs may take.


@dataclass(frozen=True)
class Contrast:
    """The latency of an arm relative to the baseline's."""

    difference: float  # 0.05 takes 5 % more, -0.05 takes 5 % less.
    # Its bounds, each wrong with a probability of at most the doubt of the question; minus and plus infinity where the
    # runs were too few.
    least: float
    most: float
    side: Side  # The verdict.
    # The smallest difference that as many blocks, as noisy, would put above the border in 95 of 100 experiments;
    # infinite without bounds.
    detectable: float = math.inf

    @property
    def gain(self) -> float:
        """The part of the baseline's latency that the arm saves; negative where it takes longer."""
        return -self.difference

    @property
    def least_gain(self) -> float:
        """The part that it saves at least, beyond doubt; minus infinity without bounds."""
        return -self.most


@dataclass(frozen=True)
class Experiment:
    """The result of an experiment."""

    contrasts: Mapping[str, Contrast]  # Of each arm but the baseline, by name.
    arms: Mapping[str, ArmResult]  # The latencies of all arms, in the order taken; the baseline comes first.
    # Timed runs of each arm, the blocks that they came in, and how often the arms were loaded.
    runs: int
    blocks: int
    loadings: int
    # How often the bounds were computed, and how often they might have been.
    looks: int
    planned_looks: int
    seconds: float  # The time it took.


def run_experiment(load: Callable[[], Mapping[str, Arm]], question: Question, *, reload: bool = False) -> Experiment:
    """Return how arms compare with a baseline.

    `load`: returns the arms by name, the baseline first. `question`: the border, and how sure the answer must be.
    `reload`: whether `load` is called again for later blocks.
    """
    from relaxtune.pipeline.bench.measure import ArmResult, measure

    began = time.monotonic()
    arms = load()
    baseline, *others = arms
    plan = _plan(arms, time.monotonic() - began if reload else 0.0, question.seconds)
    taken: dict[str, ArmResult] = {name: ArmResult(name, ()) for name in arms}
    blocks, loadings = 0, 1

    def block() -> dict[str, float]:
        nonlocal arms, blocks, loadings
        if reload and blocks and blocks % plan.blocks_a_loading == 0:
            arms = {}  # the memory of one set of arms, not of two
            arms = load()
            loadings += 1
        order = dict(reversed([*arms.items()])) if blocks % 2 else arms
        warmup = _WARMUP if plan.settle else 0
        report = measure(order, runs=plan.runs, warmup=warmup, mirrored=True, settle=plan.settle)
        blocks += 1
        quartiles = {}
        for one in report.arms:
            taken[one.name] = taken[one.name].and_then(one)
            quartiles[one.name] = math.log(np.quantile(one.latencies_ms, _QUANTILE))
        return {name: quartiles[name] - quartiles[baseline] for name in others}

    # The machine may become slower than the plan supposes.
    contrasts, looks = decide(
        block, plan.looks, question, out_of_time=lambda: time.monotonic() - began > _LATE * question.seconds
    )
    return Experiment(
        contrasts=contrasts,
        arms=taken,
        runs=len(taken[baseline].latencies_ms),
        blocks=blocks,
        loadings=loadings,
        looks=looks,
        planned_looks=len(plan.looks),
        seconds=time.monotonic() - began,
    )


def slower_sizes(arm: ArmResult, baseline: ArmResult, doubt: float) -> tuple[str, ...]:
    """Return the sizes at which an arm surely takes longer than one that took turns with it at each call.

    `doubt` is the probability with which any size is returned that takes no longer.
    """
    slower = []
    for sizes, taken in arm.by_sizes.items():
        ratios = np.log(taken) - np.log(baseline.by_sizes[sizes])
        if _contrast([*ratios], LEAST_GAIN, doubt / len(arm.by_sizes)).side is Side.ABOVE:
            slower.append(sizes)
    return tuple(slower)


def decide(
    block: Callable[[], Mapping[str, float]],
    looks: tuple[int, ...],
    question: Question,
    out_of_time: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Contrast], int]:
    """Return what is known of each arm after as many blocks as it takes, or as were planned, and the number of looks.

    `block`: measures one more block; returns the logarithm of each arm's latency over the baseline's. `looks`: blocks
    after which the bounds are computed, rising; at least one. `question`: the border, and how sure the answer must be.
    `out_of_time`: whether no more blocks may begin; called after the fewest that can give bounds.
    """
    rows: list[Mapping[str, float]] = []
    done = 0
    for look, blocks in enumerate(looks):
        # Half of the doubt is for the last look, a quarter for the one before; the first two have equal shares.
        share = 2.0 ** (max(look, 1) - len(looks))
        done += 1
        late = False
        while len(rows) < blocks and not late:
            rows.append(block())
            late = len(rows) >= FEWEST_BLOCKS and out_of_time()
        doubt = question.doubt * share / max(1, len(rows[0]))
        contrasts = {name: _contrast([row[name] for row in rows], question.border, doubt) for name in rows[0]}
        if all(one.side is not Side.UNSURE for one in contrasts.values()) or blocks == looks[-1] or late:
            break
    return contrasts, done


def _contrast(ratios: list[float], relative_border: float, doubt: float) -> Contrast:
    border = math.log1p(relative_border)
    bounds = centre(_joined(ratios), doubt=doubt)
    side = Side.ABOVE if bounds.least > border else Side.BELOW if bounds.most < border else Side.UNSURE
    return Contrast(
        difference=math.expm1(bounds.estimate),
        least=math.expm1(bounds.least) if math.isfinite(bounds.least) else -math.inf,
        most=math.expm1(bounds.most),
        side=side,
        detectable=_detectable(bounds, border, doubt),
    )


def _detectable(bounds: Bounds, border: float, doubt: float) -> float:
    """Return the difference whose least bound is above the border with a probability of `_POWER`."""
    reach = (bounds.most - bounds.least) / 2
    more = NormalDist().inv_cdf(_POWER) / NormalDist().inv_cdf(1 - doubt)
    return math.expm1(border + reach * (1 + more))


@dataclass(frozen=True)
class _Plan:
    """The decisions before the first timed run; `looks` are the blocks of each look."""

    runs: int
    settle: bool
    looks: tuple[int, ...]
    blocks_a_loading: int


def _plan(arms: Mapping[str, Arm], loading_s: float, seconds: float) -> _Plan:
    # Imported here: history is judged without TVM.
    from relaxtune.pipeline.bench.measure import measure

    rounds_s: list[float] = []
    # The first round fills caches; a slow one is estimate enough.
    while len(rounds_s) < 2 or (len(rounds_s) < 5 and sum(rounds_s) < 0.1 * seconds):
        report = measure(arms, runs=1, warmup=0, settle=False)
        rounds_s.append(sum(arm.run_ms for arm in report.arms) / 1e3)
    round_s = min(rounds_s[1:])
    if round_s < _QUICK * seconds:
        # To settle may take an arm much longer than its run (a peer in another process).
        started = time.perf_counter()
        measure(arms, runs=2, warmup=0, mirrored=True)
        round_s = max(round_s, (time.perf_counter() - started) / 4)

    def block_s(runs: int, settle: bool) -> float:
        # Each timed run has an untimed one before it.
        return (2 * runs + _WARMUP) * round_s if settle else runs * round_s

    fitting = (one for one in _BEGINNINGS if one[0] * block_s(*one[1:]) <= seconds)
    first, least_runs, settle = next(fitting, _BEGINNINGS[-1])
    if settle:
        wanted = max(_BLOCK_SECONDS, loading_s) / (2 * round_s)
        affordable = seconds / (2 * first) / (2 * round_s) - _WARMUP / 2
        runs = max(least_runs, min(_MOST_RUNS, int(wanted), int(affordable)))
    else:
        runs = least_runs
    # Half of the seconds at most go into loading, for the blocks of the first look.
    blocks_a_loading = max(1, math.ceil(first * loading_s / (seconds / 2)))
    affordable_blocks = seconds / (block_s(runs, settle) + loading_s / blocks_a_loading)
    looks = [first]
    while 2 * looks[-1] <= affordable_blocks:
        looks.append(2 * looks[-1])
    return _Plan(runs, settle, tuple(looks), blocks_a_loading)


def _joined(ratios: list[float]) -> np.ndarray:
    """Return the means of groups of neighbours: at most `_GROUPS`, fewer while neighbouring groups are alike."""
    size = math.ceil(len(ratios) / _GROUPS)
    while True:
        groups = np.array([np.mean(ratios[start : start + size]) for start in range(0, len(ratios), size)])
        off = groups - groups.mean()
        alike = float(off[1:] @ off[:-1]) > float(off @ off) / math.sqrt(groups.size)
        if not alike or groups.size < 2 * _FEWEST_GROUPS:
            return groups
        size *= 2
