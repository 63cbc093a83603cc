"""How often a candidate is run: once when it is hopeless, often when it may be the best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

# A first run shorter than this may be mostly launch and page faults, and says little.
_SLOW_S = 0.01
# A row of launches on a GPU takes some 4 us more than the launches. A single launch of a kernel of 1 us seemed five
# times as slow as the best, which a row had timed: every later candidate of a short kernel was given up.
_ROW_S = 1e-4

# Times a kernel: runs averaged in one latency, latencies -> seconds of one run each.
Timer = Callable[[int, int], list[float]]


@dataclass(frozen=True)
class MeasureOptions:
    """How long a candidate is timed."""

    repeats: int = 3  # Raw latencies kept of a candidate that is neither hopeless nor a contender.
    # Seconds that one of them lasts at least, by running the kernel several times and dividing.
    min_repeat_s: float = 0.004
    # A candidate that takes more than that many times the best of its workload is given up after so many latencies: a
    # single run, then rows of at least 0.1 ms.
    hopeless_factor: float = 2.0
    hopeless_repeats: int = 2
    # A candidate whose median is at most that many times the best gets so many more latencies.
    contender_factor: float = 1.1
    contender_repeats: int = 4
    cold_cache: bool = False  # Time every run with caches flushed of all but the first argument; CPU only.
    # Time on several copies of the arguments, together larger than twice the L2, since a model's weights are cold; GPU
    # only (see `pipeline.tuning.measure.rotation`).
    rotate: bool = True
    compare_on_device: bool = True  # Compare large outputs with their reference on the GPU; else they are copied back.
    threads: int | None = None  # Threads of a CPU kernel; None leaves the default.


def is_hopeless(first_s: float, best_s: float, options: MeasureOptions) -> bool:
    """Whether a candidate is so far behind that even its first run, on cold caches, tells enough."""
    return first_s > max(_SLOW_S, 2 * options.hopeless_factor * best_s)


def time_adaptively(
    timer: Timer, number_for: Callable[[float], int], best_s: float, options: MeasureOptions
) -> list[float]:
    """Return the raw seconds of a candidate.

    `number_for` says how many runs one latency averages, from the seconds of a single run. `best_s` is the best of the
    workload so far, infinite when there is none.
    """
    limit_s = options.hopeless_factor * best_s
    first = timer(1, 1)
    while min(first) > limit_s and len(first) < options.hopeless_repeats:
        first += timer(min(number_for(min(first)), runs_for(min(first), _ROW_S)), 1)
    if min(first) > limit_s:
        return first
    number, seconds = settled_row(timer, number_for, min(first), options.repeats)
    if options.contender_repeats and statistics.median(seconds) <= options.contender_factor * best_s:
        seconds += timer(number, options.contender_repeats)
    return seconds


def settled_row(
    timer: Timer, number_for: Callable[[float], int], single_s: float, repeats: int
) -> tuple[int, list[float]]:
    """Return how many runs one latency averages, and latencies of such rows.

    A first run that something held up asks for too few runs of a short kernel: the row says how many it takes.
    """
    number, wanted = 0, number_for(single_s)
    while wanted > 2 * number:
        number = wanted
        seconds = timer(number, repeats)
        wanted = number_for(min(seconds))
    return number, seconds


def runs_for(single_s: float, min_repeat_s: float) -> int:
    """Return how many runs of a kernel last so long."""
    return max(1, math.ceil(min_repeat_s / single_s))
