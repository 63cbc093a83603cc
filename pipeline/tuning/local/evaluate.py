"""Building and measuring candidates, each at its own pace, through MetaSchedule's runner interface.

Candidates are handed in at any time and come back one by one, in the order in which they are finished. A candidate that
builds for long holds up nobody else's, except on a device that building would disturb (`exclusive`).
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tvm
from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.tuning.local.build_pool import Built
from relaxtune.pipeline.tuning.local.builder import AsyncBuilder, build_all
from relaxtune.pipeline.tuning.measure.clock import BusyClock
from relaxtune.pipeline.tuning.measure.failure import CANCELLED, read_failure
from relaxtune.pipeline.tuning.measure.notes import CandidateNote, attach_note
from relaxtune.pipeline.tuning.measure.resources import NO_RESOURCES, Resources, read_resources
from relaxtune.tuning_db.records import Status

# Workload and sha256 of the binary.
_CodeKey = tuple[str, str]
_SUFFIXES = (".so", ".json", ".resources.json")


@dataclass(frozen=True)
class Job:
    """A scheduled module to build and measure, and what its arguments are."""

    mod: tvm.ir.IRModule
    args_info: Sequence[ms.arg_info.ArgInfo]
    note: CandidateNote


@dataclass(frozen=True)
class Outcome:
    """What came of one job: its raw seconds when `status` is ok, else the error text.

    Attributes
    ----------
    duration_s
        Seconds of a build process and of the measuring process.
    resources
        What the kernel takes of a GPU, where it is known.
    """

    status: Status
    seconds: tuple[float, ...] = ()
    error: str | None = None
    duration_s: float = 0.0
    resources: Resources = NO_RESOURCES


@dataclass(frozen=True)
class Finished:
    """A job that came back.

    Attributes
    ----------
    tag
        What it was handed in with.
    outcome
        None when it was given up because the run is stopped.
    artifact
        Its shared object, which the receiver removes (`remove_artifact`); None when there is none.
    """

    tag: object
    outcome: Outcome | None
    artifact: str | None = None


@dataclass
class _Ticket:
    """One job on its way."""

    job: Job
    tag: object
    artifact: str = ""
    key: _CodeKey | None = None
    build_s: float = 0.0
    resources: Resources = NO_RESOURCES
    twins: list[_Ticket] = field(default_factory=list)


class Evaluator:
    """Builds and measures jobs; candidates of a workload that compiled to the same binary are measured once.

    Parameters
    ----------
    builder : AsyncBuilder
        Build processes of this machine, or a cluster's builder.
    runner : ms.runner.Runner
        MetaSchedule's interface: one measuring process, or a cluster.
    target : Target
        What is compiled for.
    exclusive : bool
        Measure only while nothing is built: on a CPU, building would disturb the clock.
    """

    def __init__(
        self, builder: AsyncBuilder, runner: ms.runner.Runner, target: tvm.target.Target, *, exclusive: bool
    ) -> None:
        self.builder = builder
        self.exclusive = exclusive
        self._runner = runner
        self._target = target
        self._queue_clock, self._measure_clock = BusyClock(), BusyClock()
        self._finished: queue.SimpleQueue[Finished | Exception | None] = queue.SimpleQueue()
        self._measuring: queue.SimpleQueue[tuple[_Ticket, ms.runner.RunnerFuture] | None] = queue.SimpleQueue()
        # Guards what follows, which the builder's thread and the one that waits for measurements share.
        self._lock = threading.Lock()
        self._building = 0
        self._held: list[_Ticket] = []
        self._by_key: dict[_CodeKey, _Ticket] = {}
        # Valid measurements by workload and sha256 of the binary.
        self._known: dict[_CodeKey, Outcome] = {}
        self.pending = 0
        self._thread = threading.Thread(target=self._take_measurements, name="relaxtune-results", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall seconds in which something was built, waited built for the device, was measured."""
        return {
            "build": self.builder.clock.seconds,
            "queue": self._queue_clock.seconds,
            "measure": self._measure_clock.seconds,
        }

    @property
    def runner(self) -> ms.runner.Runner:
        """What measures."""
        return self._runner

    @property
    def restarts(self) -> int:
        """Processes of this machine that were replaced; those of a foreign builder or runner are not known."""
        process = getattr(self._runner, "process", None)
        return self.builder.restarts + (process.restarts if process is not None else 0)

    def build(self, mods: Sequence[tvm.ir.IRModule], target: tvm.target.Target) -> list[ms.builder.BuilderResult]:
        """Return the artifacts of modules that are not measured, such as references; waits for all of them."""
        items = [ms.builder.BuilderInput(mod, target) for mod in mods]
        return [built.result for built in build_all(self.builder, items)]

    def submit_builds(self, mods: Sequence[tuple[tvm.ir.IRModule, object]], target: tvm.target.Target) -> None:
        """Hand in modules that are built and not measured; `take` returns each with its tag and artifact."""
        with self._lock:
            self._building += len(mods)
        self.pending += len(mods)
        for mod, tag in mods:
            item = ms.builder.BuilderInput(mod, target)
            self.builder.submit(item, lambda built, tag=tag: self._built_only(tag, built))  # type: ignore[misc]

    def submit(self, jobs: Sequence[tuple[Job, object]]) -> None:
        """Hand in candidates; `take` returns each with its tag."""
        tickets = [_Ticket(job, tag) for job, tag in jobs]
        # All at once, so that an exclusive device is not measured on between the first and the last.
        with self._lock:
            self._building += len(tickets)
        self.pending += len(tickets)
        for ticket in tickets:
            noted = attach_note(ticket.job.mod, ticket.job.note)
            item = ms.builder.BuilderInput(noted, self._target)
            self.builder.submit(item, lambda built, ticket=ticket: self._built(ticket, built))  # type: ignore[misc]

    def take(self, timeout_s: float | None) -> Finished | None:
        """Return a finished candidate; None when there is none within the time, or somebody called `wake`.

        Raises
        ------
        Exception
            What broke the builder or the runner.
        """
        try:
            finished = self._finished.get(timeout=timeout_s) if timeout_s != 0 else self._finished.get_nowait()
        except queue.Empty:
            return None
        if isinstance(finished, Exception):
            raise finished
        if finished is not None:
            self.pending -= 1
        return finished

    def wake(self) -> None:
        """Let whoever waits in `take` look elsewhere; safe between threads."""
        self._finished.put(None)

    def close(self) -> None:
        """End the thread that waits for measurements; the builder and the runner must have ended before."""
        self._measuring.put(None)
        self._thread.join()

    def _built_only(self, tag: object, built: Built) -> None:
        if built.broken is not None:
            self._finished.put(built.broken)
            return
        error = built.result.error_msg
        outcome = None if error is None else _failed(str(error), Status.BUILD_ERROR)
        artifact = str(built.result.artifact_path) if error is None else None
        self._finished.put(Finished(tag, outcome, artifact))
        self._release(None)

    def _built(self, ticket: _Ticket, built: Built) -> None:
        """Take in a build, in the builder's thread."""
        if built.broken is not None:
            self._finished.put(built.broken)
            return
        ticket.build_s = built.seconds
        result = built.result
        if result.error_msg is not None:
            self._finish(ticket, _failed(str(result.error_msg), Status.BUILD_ERROR))
        else:
            ticket.artifact = str(result.artifact_path)
            ticket.key = _code_key(ticket)
            ticket.resources = read_resources(ticket.artifact)
        self._release(ticket if result.error_msg is None else None)

    def _release(self, ticket: _Ticket | None) -> None:
        """Count a build as over, and hand what is built to the runner if nothing is in the way."""
        with self._lock:
            self._building -= 1
            if ticket is not None:
                self._held.append(ticket)
                self._queue_clock.enter()
            ready = self._held if not self.exclusive or self._building == 0 else []
            if ready:
                self._held = []
        for one in ready:
            self._measure(one)

    def _measure(self, ticket: _Ticket) -> None:
        """Hand a built candidate to the runner, unless equal code was measured or is being measured."""
        with self._lock:
            known = self._known.get(ticket.key) if ticket.key is not None else None
            twin = self._by_key.get(ticket.key) if ticket.key is not None else None
            if twin is not None:
                twin.twins.append(ticket)
            elif known is None and ticket.key is not None:
                self._by_key[ticket.key] = ticket
        if known is not None or twin is not None:
            self._queue_clock.leave()
            if known is not None:
                self._finish(ticket, known)
            return
        run = ms.runner.RunnerInput(ticket.artifact, self._target.kind.name, ticket.job.args_info)
        (future,) = self._runner.run([run])
        self._measuring.put((ticket, future))

    def _take_measurements(self) -> None:
        while (item := self._measuring.get()) is not None:
            ticket, future = item
            self._queue_clock.leave()
            self._measure_clock.enter()
            began = time.monotonic()
            # The border of the thread: an error of a foreign runner must reach the run.
            try:
                outcome = _measured(future.result())
            except Exception as e:
                self._finished.put(e)
                return
            finally:
                self._measure_clock.leave()
            took = time.monotonic() - began
            with self._lock:
                if ticket.key is not None:
                    self._by_key.pop(ticket.key, None)
                    if outcome is not None and outcome.status is Status.OK:
                        self._known[ticket.key] = outcome
            self._finish(ticket, outcome, took)
            for twin in ticket.twins:
                self._finish(twin, outcome)

    def _finish(self, ticket: _Ticket, outcome: Outcome | None, measure_s: float = 0.0) -> None:
        if outcome is not None:
            duration = ticket.build_s + measure_s
            outcome = Outcome(outcome.status, outcome.seconds, outcome.error, duration, ticket.resources)
        self._finished.put(Finished(ticket.tag, outcome, ticket.artifact or None))


def remove_artifact(artifact: str) -> None:
    """Remove a candidate's shared object and what lies beside it."""
    for suffix in _SUFFIXES:
        with contextlib.suppress(OSError):
            Path(artifact).with_suffix(suffix).unlink()


def _code_key(ticket: _Ticket) -> _CodeKey | None:
    """Return workload and sha256 of a built job; None when its file is on another machine."""
    try:
        return ticket.job.note.workload, hashlib.sha256(Path(ticket.artifact).read_bytes()).hexdigest()
    except OSError:
        return None


def _measured(result: ms.runner.RunnerResult) -> Outcome | None:
    if result.error_msg is None:
        return Outcome(Status.OK, tuple(float(value) for value in result.run_secs))
    return _failed(str(result.error_msg), Status.RUN_ERROR)


def _failed(text: str, default: Status) -> Outcome | None:
    if text.startswith(CANCELLED):
        return None
    status, error = read_failure(text, default)
    return Outcome(status, (), error)
