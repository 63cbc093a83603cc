"""A MetaSchedule runner over one killable measuring process."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.tuning.local.process import ChildDiedError, ChildProcess, ForkServer, Reply
from relaxtune.pipeline.tuning.measure.arguments import ArgumentSpec
from relaxtune.pipeline.tuning.measure.failure import CANCELLED, StopSignal, failure_text
from relaxtune.pipeline.tuning.measure.notes import CandidateNote, read_note
from relaxtune.pipeline.tuning.measure.requests import (
    CompareReply,
    CompareRequest,
    MeasureReply,
    MeasureRequest,
    ReferenceRequest,
    WarmRequest,
    check_seeds,
    may_appeal,
    reference_file,
)
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.tuning_db.records import Status

logger = logging.getLogger(__name__)

MEASURE_MODULE = "relaxtune.pipeline.tuning.local.measure_worker"
_START_TIMEOUT_S = 120.0
_REFERENCE_TIMEOUT_S = 120.0
# A CPU that takes longer for a reference would take the time of all other candidates.
_APPEAL_TIMEOUT_S = 30.0
NO_REFERENCE = "the reference cannot be computed"
_STARTS_MAX = 3
_POLL_S = 0.1


class MeasuringProcess:
    """One device's measuring process, replaced whenever a candidate kills it or is killed in it.

    Parameters
    ----------
    device : str
        TVM device text, `cpu:0` or `cuda:1`.
    options : MeasureOptions
        How candidates are timed.
    timeout_s : float
        Seconds for one candidate, checks included.
    stop : StopSignal
        When somebody asks for the end, the candidate in flight is given up; a deadline lets it finish.
    seed : int
        Of the arguments' values.
    server : ForkServer or None
        What forks the process, which is not closed here; without one it is started afresh.
    """

    def __init__(
        self,
        device: str,
        options: MeasureOptions,
        timeout_s: float,
        stop: StopSignal,
        seed: int,
        server: ForkServer | None = None,
    ) -> None:
        self._server = server
        self._device = device
        self._options = options
        self._timeout_s = timeout_s
        self._stop = stop
        self._seed = seed
        self.restarts = 0
        # Workloads of which the CPU makes no reference, so that the device's word is the last.
        self._final: set[str] = set()
        self._closed = False
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Process id of the measuring process of the moment."""
        return self._process.pid

    def request(self, item: ms.runner.RunnerInput) -> MeasureRequest:
        """Return the request for a runner's input."""
        artifact = str(item.artifact_path)
        return self._request(artifact, item.args_info, read_note(artifact))

    def warm(self) -> None:
        """Set the device up; what fails will fail again, and be told, with the first candidate."""
        self._ask(WarmRequest(self._device, self._options), _REFERENCE_TIMEOUT_S)

    def make_references(self, note: CandidateNote, args_info: Sequence[ms.arg_info.ArgInfo]) -> None:
        """Compute what a workload's candidates will be compared with; a failure is told with the first of them."""
        self._make_references(self._request("", args_info, note))

    def run(self, request: MeasureRequest) -> ms.runner.RunnerResult:
        """Return the result of one candidate; a failed one has a text made by `failure_text`."""
        refused = self._make_references(request)
        if refused is not None:
            return refused
        answer = self._ask(request, self._timeout_s)
        if isinstance(answer, MeasureReply) and answer.mismatch is not None and self._appeal(request):
            answer = self._ask(request, self._timeout_s)
        if isinstance(answer, ms.runner.RunnerResult):
            return answer
        if not isinstance(answer, MeasureReply):
            return _failed(Status.RUN_ERROR, f"the measuring process answered with {type(answer).__name__}")
        return _result(answer)

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[ms.runner.RunnerResult] | None:
        """Return the results of candidates of one workload timed in turns; None when they could not all be run.

        Nothing is said of which candidate it was that failed: each ran before.
        """
        if self._make_references(requests[0]) is not None:
            return None
        asked, timeout_s = CompareRequest(tuple(requests), rounds), self._timeout_s * len(requests)
        answer = self._ask(asked, timeout_s)
        wrong = isinstance(answer, CompareReply) and any(reply.mismatch is not None for reply in answer.replies)
        if wrong and self._appeal(requests[0]):
            answer = self._ask(asked, timeout_s)
        if not isinstance(answer, CompareReply):
            reason = answer.error_msg if isinstance(answer, ms.runner.RunnerResult) else type(answer).__name__
            logger.warning("the final contenders could not be timed in turns: %s", reason)
            return None
        return [_result(reply) for reply in answer.replies]

    def _make_references(self, request: MeasureRequest) -> ms.runner.RunnerResult | None:
        """Have the reference outputs made if they are not there; return a failed result when that failed."""
        paths = [reference_file(request, seed) for seed in check_seeds(request)]
        if not any(path is not None and not path.exists() for path in paths):
            return None
        made = self._ask(ReferenceRequest(request), _REFERENCE_TIMEOUT_S)
        if not isinstance(made, ms.runner.RunnerResult):
            return None
        reason = str(made.error_msg)
        return made if reason.startswith(CANCELLED) else _failed(Status.RUN_ERROR, f"{NO_REFERENCE}: {reason}")

    def _appeal(self, request: MeasureRequest) -> bool:
        """Have the CPU make the references that the device made until now; return whether it did."""
        workload = request.note.workload if request.note is not None else ""
        if workload in self._final or not may_appeal(request):
            return False
        made = self._ask(ReferenceRequest(request, on_host=True), _APPEAL_TIMEOUT_S)
        if made is not True:
            self._final.add(workload)
            reason = made.error_msg if isinstance(made, ms.runner.RunnerResult) else type(made).__name__
            logger.warning("what differs from the device's reference counts as wrong: the CPU made none: %s", reason)
        return made is True

    def _ask(self, request: object, timeout_s: float) -> object:
        """Return the value that the process answers, or a failed result."""
        if self._closed or not self._ready():
            return ms.runner.RunnerResult(None, f"{CANCELLED}: the run was stopped")
        try:
            self._process.send(request)
            reply = self._answer(timeout_s)
        except ChildDiedError as e:
            self._replace()
            return _failed(Status.RUN_ERROR, str(e))
        if reply is None:
            self._replace()
            if self._stopped:
                return ms.runner.RunnerResult(None, f"{CANCELLED}: the run was stopped")
            return _failed(Status.TIMEOUT, f"the measurement was killed after {timeout_s:g} s (run_timeout_s)")
        if reply.error is not None and self._device.startswith("cuda"):
            # An error may have broken the CUDA context, which would fail every later candidate.
            self._replace()
        return _failed(Status.RUN_ERROR, reply.error) if reply.error is not None else reply.value

    def leave(self) -> None:
        """Give up what is in hand and everything after it, within a moment; safe between threads."""
        self._closed = True

    def close(self) -> None:
        """End the process."""
        self.leave()
        self._process.kill()

    def _start(self) -> ChildProcess:
        threads = self._options.threads
        return ChildProcess(MEASURE_MODULE, {"TVM_NUM_THREADS": str(threads)} if threads else {}, self._server)

    def _request(
        self, artifact: str, args_info: Sequence[ms.arg_info.ArgInfo], note: CandidateNote | None
    ) -> MeasureRequest:
        arguments = tuple(ArgumentSpec(tuple(int(dim) for dim in info.shape), str(info.dtype)) for info in args_info)
        return MeasureRequest(artifact, self._device, arguments, note, self._options, self._seed)

    @property
    def _stopped(self) -> bool:
        return self._closed or self._stop.asked

    def _replace(self) -> None:
        if self._closed:
            return
        self._process.kill()
        self._process = self._start()
        self.restarts += 1

    def _ready(self) -> bool:
        """Wait until the process has started; return False when the run was stopped meanwhile."""
        reason = ""
        for _ in range(_STARTS_MAX):
            if self._process.ready:
                return True
            try:
                if self._answer(_START_TIMEOUT_S) is not None:
                    return True
                if self._stopped:
                    return False
                reason = f"not ready after {_START_TIMEOUT_S:g} s"
            except ChildDiedError as e:
                reason = str(e)
            self._replace()
        raise ChildDiedError(f"the measuring process ({MEASURE_MODULE}) failed to start {_STARTS_MAX} times: {reason}")

    def _answer(self, timeout_s: float) -> Reply | None:
        """Return the next message, or None when time is up or the run was stopped."""
        until = time.monotonic() + timeout_s
        while not self._process.connection.poll(_POLL_S):
            if time.monotonic() > until or self._stopped:
                return None
        return self._process.receive()


