"""A MetaSchedule builder over a persistent pool of warm build processes."""

from __future__ import annotations

import logging
import pickle
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from pipeline.tuning.build_worker import BuildReply, BuildRequest
from pipeline.tuning.failure import CANCELLED, StopSignal, failure_text
from pipeline.tuning.process import ChildDiedError, ChildProcess
from tuning_db.records import Status

logger = logging.getLogger(__name__)

_MODULE = "pipeline.tuning.build_worker"
_STARTS_MAX = 3
_POLL_S = 0.1


@dataclass(frozen=True)
class BuilderLimits:
    """What a build may use.

    Attributes
    ----------
    timeout_s
        Seconds for one candidate; its process is killed after that.
    start_timeout_s
        Seconds for a process to import TVM and say that it is ready.
    builds_max, rss_max_bytes
        A process is replaced after that many builds, or when it holds that much memory afterwards: LLVM and TVM keep
        some of what every build allocates.
    build_rss_max_bytes
        A process that grows beyond this during a build is killed: some candidates unroll to gigabytes of code.
    """

    timeout_s: float = 30.0
    start_timeout_s: float = 120.0
    builds_max: int = 2000
    rss_max_bytes: int = 1 << 30
    build_rss_max_bytes: int = 4 << 30


@dataclass
class _Slot:
    """One place in the pool: its process, and the candidate it works on since when."""

    process: ChildProcess
    since: float
    job: int | None = None
    failed_starts: int = 0


