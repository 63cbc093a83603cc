"""One measuring process on one device, which a candidate may kill at any moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from relaxtune.pipeline.spans import span
from relaxtune.pipeline.tuning.local.devices import Device
from relaxtune.pipeline.tuning.local.requests import (
    CompareRequest,
    MeasureReply,
    MeasureRequest,
    ReferenceRequest,
    WarmRequest,
)
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured, place
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.workers.fork_server import Forks
from relaxtune.pipeline.workers.limits import Limits
from relaxtune.pipeline.workers.machine_faults import is_of_memory, is_of_the_machine
from relaxtune.pipeline.workers.replies import WorkerDiedError, WorkerKilledError, WorkerStartError, WorkerStoppedError
from relaxtune.pipeline.workers.worker import Worker
from relaxtune.tuning_db.records import Environment, Status

logger = logging.getLogger(__name__)

T = TypeVar("T")

MEASURE_MODULE = "relaxtune.pipeline.tuning.local.measure_worker"
NO_REFERENCE = "the reference cannot be computed"
_REFERENCE_TIMEOUT_S = 120.0
# A CPU that takes longer for a reference would take the time of all other candidates.
_APPEAL_TIMEOUT_S = 30.0
_STOPPED = Outcome(Unmeasured.STOPPED, error="the run was stopped")


class _NoAnswerError(Exception):
    """The process gave no answer; `outcome` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.error)
        self.outcome = outcome


