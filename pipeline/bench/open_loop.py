"""Calls that arrive at times of their own, whether earlier ones have ended or not.

A caller that waits for each result sends fewer calls to a slow artifact, and hides its queue. Here every call has a
planned arrival. Its latency runs from there to its end, the time in the queue included.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np

from relaxtune.pipeline.bench.energy import Energy
from relaxtune.pipeline.bench.tables import cost_of_a_million
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.printed_tables import TableView

DEFAULT_SECONDS = 10.0
# Calls of a burst.
_BURST = 8
# With fewer calls a second than this share of the planned ones, the queue grows for as long as calls arrive.
_KEEPS_UP = 0.95


class Arrivals(StrEnum):
    """How planned arrivals are spread; both have the same mean rate."""

    POISSON = "poisson"  # Each call by itself.
    BURSTY = "bursty"  # Eight calls at once, each burst by itself.


@dataclass(frozen=True)
class OpenLoad:
    """The arrivals of calls, and the largest good latency."""

    rate_per_s: float
    arrivals: Arrivals = Arrivals.POISSON
    limit_ms: float | None = None  # None: every latency is good.
    seconds: float = DEFAULT_SECONDS
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        """Refuse loads that are none; raises `UsageError`, which names the option."""
        for option, value in (("--rate", self.rate_per_s), ("--slo-ms", self.limit_ms), ("--duration", self.seconds)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{option} {value:g}: expected more than 0")

    def planned_s(self, seed: int = 0) -> np.ndarray:
        """Return the planned arrivals in seconds from the start, in order; at least one."""
        size = _BURST if self.arrivals is Arrivals.BURSTY else 1
        rng = np.random.default_rng(seed)
        # Of a Poisson process, the number in a span is Poisson's, and their places are uniform.
        bursts = max(1, rng.poisson(self.rate_per_s * self.seconds / size))
        return np.repeat(np.sort(rng.uniform(0, self.seconds, bursts)), size)


@dataclass(frozen=True)
class OpenLoadReport:
    """The latencies (ms) of calls from their planned arrivals, in order of arrival, and until when all had ended."""

    load: OpenLoad
    callers: int
    latencies_ms: tuple[float, ...]
    took_s: float
    sizes: str = ""
    energy: Energy | None = None

    @property
    def calls_per_s(self) -> float:
        """Calls over the time until the last one ended."""
        return len(self.latencies_ms) / self.took_s

    @property
    def goodput_per_s(self) -> float:
        """The calls a second that ended within the limit."""
        limit = math.inf if self.load.limit_ms is None else self.load.limit_ms
        return sum(latency <= limit for latency in self.latencies_ms) / self.took_s

    @property
    def keeps_up(self) -> bool:
        """Whether calls ended about as fast as they arrived."""
        return self.calls_per_s >= _KEEPS_UP * len(self.latencies_ms) / self.load.seconds

    @property
    def cost_of_a_million(self) -> float | None:
        """The price of a million calls within the limit, at this rate; None without a price, or without such calls."""
        return cost_of_a_million(self.load.price_per_hour, self.goodput_per_s)

    def percentile(self, share: int) -> float:
        """Return the latency (ms) that so many of a hundred calls do not exceed."""
        return float(np.percentile(self.latencies_ms, share, method="inverted_cdf"))

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data, all latencies included."""
        return {
            **asdict(self),
            **{f"p{share}_ms": self.percentile(share) for share in (50, 90, 99)},
            "calls_per_s": self.calls_per_s,
            "goodput_per_s": self.goodput_per_s,
            "keeps_up": self.keeps_up,
            "cost_of_a_million": self.cost_of_a_million,
            "energy": None if self.energy is None else self.energy.to_json(len(self.latencies_ms)),
        }


def run_open_loop(
    callers: Sequence[Callable[[], object]], load: OpenLoad, *, seed: int = 0
) -> tuple[tuple[float, ...], float]:
    """Return the latency (ms) of each planned call, and the seconds until all had ended.

    A caller takes the next call as soon as it is free, but none before its arrival. Errors of callers are raised.
    """
    planned = load.planned_s(seed)
    latencies_ms = [0.0] * len(planned)
    numbers = itertools.count()
    started = time.perf_counter()

    def work(caller: Callable[[], object]) -> None:
        # The next number is taken by one thread alone: the counter is a function in C.
        while (number := next(numbers)) < len(planned):
            arrival = started + planned[number]
            time.sleep(max(0.0, arrival - time.perf_counter()))
            caller()
            latencies_ms[number] = 1e3 * (time.perf_counter() - arrival)

    with ThreadPoolExecutor(len(callers)) as pool:
        for done in [pool.submit(work, caller) for caller in callers]:
            done.result()
    return tuple(latencies_ms), max(load.seconds, time.perf_counter() - started)


def render_load(report: OpenLoadReport) -> TableView:
    """Return the report as a table for a terminal."""
    load, cost = report.load, report.cost_of_a_million
    late = "" if load.limit_ms is None else f" within {load.limit_ms:g} ms"
    facts = {
        "planned": f"{load.rate_per_s:g} calls/s for {load.seconds:g} s ({load.arrivals.value})",
        "calls": f"{len(report.latencies_ms)}, {report.calls_per_s:.1f} a second",
        "goodput": f"{report.goodput_per_s:.1f} calls/s{late}",
        **{f"p{share}, ms": f"{report.percentile(share):.3f}" for share in (50, 90, 99)},
        **({} if report.keeps_up else {"overload": "calls arrive faster than they end; the queue grows"}),
        **({} if cost is None else {f"a million calls{late}": f"{cost:.4g} at {load.price_per_hour:g} an hour"}),
        **({} if report.energy is None else {"energy": report.energy.text(len(report.latencies_ms))}),
    }
    return TableView.facts(f"latency from the planned arrival{report.sizes and f' at {report.sizes}'}", facts.items())