class BuildPool:
    """The processes behind `PoolBuilder`.

    Parameters
    ----------
    workers : int
        Processes that build at the same time.
    directory : Path
        Where artifacts are written.
    limits : BuilderLimits
        Time and memory of a build.
    stop : StopSignal
        When it is set, builds in flight are given up and reported as cancelled.
    """

    def __init__(self, workers: int, directory: Path, limits: BuilderLimits, stop: StopSignal) -> None:
        self._directory = directory
        self._limits = limits
        self._stop = stop
        self._serial = 0
        self.restarts = 0
        self._slots = [_Slot(self._start(), time.monotonic()) for _ in range(workers)]

    @property
    def pids(self) -> list[int]:
        """Process ids of the pool."""
        return [slot.process.pid for slot in self._slots]

    def build(self, inputs: Sequence[ms.builder.BuilderInput]) -> list[ms.builder.BuilderResult]:
        """Return a result for every input, in order; a failed one has a text made by `failure_text`."""
        requests = [self._request(item) for item in inputs]
        results: list[ms.builder.BuilderResult | None] = [None] * len(requests)
        waiting = deque(range(len(requests)))
        while any(result is None for result in results):
            if self._stop.due:
                self._give_up(results)
                break
            for slot in self._slots:
                if waiting and slot.job is None and slot.process.ready:
                    self._hand_over(slot, waiting, requests, results)
            self._collect(results)
            self._end_late(results)
            self._end_large(results)
        return [r or ms.builder.BuilderResult(None, f"{CANCELLED}: the run was stopped") for r in results]

    def close(self) -> None:
        """End all processes."""
        for slot in self._slots:
            slot.process.kill()
        self._slots = []

    def _start(self) -> ChildProcess:
        # A worker is one thread of the pool; what it calls must not start more.
        return ChildProcess(_MODULE, {"OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"})

    def _request(self, item: ms.builder.BuilderInput) -> BuildRequest:
        self._serial += 1
        stem = str(self._directory / f"candidate-{self._serial:06d}")
        return BuildRequest(pickle.dumps(item.mod), pickle.dumps(item.target), stem)

    def _hand_over(
        self,
        slot: _Slot,
        waiting: deque[int],
        requests: list[BuildRequest],
        results: list[ms.builder.BuilderResult | None],
    ) -> None:
        job = waiting.popleft()
        try:
            slot.process.send(requests[job])
        except ChildDiedError as e:
            # It died idle, which is not this candidate's doing.
            logger.warning("a build process is replaced: %s", e)
            waiting.appendleft(job)
            self._replace(slot)
            return
        slot.job, slot.since = job, time.monotonic()

    def _collect(self, results: list[ms.builder.BuilderResult | None]) -> None:
        """Wait a moment for answers and take them."""
        by_connection = {slot.process.connection: slot for slot in self._slots}
        for connection in wait(list(by_connection), timeout=_POLL_S):
            slot = by_connection[connection]  # type: ignore[index]
            job, starting = slot.job, not slot.process.ready
            try:
                reply = slot.process.receive()
            except ChildDiedError as e:
                if starting:
                    self._failed_start(slot, str(e))
                if job is not None:
                    results[job] = _failed(Status.BUILD_ERROR, str(e))
                self._replace(slot)
                continue
            slot.job, slot.failed_starts = None, 0
            if job is None:
                continue
            if isinstance(reply.value, BuildReply):
                results[job] = ms.builder.BuilderResult(reply.value.path, None)
            else:
                results[job] = _failed(Status.BUILD_ERROR, reply.error or "the build returned nothing")
            worn = slot.process.answered >= self._limits.builds_max or reply.rss_bytes > self._limits.rss_max_bytes
            if worn:
                self._replace(slot)

    def _end_late(self, results: list[ms.builder.BuilderResult | None]) -> None:
        """Kill processes that work too long on a candidate, or do not start."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.job is not None and now - slot.since > self._limits.timeout_s:
                results[slot.job] = _failed(
                    Status.TIMEOUT, f"the build was killed after {self._limits.timeout_s:g} s (build_timeout_s)"
                )
                self._replace(slot)
            elif not slot.process.ready and now - slot.since > self._limits.start_timeout_s:
                self._failed_start(slot, f"not ready after {self._limits.start_timeout_s:g} s")
                self._replace(slot)

    def _end_large(self, results: list[ms.builder.BuilderResult | None]) -> None:
        """Kill processes that take too much memory for a candidate."""
        for slot in self._slots:
            if slot.job is None:
                continue
            rss_bytes = slot.process.rss_bytes()
            if rss_bytes > self._limits.build_rss_max_bytes:
                results[slot.job] = _failed(
                    Status.BUILD_ERROR,
                    f"the build was killed at {rss_bytes / 2**20:.0f} MiB of memory, "
                    f"{self._limits.build_rss_max_bytes / 2**20:.0f} are allowed (build_rss_max_bytes)",
                )
                self._replace(slot)

    def _failed_start(self, slot: _Slot, reason: str) -> None:
        slot.failed_starts += 1
        if slot.failed_starts >= _STARTS_MAX:
            raise ChildDiedError(f"a build process ({_MODULE}) failed to start {_STARTS_MAX} times: {reason}")

    def _replace(self, slot: _Slot) -> None:
        slot.process.kill()
        slot.process, slot.job, slot.since = self._start(), None, time.monotonic()
        self.restarts += 1

    def _give_up(self, results: list[ms.builder.BuilderResult | None]) -> None:
        for slot in self._slots:
            if slot.job is not None and results[slot.job] is None:
                self._replace(slot)


def _failed(status: Status, error: str) -> ms.builder.BuilderResult:
    return ms.builder.BuilderResult(None, failure_text(status, error))


@derived_object
class PoolBuilder(ms.builder.PyBuilder):  # type: ignore[misc]
    """MetaSchedule's builder interface over a `BuildPool`.

    `close` ends the processes; `contextlib.closing` sees to it.

    Candidates may carry a `pipeline.tuning.note.CandidateNote`, which is written beside the artifact.
    """

    def __init__(
        self,
        workers: int,
        directory: Path,
        limits: BuilderLimits | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        super().__init__()
        self.pool = BuildPool(workers, directory, limits or BuilderLimits(), StopSignal() if stop is None else stop)

    def build(self, build_inputs: list[ms.builder.BuilderInput]) -> list[ms.builder.BuilderResult]:
        """Return one result per input, in order."""
        return self.pool.build(build_inputs)

    def close(self) -> None:
        """End the pool's processes."""
        self.pool.close()
