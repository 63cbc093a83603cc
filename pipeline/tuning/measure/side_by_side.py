"""Measuring on several devices side by side, each with workloads of its own as long as there are enough.

    submit ── waiting work ──▶ a thread for each place of a device ── Measurer ──▶ outcome

A device keeps a workload's arguments, which take it up to a second to make. So it goes on with the workloads that it
began, then begins others, and takes those of other devices only when it would be idle. The first work and the final of
a task come before further candidates, in the order of the tasks: so the first tasks are done first.

A `Measurer` is a process of this machine, or an actor of a cluster.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from relaxtune.pipeline.tuning.measure.backend import (
    BusyClock,
    MeasureBackend,
    OnCompared,
    OnMeasured,
    Outcome,
    Unmeasured,
)
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec

logger = logging.getLogger(__name__)


class Measurer(Protocol):
    """One device that does one thing at a time."""

    name: str  # Of the device, for logs and figures.
    host: str  # Where its reference outputs are kept: what one device of a host has computed, the others find there.

    @property
    def restarts(self) -> int:
        """How often its process was replaced."""

    def ready(self) -> bool:
        """Wait until it can measure; False once it was left. It raises where it never will."""

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Compute a workload's reference; the first candidate reports a failure."""

    def measure(self, artifact: BuiltArtifact, spec: WorkloadSpec) -> Outcome:
        """Check and time a candidate."""

    def compare(self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int) -> Sequence[Outcome] | None:
        """Check candidates of one workload and time them alternately; None when they could not all be run."""

    def leave(self) -> None:
        """Give up what is in hand and everything after it, within a moment; safe between threads."""

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True, eq=False)
class _Work:
    """Something for a device to do; `fail` tells that no device is left to do it. The least `rank` is done first."""

    workload: str
    do: Callable[[Measurer], None]
    fail: Callable[[Outcome], None]
    rank: tuple[int, int]


# Of a task: its reference, first proposals and fallback.
_FIRST_WORK = 4
# The home of workloads that no device has begun.
_NO_HOME = 0


class WaitingWork:
    """Work that waits for devices, and the homes of workloads: the devices that began them. For one thread at a time.

    A device takes the work of least rank of its own workloads and of those without a home. Where there is none, it
    takes the least of other devices' work.
    """

    def __init__(self) -> None:
        # Home -> workload -> its work by rank. Workloads without a home come in the order of their ranks, so that the
        # first is the least, until a device leaves.
        self._queues: dict[int, dict[str, list[_Work]]] = defaultdict(dict)
        self._homes: dict[str, int] = {}
        self._in_order = True

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return any(self._queues.values())

    def has(self, workload: str) -> bool:
        """Whether something waits for a workload."""
        return workload in self._queues[self._homes.get(workload, _NO_HOME)]

    def put(self, work: _Work) -> None:
        """Let something wait."""
        queue = self._queues[self._homes.get(work.workload, _NO_HOME)]
        insort(queue.setdefault(work.workload, []), work, key=lambda one: one.rank)

    def take(self, device: object, held_up: Callable[[str], bool]) -> _Work | None:
        """Return what a device does next, and make it the home of that workload if it has none; None without any.

        The device must not take work of a workload that is `held_up`.
        """
        free = (name for name in self._queues[_NO_HOME] if not held_up(name))
        found = [(_NO_HOME, name) for name in islice(free, 1 if self._in_order else None)]
        found += [(id(device), name) for name in self._queues[id(device)] if not held_up(name)]
        found = found or [(home, name) for home, queue in self._queues.items() for name in queue if not held_up(name)]
        if not found:
            return None
        home, workload = min(found, key=lambda one: self._queues[one[0]][one[1]][0].rank)
        work = self._queues[home][workload].pop(0)
        self._homes.setdefault(workload, id(device))
        left = self._queues[home].pop(workload) if home == _NO_HOME else self._queues[home][workload]
        if left:
            self._queues[self._homes[workload]][workload] = left
        elif home != _NO_HOME:
            del self._queues[home][workload]
        return work

    def leave(self, device: object) -> None:
        """Take a device's workloads from it."""
        self._homes = {name: home for name, home in self._homes.items() if home != id(device)}
        self._queues[_NO_HOME] |= self._queues.pop(id(device), {})
        self._in_order = False

    def take_all(self) -> list[_Work]:
        """Return everything; nothing waits any more."""
        found = [work for queue in self._queues.values() for waiting in queue.values() for work in waiting]
        self._queues.clear()
        return found


