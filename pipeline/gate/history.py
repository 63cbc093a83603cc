"""Whether kernels became slower over time, by what the database has of them.

Each task's pairs of measurements (`tuning_db.questions.changes`) give bounds of the ratio after over before. With pairs
enough they are those of signed ranks, as in a gate. Else they are those of the raw latencies of its fastest kernel: all
of one side above all of the other happens by chance once in C(n+m, n). The doubt allowed is shared by all tasks.

A machine that is busy, or a driver, moves all kernels at once. Each device has one such factor, and a task counts as
slower where it moved by more than the device.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from relaxtune.pipeline.experiment.experiment import centre
from relaxtune.tuning_db.questions.changes import TaskChange, changes
from relaxtune.tuning_db.records import RecordFilter, Route
from relaxtune.tuning_db.store import TuningDatabase

# Changes of a device that say what it does as a whole.
_DEVICE_MIN = 5


@dataclass(frozen=True)
class Regression:
    """A task's latency compared with an earlier one."""

    name: str
    family: str
    signature_key: str
    arch: str
    device_name: str
    route: Route
    # Medians of its fastest kernel before, and of the same after; of the best after where none was measured twice.
    before_us: float
    after_us: float
    ratio: float  # How many times as long it takes, over all pairs.
    least: float | None  # The ratio's lower bound; None where there are too few measurements for any.
    device_ratio: float  # How many times as long all kernels of the device and route take; 1 where they are few.
    kernels: int  # Pairs of measurements.

    def is_slower(self, threshold: float) -> bool:
        """Whether it surely takes more than `threshold` times as long, the device's own change left out."""
        return self.least is not None and self.least / max(1.0, self.device_ratio) > threshold


def regressions(
    database: TuningDatabase, before: RecordFilter, after: RecordFilter, *, threshold: float, alpha: float = 0.05
) -> tuple[Regression, ...]:
    """Return the tasks that surely became slower, the worst first.

    A task must take more than `threshold` times as long; 0 returns all that were compared. `alpha` is the probability
    with which any task may be named although it takes no longer.
    """
    found = changes(database, before, after)
    moved = _device_ratios(found)
    every = [_judged(one, alpha / len(found), moved[one.device_name, one.route]) for one in found]
    slower = [one for one in every if threshold == 0 or one.is_slower(threshold)]
    return tuple(sorted(slower, key=lambda one: -one.ratio))


def _judged(change: TaskChange, doubt: float, device_ratio: float) -> Regression:
    logs = _logs(change)
    bounds = centre(logs, doubt=doubt)
    least: float | None = bounds.least if math.isfinite(bounds.least) else None
    raw = change.before_us[0], change.after_us[0]
    if least is None and 1 / math.comb(sum(map(len, raw)), len(raw[0])) <= doubt:
        least = math.log(min(raw[1]) / max(raw[0]))
    return Regression(
        name=change.name,
        family=change.family,
        signature_key=change.signature_key,
        arch=change.arch,
        device_name=change.device_name,
        route=change.route,
        before_us=statistics.median(change.before_us[0]),
        after_us=statistics.median(change.after_us[0]),
        ratio=math.exp(bounds.estimate),
        least=None if least is None else math.exp(least),
        device_ratio=device_ratio,
        kernels=len(logs),
    )


def _logs(change: TaskChange) -> list[float]:
    pairs = zip(change.before_us, change.after_us, strict=True)
    return [math.log(statistics.median(after) / statistics.median(before)) for before, after in pairs]


def _device_ratios(found: Sequence[TaskChange]) -> dict[tuple[str, Route], float]:
    logs: dict[tuple[str, Route], list[float]] = defaultdict(list)
    for change in found:
        logs[change.device_name, change.route].append(statistics.median(_logs(change)))
    return {
        place: math.exp(statistics.median(values)) if len(values) >= _DEVICE_MIN else 1.0
        for place, values in logs.items()
    }
