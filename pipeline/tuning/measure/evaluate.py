"""Building and measuring candidates, each at its own pace.

Candidates are submitted at any time and come back one by one, in the order in which they are finished. A slow build
delays no other candidate, except on a device that building would disturb (`exclusive`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import tvm

from relaxtune.pipeline.errors import MeasuringBrokenError
from relaxtune.pipeline.spans import note_span
from relaxtune.pipeline.tuning.measure.backend import Builder, Built, MeasureBackend, Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.clock import BusyClock
from relaxtune.pipeline.tuning.measure.recipe import Buildable
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.tuning_db.records import Status

# Workload and sha256 of the binary.
_CodeKey = tuple[str, str]
# A candidate whose process was killed from outside is measured so many times at most.
_ATTEMPTS_MAX = 2


@dataclass(frozen=True)
class Job:
    """What to build and measure, and the workload that it computes."""

    what: Buildable
    spec: WorkloadSpec


@dataclass(frozen=True)
class Finished:
    """A job that came back.

    Attributes
    ----------
    tag
        What it was submitted with.
    outcome
        What came of it; a module that is only built has no latencies.
    artifact
        What was built, for the receiver to discard (`Builder.discard`); None when there is nothing.
    """

    tag: object
    outcome: Outcome
    artifact: BuiltArtifact | None = None


@dataclass
class _Ticket:
    """One job on its way; `twins` are jobs with the same binary, which share its measurement."""

    job: Job
    tag: object
    artifact: BuiltArtifact = field(default_factory=lambda: BuiltArtifact(b"", ""))
    build_s: float = 0.0
    attempts: int = 0
    since_s: float = field(default_factory=time.monotonic)
    twins: list[_Ticket] = field(default_factory=list)

    @property
    def key(self) -> _CodeKey:
        return self.job.spec.workload, self.artifact.sha256

    def noted(self, stage: str, seconds: float) -> None:
        """Write down a stage that took the last so many seconds, and what it waited for that before."""
        now, workload = time.monotonic(), self.job.spec.workload
        note_span(f"wait to {stage}", workload, self.since_s, now - seconds)
        note_span(stage, workload, now - seconds, now)
        self.since_s = now


class Evaluator:
    """Builds and measures jobs; candidates of a workload that compiled to the same binary are measured once.

    Parameters
    ----------
    builder, backend : Builder, MeasureBackend
        Where candidates are built and measured.
    target : Target
        What is compiled for.
    exclusive : bool
        Measure only while nothing is built: on a CPU, building would disturb the clock.
    """

    def __init__(
        self, builder: Builder, backend: MeasureBackend, target: tvm.target.Target, *, exclusive: bool
    ) -> None:
        self.builder = builder
        self.backend = backend
        self.exclusive = exclusive
        self.pending = 0
        self._target = target
        self._queue_clock, self._measure_clock = BusyClock(), BusyClock()
        self._finished: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        # Guards what follows: the callbacks of the builder and of the backend come from their threads.
        self._lock = threading.Lock()
        self._building = 0
        self._measuring = 0
        self._held: list[_Ticket] = []
        self._by_key: dict[_CodeKey, _Ticket] = {}
        self._known: dict[_CodeKey, Outcome] = {}

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall seconds in which something was built, waited built for a device, was measured."""
        return {
            "build": self.builder.clock.seconds,
            "queue": self._queue_clock.seconds,
            "measure": self._measure_clock.seconds,
        }

    @property
    def restarts(self) -> int:
        """Processes that were replaced."""
        return self.builder.restarts + self.backend.restarts

    def submit_builds(self, mods: Sequence[tuple[Buildable, object]], target: tvm.target.Target) -> None:
        """Hand in modules that are built and not measured; `take` returns each with its tag and artifact."""
        with self._lock:
            self._building += len(mods)
        self.pending += len(mods)
        for mod, tag in mods:
            self.builder.submit(mod, target, lambda built, tag=tag: self._built_only(tag, built))  # type: ignore[misc]

    def submit(self, jobs: Sequence[tuple[Job, object]]) -> None:
        """Hand in candidates; `take` returns each with its tag."""
        # All at once, so that an exclusive device is not measured on between the first and the last.
        with self._lock:
            self._building += len(jobs)
        self.pending += len(jobs)
        for job, tag in jobs:
            ticket = _Ticket(job, tag)
            self.builder.submit(job.what, self._target, lambda built, ticket=ticket: self._built(ticket, built))  # type: ignore[misc]

    def take(self, timeout_s: float | None) -> Finished | None:
        """Return a finished candidate; None when there is none within the time, or after a call of `wake`.

        Raises
        ------
        MeasuringBrokenError
            Nothing can be built or measured any more.
        """
        try:
            finished = self._finished.get(timeout=timeout_s) if timeout_s != 0 else self._finished.get_nowait()
        except queue.Empty:
            return None
        if finished is not None:
            self.pending -= 1
            if finished.outcome.status is Unmeasured.BROKEN:
                raise MeasuringBrokenError(str(finished.outcome.error))
        return finished

    def wake(self) -> None:
        """Let the thread that waits in `take` look elsewhere; safe between threads."""
        self._finished.put(None)

    def _built_only(self, tag: object, built: Built) -> None:
        self._finished.put(Finished(tag, Outcome(built.status, error=built.error), built.artifact))
        self._release(None)

    def _built(self, ticket: _Ticket, built: Built) -> None:
        """Take in a build, in the builder's thread."""
        ticket.build_s = built.seconds
        ticket.noted("build", built.seconds)
        if built.artifact is None:
            outcome = Outcome(built.status, error=built.error, duration_s=built.seconds)
            self._finished.put(Finished(ticket.tag, outcome))
            self._release(None)
        else:
            ticket.artifact = built.artifact
            self._release(ticket)

    def _release(self, ticket: _Ticket | None) -> None:
        """Count a build as over, and submit what is built if nothing is in the way."""
        with self._lock:
            self._building -= 1
            if ticket is not None:
                self._held.append(ticket)
            ready = self._held if not self.exclusive or self._building == 0 else []
            if ready:
                self._held = []
            self._show()
        for one in ready:
            self._measure(one)

    def _measure(self, ticket: _Ticket) -> None:
        """Submit a built candidate, unless equal code was measured or is being measured."""
        with self._lock:
            known, twin = self._known.get(ticket.key), self._by_key.get(ticket.key)
            if twin is not None:
                twin.twins.append(ticket)
                return
            if known is None:
                self._by_key[ticket.key] = ticket
                ticket.attempts += 1
                self._measuring += 1
                self._show()
        if known is not None:
            self._finish(ticket, replace(known, duration_s=0.0))
        else:
            self.backend.submit(ticket.artifact, ticket.job.spec, lambda outcome: self._measured(ticket, outcome))

    def _measured(self, ticket: _Ticket, outcome: Outcome) -> None:
        """Take in a measurement, in a thread of the backend."""
        ticket.noted("measure", outcome.duration_s)
        with self._lock:
            self._measuring -= 1
            self._by_key.pop(ticket.key, None)
            if outcome.status is Status.OK:
                self._known[ticket.key] = outcome
            self._show()
        twins, ticket.twins = ticket.twins, []
        if outcome.status is not Unmeasured.LOST:
            self._finish(ticket, outcome)
            for twin in twins:
                self._finish(twin, replace(outcome, duration_s=0.0))
            return
        if ticket.attempts < _ATTEMPTS_MAX:
            twins.append(ticket)
        else:
            self._finish(ticket, outcome)
        for again in twins:
            self._measure(again)

    def _finish(self, ticket: _Ticket, outcome: Outcome) -> None:
        duration_s = ticket.build_s + outcome.duration_s
        told = replace(outcome, duration_s=duration_s, resources=ticket.artifact.resources)
        self._finished.put(Finished(ticket.tag, told, ticket.artifact))

    def _show(self) -> None:
        self._queue_clock.run_while(bool(self._held) or self._measuring > self.backend.capacity)
        self._measure_clock.run_while(self._measuring > 0)