class _Pending:
    """One answer that a thread will deliver: None when the process cannot be used."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.answer: object = None
        self.failure: Exception | None = None
        self.ready = threading.Event()


class MeasureQueue:
    """A thread in which a `MeasuringProcess` works, in order, while the caller builds the next candidates."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="relaxtune-measure", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> _Pending:
        """Return where the answer will appear."""
        pending = _Pending(work)
        self._waiting.put(pending)
        return pending

    def close(self) -> None:
        """Let the thread end after the work in hand."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (pending := self._waiting.get()) is not None:
            # A border of the thread: an error here must reach the caller, or it would wait for ever.
            try:
                pending.answer = pending.work()
            except Exception as e:
                logger.exception("the measuring process cannot be used")
                pending.failure = e
            pending.ready.set()


@derived_object
class _Future(ms.runner.PyRunnerFuture):  # type: ignore[misc]
    def __init__(self, pending: _Pending) -> None:
        super().__init__()
        self._pending = pending

    def done(self) -> bool:
        """Return whether the result is there."""
        return self._pending.ready.is_set()

    def result(self) -> ms.runner.RunnerResult:
        """Wait for the result and return it."""
        self._pending.ready.wait()
        if self._pending.failure is not None:
            return _failed(Status.RUN_ERROR, str(self._pending.failure))
        return self._pending.answer


@derived_object
class ProcessRunner(ms.runner.PyRunner):  # type: ignore[misc]
    """MetaSchedule's runner interface over one measuring process.

    `close` ends it; `contextlib.closing` sees to it.

    `run` returns at once; the candidates are measured one after another, in order.
    """

    def __init__(
        self,
        device: str,
        options: MeasureOptions | None = None,
        timeout_s: float = 30.0,
        stop: StopSignal | None = None,
        seed: int = 0,
        server: ForkServer | None = None,
    ) -> None:
        super().__init__()
        self._stop = StopSignal() if stop is None else stop
        self.process = MeasuringProcess(device, options or MeasureOptions(), timeout_s, self._stop, seed, server)
        self._queue = MeasureQueue()
        self._queue.submit(self.process.warm)

    def make_references(self, note: CandidateNote, args_info: Sequence[ms.arg_info.ArgInfo]) -> None:
        """Compute a workload's references after what was handed in before, and before what is handed in next."""
        if not self._stop.due:
            self._queue.submit(lambda: self.process.make_references(note, args_info))

    def run(self, runner_inputs: Sequence[ms.runner.RunnerInput]) -> list[ms.runner.RunnerFuture]:
        """Return one future per input."""
        return [_Future(self._queue.submit(functools.partial(self._measure, item))) for item in runner_inputs]

    def compare(self, items: Sequence[ms.runner.RunnerInput], rounds: int) -> list[ms.runner.RunnerResult] | None:
        """Return the results of candidates of one workload timed in turns, so many latencies each; None if it failed.

        It waits for what was handed in before, and may be asked when the time is up.
        """
        requests = [self.process.request(item) for item in items]
        pending = self._queue.submit(lambda: self.process.compare(requests, rounds))
        pending.ready.wait()
        return pending.answer if isinstance(pending.answer, list) else None

    def close(self) -> None:
        """End the measuring process and the thread that feeds it."""
        self.process.leave()
        self._queue.close()
        self.process.close()

    def _measure(self, item: ms.runner.RunnerInput) -> ms.runner.RunnerResult:
        if self._stop.due:
            return ms.runner.RunnerResult(None, f"{CANCELLED}: the run was stopped")
        return self.process.run(self.process.request(item))


def _result(reply: MeasureReply) -> ms.runner.RunnerResult:
    if reply.mismatch is not None:
        return _failed(Status.WRONG_RESULT, reply.mismatch)
    return ms.runner.RunnerResult(list(reply.seconds), None)


def _failed(status: Status, error: str) -> ms.runner.RunnerResult:
    return ms.runner.RunnerResult(None, failure_text(status, error))