class SideBySide(MeasureBackend):
    """Devices of one model, each served by threads of its own.

    A device that cannot be used is left alone; the others go on.

    The `measurers` are closed with this backend. Each device has `depth` things at a time: the next is on its way while
    one is done.
    """

    def __init__(self, measurers: Sequence[Measurer], undisturbed: bool, depth: int = 1) -> None:
        self._measurers = tuple(measurers)
        self.undisturbed = undisturbed
        self._changed = threading.Condition()
        self._waiting = WaitingWork()
        # Workload -> its place among all, and how much work it had.
        self._places: dict[str, int] = {}
        self._put_counts: Counter[str] = Counter()
        self._count = 0
        # Host and workload. A workload's first work on a host computes its reference; other devices do other work.
        self._preparing: set[tuple[str, str]] = set()
        self._prepared: set[tuple[str, str]] = set()
        self._closed = False
        self._broken: Outcome | None = None
        self._clocks = {id(one): BusyClock() for one in self._measurers}
        self._threads = [
            threading.Thread(target=self._serve, args=(one,), name=f"relaxtune-measure-{number}", daemon=True)
            for number, one in enumerate(one for one in self._measurers for _ in range(depth))
        ]
        self._alive = len(self._threads)
        for thread in self._threads:
            thread.start()

    @property
    def capacity(self) -> int:
        """The number of devices."""
        return len(self._measurers)

    @property
    def restarts(self) -> int:
        """Processes that were replaced."""
        return sum(one.restarts for one in self._measurers)

    @property
    def busy_s(self) -> Mapping[str, float]:
        """Seconds in which each device had something to do."""
        return {one.name: self._clocks[id(one)].seconds for one in self._measurers}

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Compute a workload's reference after what was handed in before."""
        self._put(spec.workload, lambda device: device.prepare_reference(spec), lambda _: None)

    def submit(self, artifact: BuiltArtifact, spec: WorkloadSpec, on_measured: OnMeasured) -> None:
        """Measure a candidate."""
        self._put(spec.workload, lambda device: on_measured(device.measure(artifact, spec)), on_measured)

    def compare(
        self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int, on_compared: OnCompared
    ) -> None:
        """Time candidates of one workload alternately on one device."""
        self._put(
            spec.workload,
            lambda device: on_compared(device.compare(artifacts, spec, rounds)),
            lambda _: on_compared(None),
            last=True,
        )

    def close(self) -> None:
        """End the devices' processes and the threads that feed them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # Each takes seconds to end, and a cluster has a hundred of them.
        with ThreadPoolExecutor(max(1, len(self._measurers))) as pool:
            list(pool.map(lambda one: one.leave(), self._measurers))
            for thread in self._threads:
                thread.join()
            list(pool.map(lambda one: one.close(), self._measurers))

    def _put(
        self, workload: str, do: Callable[[Measurer], None], fail: Callable[[Outcome], None], *, last: bool = False
    ) -> None:
        with self._changed:
            refused = Outcome(Unmeasured.STOPPED, error="the backend is closed") if self._closed else self._broken
            if refused is None:
                place = self._places.setdefault(workload, len(self._places))
                self._put_counts[workload] += 1
                self._count += 1
                first = last or self._put_counts[workload] <= _FIRST_WORK
                rank = (0, place) if first else (1, self._count)
                self._waiting.put(_Work(workload, do, fail, rank))
                held = any(name == workload for _, name in self._preparing)
                # A device of a host that prepares the workload would not take it.
                self._changed.notify(len(self._threads) if held else 1)
        if refused is not None:
            fail(refused)

    def _serve(self, device: Measurer) -> None:
        work = None
        clock = self._clocks[id(device)]
        # The border of a thread: a device that is gone must not take its work along.
        try:
            while (device.ready() or self._closed) and (work := self._next(device)) is not None:
                clock.enter()
                try:
                    work.do(device)
                finally:
                    clock.leave()
                self._done(work, device.host)
                work = None
        except Exception as e:
            logger.exception("%s is skipped: it cannot be measured on", device.name)
            self._leave(work, device, Outcome(Unmeasured.BROKEN, error=str(e)))

    def _next(self, device: Measurer) -> _Work | None:
        """Wait for work that no other device of the host stands in the way of; None at the end."""
        host = device.host
        with self._changed:
            while True:
                work = self._waiting.take(device, lambda workload: (host, workload) in self._preparing)
                if work is not None:
                    if (host, work.workload) not in self._prepared:
                        self._preparing.add((host, work.workload))
                    return work
                if self._closed and not self._waiting:
                    return None
                self._changed.wait()

    def _done(self, work: _Work, host: str) -> None:
        with self._changed:
            if (host, work.workload) in self._preparing:
                self._preparing.discard((host, work.workload))
                # Two hundred idle threads of a cluster need not wake for work that is not there.
                if self._waiting.has(work.workload):
                    self._changed.notify_all()
            self._prepared.add((host, work.workload))

    def _leave(self, work: _Work | None, device: Measurer, broken: Outcome) -> None:
        """Give back the work of a device that is gone; without any device, all work fails."""
        given_up: list[_Work] = []
        with self._changed:
            self._alive -= 1
            self._waiting.leave(device)
            if work is not None:
                self._preparing.discard((device.host, work.workload))
                self._waiting.put(work)
            if not self._alive:
                self._broken = broken
                given_up = self._waiting.take_all()
            self._changed.notify_all()
        for one in given_up:
            one.fail(broken)
