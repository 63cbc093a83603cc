"""Whether one of two arms, timed alternately, is faster, and by how much at least: a sign test over the turns.

Turns share what disturbs a machine for longer than a turn (clocks, heat, a neighbour), so each turn gives one relative
difference. Of these only the order counts: the bound below holds for any distribution, with outliers too, while the
median and the standard deviation of a few dozen latencies say little. Under "the median difference is m", each of n
independent differences is below m with probability 1/2, so the j-th smallest is an upper bound of m at confidence
1 - P(Binomial(n, 1/2) >= j).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A difference below this is nothing, however steady the machine.
LEAST_GAIN = 0.003


@dataclass(frozen=True)
class PairedGain:
    """How much shorter something takes than what it takes turns with, as a part of the latter's latency.

    Attributes
    ----------
    median
        Of the turns; negative where it takes longer.
    least, most
        Bounds of the median, each at the confidence asked for; minus infinity and 1 where the turns are too few.
    bias
        How far the two runs of the baseline in one turn are apart in the median: what a place in the turn makes.
    """

    median: float
    least: float
    most: float
    bias: float


def paired_gain(
    latencies: Sequence[float], before: Sequence[float], after: Sequence[float], *, doubt: float
) -> PairedGain:
    """Return the gain of something over a baseline that ran before and after it in every turn.

    Parameters
    ----------
    latencies, before, after : sequence of float
        Of equal lengths, one of each for a turn, in any unit of time.
    doubt : float
        The probability with which each bound may be wrong.
    """
    gains = np.sort(_log_gains(latencies, before, after))
    rank = _rank(gains.size, doubt)
    return PairedGain(
        median=_part(float(np.median(gains))),
        least=_part(float(gains[-rank]) if rank else -math.inf),
        most=_part(float(gains[rank - 1]) if rank else math.inf),
        bias=math.expm1(abs(float(np.median(np.log(before) - np.log(after))))),
    )


def is_hopeless(
    latencies: Sequence[float], before: Sequence[float], after: Sequence[float], *, turns: int, doubt: float
) -> bool:
    """Whether no turns to come, up to `turns` in all, can make a gain of what was timed so far (`is_gain`)."""
    gained = sum(_part(float(gain)) > LEAST_GAIN for gain in _log_gains(latencies, before, after))
    rank = _rank(turns, doubt)
    return not rank or gained + turns - len(latencies) < rank


def useful_turns(turns: int, least: int, *, doubt: float) -> int:
    """Return the fewest turns, at least `least`, that allow as many without a gain as `turns` do.

    The turns beyond these must all show the gain, so they only make it harder to find: of 8 turns all must, as of 6.
    """
    spared = turns - _rank(turns, doubt)
    fits = (count for count in range(least, turns) if (rank := _rank(count, doubt)) and count - rank >= spared)
    return next(fits, turns)


def is_gain(gain: PairedGain) -> bool:
    """Whether something is surely faster, by more than a place in the turn makes."""
    return gain.least > max(LEAST_GAIN, gain.bias)


def _log_gains(latencies: Sequence[float], before: Sequence[float], after: Sequence[float]) -> np.ndarray:
    """Return the gain of each turn, as a logarithm."""
    # There a drift over the turn cancels, and a ratio and its inverse are equally far from 0.
    taken, first, last = (np.log(np.asarray(one, np.float64)) for one in (latencies, before, after))
    return np.asarray((first + last) / 2 - taken)


@functools.cache
def _rank(turns: int, doubt: float) -> int:
    """Return which of the sorted differences bounds their median, counted from 1; 0 when none does."""
    # Exact integers: importing `scipy.stats` for this one number took a quarter of the start of every command.
    rank, outcomes = turns + 1, 0
    while (outcomes + math.comb(turns, rank - 1)) / 2**turns <= doubt:
        rank -= 1
        outcomes += math.comb(turns, rank)
    return rank if rank <= turns else 0


def _part(log_gain: float) -> float:
    return -math.expm1(-log_gain)
