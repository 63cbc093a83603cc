"""A candidate, from its proposal to its record, and the evaluator that has candidates built and measured.

::

    PROPOSED ── build ──▶ BUILT ── measure ──▶ MEASURED ── record ──▶ RECORDED
        └───────────────────┴──▶ FAILED: its own fault; a record keeps the status
                            └──▶ LOST: a fault of the machine, or the run ended first; never recorded

A lost candidate is built and measured once more, wherever it was lost: on this machine, a node or the way there.

A candidate is a value. Threads of builders and backends answer with its next state, through one inbox that only the
tuning thread reads. The threads share nothing else.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import tvm

from relaxtune.pipeline.errors import MeasuringBrokenError, UsageError
from relaxtune.pipeline.spans import note_span
from relaxtune.pipeline.tuning.measure.backend import Builder, Built, BusyClock, MeasureBackend, Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.tuning_db.records import Route, Status

if TYPE_CHECKING:
    from tvm.s_tir import meta_schedule as ms

    from relaxtune.pipeline.tuning.measure.recipe import Buildable

_US_PER_S = 1e6


class State(StrEnum):
    """Where a candidate is on its way."""

    PROPOSED = "proposed"
    BUILT = "built"
    MEASURED = "measured"
    FAILED = "failed"
    LOST = "lost"
    RECORDED = "recorded"


class Purpose(StrEnum):
    """Whether a candidate may become a task's kernel, or computes its reference (on the host or on the device)."""

    KERNEL = "kernel"
    REFERENCE = "reference"
    DEVICE_REFERENCE = "device reference"


@dataclass(frozen=True)
class Candidate:
    """A decision that may be tried for a task."""

    # As they are recorded.
    route: Route
    decision: str
    module: Buildable | None = None  # The scheduled module, or its recipe; None once it is recorded.
    schedule: ms.MeasureCandidate | None = None  # MetaSchedule's candidate, which the search learns from.
    purpose: Purpose = Purpose.KERNEL
    # The workload, and what it is built for, from the moment it is handed in.
    spec: WorkloadSpec | None = None
    target: tvm.target.Target | None = None
    retried: bool = False  # It was lost once, and is built and measured again.
    state: State = State.PROPOSED
    # From its build and its measurement on.
    artifact: BuiltArtifact | None = None
    outcome: Outcome | None = None
    # Seconds of its build; when its present state began, by `time.monotonic`.
    build_s: float = 0.0
    since_s: float = 0.0

    @property
    def key(self) -> str:
        """The short key of its decision."""
        return decision_key(self.decision)

    @property
    def workload(self) -> WorkloadSpec:
        """Its workload; it must be handed in."""
        if self.spec is None:
            raise UsageError(f"a candidate of route {self.route} was never handed in: it has no workload.")
        return self.spec

    @property
    def seconds(self) -> Sequence[float]:
        """Raw seconds of one run each; empty unless it was measured and is valid."""
        valid = self.outcome is not None and self.outcome.status is Status.OK
        return self.outcome.seconds if self.outcome is not None and valid else ()

    @property
    def latency_us(self) -> float | None:
        """The median latency; None unless it is valid."""
        return statistics.median(self.seconds) * _US_PER_S if self.seconds else None

    @property
    def fastest_us(self) -> float | None:
        """The fastest run; None unless it is valid."""
        return min(self.seconds) * _US_PER_S if self.seconds else None

    @property
    def spread(self) -> float | None:
        """The distance from the fastest to the slowest run over the median; None for fewer than two runs."""
        if len(self.seconds) < 2:
            return None
        return (max(self.seconds) - min(self.seconds)) / statistics.median(self.seconds)

    def handed_in(self, spec: WorkloadSpec) -> Candidate:
        """Return it as it goes to a builder."""
        return replace(self, spec=spec, since_s=time.monotonic())

    def built(self, built: Built) -> Candidate:
        """Return it after its build, which may have failed."""
        now = self._note("build", built.seconds)
        if built.artifact is None or self.purpose is not Purpose.KERNEL:
            outcome = Outcome(built.status, error=built.error, duration_s=built.seconds)
            return replace(self, state=_state_after(outcome), artifact=built.artifact, outcome=outcome)
        return replace(self, state=State.BUILT, artifact=built.artifact, build_s=built.seconds, since_s=now)

    def measured(self, outcome: Outcome) -> Candidate:
        """Return it after its measurement, which may have failed."""
        self._note("measure", outcome.duration_s)
        return self._with(outcome)

    def like_twin(self, outcome: Outcome) -> Candidate:
        """Return it with the outcome of equal code, whose measurement cost it nothing."""
        return self._with(replace(outcome, duration_s=0.0))

    def _with(self, outcome: Outcome) -> Candidate:
        resources = outcome.resources if self.artifact is None else self.artifact.resources
        whole = replace(outcome, duration_s=self.build_s + outcome.duration_s, resources=resources)
        return replace(self, state=_state_after(outcome), outcome=whole)

    def recorded(self) -> Candidate:
        """Return it without its module: thousands of them are kept until the end of their task."""
        return replace(self, state=State.RECORDED, module=None, schedule=None)

    def _note(self, stage: str, seconds: float) -> float:
        """Write down how long a stage took and how long it waited for that; return the time."""
        now, workload = time.monotonic(), self.workload.workload
        note_span(f"wait to {stage}", workload, self.since_s, now - seconds)
        note_span(stage, workload, now - seconds, now)
        return now