class MeasuringProcess:
    """One device's measuring process; a process that a candidate ended or blocked is replaced.

    A candidate has `timeout_s`, checks included. When the user stops the run (`stop`), the one in flight is given up; a
    deadline lets it finish. `seed` is of the arguments' values. Artifacts that come as bytes are written to
    `directory`; references, and what they compute, to `references` (None: `directory`). `server` forks the process, and
    is not closed here; without one the process is started afresh. `name` is the device's outside of its process, by
    default that in there. `lock` is held while the device is used, where other processes time something on it too.
    """

    def __init__(
        self,
        device: Device,
        environment: Environment,
        options: MeasureOptions,
        timeout_s: float,
        stop: StopSignal,
        seed: int,
        directory: Path,
        server: Forks | None = None,
        *,
        references: Path | None = None,
        name: str | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.device = device
        self._lock = lock or nullcontext()
        self.name = name or device.name
        # One for all devices of this machine.
        self.host = ""
        self._environment = environment
        self._options = options
        self._timeout_s = timeout_s
        self._stop = stop
        self._seed = seed
        self._directory = directory
        self._references = references or directory
        # Workloads that the CPU computes no reference for: the device's decides.
        self._final: set[str] = set()
        self._closed = False
        self._warm = False
        threads = {"TVM_NUM_THREADS": str(options.threads)} if options.threads else {}
        # A deadline lets the candidate in flight finish.
        self._worker = Worker(
            MEASURE_MODULE, {**threads, **device.environment}, server=server, gpu=True, stop=lambda: stop.requested
        )
        self._worker.start()

    @property
    def pid(self) -> int:
        """Process id of the present process."""
        return self._worker.pid

    @property
    def restarts(self) -> int:
        """How often the process was replaced."""
        return self._worker.restarts

    def ready(self) -> bool:
        """Set the device up the first time; the first candidate reports a failure."""
        if not self._warm:
            self._warm = True
            with span(f"{self.name}: start"):
                self._outcome_of(
                    lambda: self._ask(WarmRequest(self.device.name, self._options), _REFERENCE_TIMEOUT_S, bool)
                )
        return not self._closed

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Compute a workload's reference; the first candidate reports a failure."""
        with self._using("reference", spec):
            if not self._stop.due:
                self._outcome_of(lambda: self._make_references(self.request("", spec)))

    def measure(self, artifact: BuiltArtifact, spec: WorkloadSpec) -> Outcome:
        """Check and time a candidate."""
        with self._using("measure", spec):
            if self._stop.due:
                return _STOPPED
            began = time.monotonic()
            answer = self._outcome_of(lambda: self._check([artifact], spec))
        outcome = answer if isinstance(answer, Outcome) else _outcome(answer[0])
        return replace(outcome, duration_s=time.monotonic() - began, environment=self._environment)

    def compare(self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int) -> list[Outcome] | None:
        """Check and time candidates of one workload alternately; None when they could not all be run.

        A failure does not say which candidate failed: each of them ran before. The deadline does not forbid it.
        """
        with self._using("final", spec):
            began = time.monotonic()
            answer = self._outcome_of(lambda: self._check(artifacts, spec, rounds))
        if isinstance(answer, Outcome):
            if answer.status is not Unmeasured.STOPPED:
                logger.warning("the final contenders could not be timed alternately: %s", answer.error)
            return None
        share_s = (time.monotonic() - began) / len(artifacts)
        return [
            replace(_outcome(reply), duration_s=share_s, environment=self._environment, resources=artifact.resources)
            for reply, artifact in zip(answer, artifacts, strict=True)
        ]

    @contextmanager
    def _using(self, stage: str, spec: WorkloadSpec) -> Iterator[None]:
        """Hold the device's lock; the spans say what waited for it and what used it."""
        with ExitStack() as stack:
            with span(f"{self.name}: lock", spec.workload):
                stack.enter_context(self._lock)
            with span(f"{self.name}: {stage}", spec.workload):
                yield

    def request(self, path: str, spec: WorkloadSpec) -> MeasureRequest:
        """Return the request to measure a file as a candidate."""
        reference, host = (one and place(one, self._references) for one in (spec.reference, spec.host_reference))
        spec = replace(spec, reference=reference, host_reference=host)
        return MeasureRequest(path, self.device.name, spec, self._options, self._seed)

    def _check(
        self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int | None = None
    ) -> tuple[MeasureReply, ...]:
        """Check and time one candidate, or several alternately in so many rounds; a reply for each."""
        with self._placed(artifacts) as paths:
            requests = tuple(self.request(path, spec) for path in paths)
            self._make_references(requests[0])
            request = requests[0] if rounds is None else CompareRequest(requests, rounds)
            timeout_s, appeals = self._timeout_s * len(requests), requests[0].may_appeal
            replies: tuple[MeasureReply, ...] = self._ask(request, timeout_s, tuple)
            if appeals and any(one.mismatch is not None for one in replies) and self._appeal(requests[0]):
                replies = self._ask(request, timeout_s, tuple)
            return replies

    @contextmanager
    def _placed(self, artifacts: Sequence[BuiltArtifact]) -> Iterator[list[str]]:
        """Give the files of artifacts; those written here are removed."""
        try:
            yield [str(place(one, self._directory).content) for one in artifacts]
        finally:
            for one in artifacts:
                if isinstance(one.content, bytes):
                    (self._directory / f"{one.sha256}.so").unlink(missing_ok=True)

    def _make_references(self, request: MeasureRequest) -> None:
        if all(path is None or path.exists() for path in map(request.reference_file, request.seeds)):
            return
        try:
            self._ask(ReferenceRequest(request), _REFERENCE_TIMEOUT_S, bool)
        except _NoAnswerError as e:
            error = f"{NO_REFERENCE}: {e.outcome.error}"
            # A reference for which memory is too small is no fact about a kernel, and yet its task cannot be tuned.
            lost = isinstance(e.outcome.status, Unmeasured)
            if lost and not is_of_memory(error):
                raise
            status = Unmeasured.LOST if lost else Status.RUN_ERROR
            raise _NoAnswerError(Outcome(status, error=error, no_reference=True)) from e

    def _appeal(self, request: MeasureRequest) -> bool:
        """Have the CPU compute the references that the device computed until now; return whether they are there."""
        workload = request.spec.workload
        if workload in self._final:
            return False
        if not request.may_appeal:
            # The process of another device has just had them computed.
            return True
        computed = self._outcome_of(lambda: self._ask(ReferenceRequest(request, on_host=True), _APPEAL_TIMEOUT_S, bool))
        if computed is True:
            return True
        self._final.add(workload)
        reason = computed.error if isinstance(computed, Outcome) else "it has none"
        logger.warning("the CPU computed no reference, so the device's reference decides: %s", reason)
        return False

    def _outcome_of(self, work: Callable[[], T]) -> T | Outcome:
        """Return what some work returns, or why the process gave no answer."""
        try:
            return work()
        except _NoAnswerError as e:
            return e.outcome
        except OSError as e:
            # An artifact came damaged, or the disk is full.
            return Outcome(Unmeasured.LOST, error=str(e))

    def _ask(self, request: object, timeout_s: float, kind: type[T]) -> T:
        """Return the answer of the process; _NoAnswerError where the candidate failed, or the run was stopped."""
        try:
            reply = self._worker.ask(request, Limits(timeout_s))
        except WorkerStoppedError as e:
            raise _NoAnswerError(_STOPPED) from e
        except WorkerDiedError as e:
            lost = e.from_outside or is_of_the_machine(str(e))
            raise _NoAnswerError(Outcome(Unmeasured.LOST if lost else Status.RUN_ERROR, error=str(e))) from e
        except WorkerStartError as e:
            if not isinstance(e.__cause__, OSError):
                raise
            # No process or file is left, which may pass.
            raise _NoAnswerError(Outcome(Unmeasured.LOST, error=str(e))) from e
        except WorkerKilledError as e:
            late = Outcome(Status.TIMEOUT, error=f"the measurement was {e} (run_timeout_s)")
            raise _NoAnswerError(late) from e
        if reply.error is not None:
            if self.device.name.startswith("cuda"):
                # An error may have broken the CUDA context, which would fail every later candidate.
                self._worker.replace()
            status = Unmeasured.LOST if is_of_the_machine(reply.error) else Status.RUN_ERROR
            raise _NoAnswerError(Outcome(status, error=reply.error))
        if not isinstance(reply.value, kind):
            raise TypeError(f"the measuring process answered with {type(reply.value).__name__}, not {kind.__name__}")
        return reply.value

    def leave(self) -> None:
        """Give up what is in hand and everything after it, within a moment; safe between threads."""
        self._closed = True
        self._worker.leave()

    def close(self) -> None:
        """End the process."""
        self._closed = True
        self._worker.close()


def _outcome(reply: MeasureReply) -> Outcome:
    if reply.mismatch is not None:
        return Outcome(Status.WRONG_RESULT, error=reply.mismatch)
    return Outcome(Status.OK, reply.seconds)