def decision_key(decision: str) -> str:
    """Return a short key of a decision: thousands of traces are megabytes."""
    return hashlib.blake2b(decision.encode(), digest_size=12).hexdigest()


def _state_after(outcome: Outcome) -> State:
    if isinstance(outcome.status, Unmeasured):
        return State.LOST
    return State.MEASURED if outcome.status is Status.OK else State.FAILED


class Evaluator:
    """Has candidates built and measured; those of a workload with equal binaries are measured once.

    If `exclusive`, it measures only while nothing is built: on a CPU, building would disturb the clock.
    """

    def __init__(
        self, builder: Builder, backend: MeasureBackend, target: tvm.target.Target, *, exclusive: bool
    ) -> None:
        self.builder, self.backend, self.exclusive = builder, backend, exclusive
        #: Events for the tuning thread; other threads may put events of their own.
        self.inbox: SimpleQueue[object] = SimpleQueue()
        #: Candidates that are handed in and not finished.
        self.pending = 0
        self._target = target
        self._queue_clock, self._measure_clock = BusyClock(), BusyClock()
        self._building = 0
        # Built candidates that wait until nothing is built.
        self._waiting: list[Candidate] = []
        # Workload and sha256 of the binary -> candidates with it, of which the first is being measured.
        self._measuring: dict[tuple[str, str], list[Candidate]] = {}
        self._known: dict[tuple[str, str], Outcome] = {}

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

    def submit(self, candidates: Sequence[Candidate], target: tvm.target.Target | None = None) -> None:
        """Build candidates for a target and measure those that may become kernels; returns at once."""
        # All are counted first: an exclusive device must not measure between the first and the last.
        self._building += len(candidates)
        self.pending += len(candidates)
        for one in candidates:
            self._build(replace(one, target=target or self._target))

    def _build(self, candidate: Candidate) -> None:
        if candidate.module is None or candidate.target is None:
            raise UsageError(f"a candidate of route {candidate.route} has no module to build.")
        self.builder.submit(candidate.module, candidate.target, lambda built: self.inbox.put(candidate.built(built)))

    def take(self, timeout_s: float) -> list[object] | None:
        """Return what arrived next: finished candidates, or another event; None when nothing did within the time.

        Raises `MeasuringBrokenError`: nothing can be built or measured any more.
        """
        try:
            event = self.inbox.get(timeout=timeout_s) if timeout_s else self.inbox.get_nowait()
        except Empty:
            return None
        if not isinstance(event, Candidate):
            return [event]
        finished = self._advance(event)
        self.pending -= len(finished)
        for one in finished:
            if one.outcome is not None and one.outcome.status is Unmeasured.BROKEN:
                raise MeasuringBrokenError(str(one.outcome.error))
        return list(finished)

    def _advance(self, candidate: Candidate) -> list[Candidate]:
        """Take a candidate one step further; return the candidates that are finished."""
        finished: list[Candidate] = []
        if candidate.purpose is Purpose.KERNEL and candidate.artifact is not None and candidate.outcome is not None:
            finished = self._after_measurement(candidate)
        else:
            self._building -= 1
            (self._waiting if candidate.state is State.BUILT else finished).append(candidate)
        finished = [one for one in finished if not self._retries(one)]
        if not (self.exclusive and self._building):
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                finished += self._measure(one)
        self._queue_clock.run_while(bool(self._waiting) or len(self._measuring) > self.backend.capacity)
        self._measure_clock.run_while(bool(self._measuring))
        return finished

    def _measure(self, candidate: Candidate) -> list[Candidate]:
        """Measure a built candidate, or wait for a twin; return it where equal code was measured before."""
        key = _code_of(candidate)
        if key in self._known:
            return [candidate.like_twin(self._known[key])]
        twins = self._measuring.setdefault(key, [])
        twins.append(candidate)
        if len(twins) == 1 and candidate.artifact is not None:
            self.backend.submit(
                candidate.artifact, candidate.workload, lambda outcome: self.inbox.put(candidate.measured(outcome))
            )
        return []

    def _retries(self, candidate: Candidate) -> bool:
        """Build and measure a candidate again that was lost for the first time; return whether that is so."""
        if candidate.outcome is None or candidate.outcome.status is not Unmeasured.LOST or candidate.retried:
            return False
        if candidate.artifact is not None:
            self.builder.discard(candidate.artifact)
        again = replace(candidate, state=State.PROPOSED, artifact=None, outcome=None, retried=True)
        self._building += 1
        self._build(again.handed_in(candidate.workload))
        return True

    def _after_measurement(self, candidate: Candidate) -> list[Candidate]:
        """Return a measured candidate and its twins. Twins of a lost one are not lost: the next of them is measured."""
        key, outcome = _code_of(candidate), candidate.outcome
        twins = self._measuring.pop(key)[1:]
        if outcome is None or outcome.status is Unmeasured.LOST:
            for one in twins:
                self._measure(one)
            return [candidate]
        if outcome.status is Status.OK:
            self._known[key] = outcome
        return [candidate, *(one.like_twin(outcome) for one in twins)]


def _code_of(candidate: Candidate) -> tuple[str, str]:
    return candidate.workload.workload, "" if candidate.artifact is None else candidate.artifact.sha256
