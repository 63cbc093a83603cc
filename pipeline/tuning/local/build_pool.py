"""A persistent pool of warm build processes, fed by a thread of its own.

Jobs are handed in at any time and answered one by one as they are built, so that a slow one holds up nobody else.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.tuning.local.build_worker import BuildReply, BuildRequest
from relaxtune.pipeline.tuning.local.process import ChildDiedError, ChildProcess, ForkServer
from relaxtune.pipeline.tuning.measure.clock import BusyClock
from relaxtune.pipeline.tuning.measure.failure import CANCELLED, StopSignal, failure_text
from relaxtune.tuning_db.records import Status

logger = logging.getLogger(__name__)

BUILD_MODULE = "relaxtune.pipeline.tuning.local.build_worker"
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


@dataclass(frozen=True)
class Built:
    """What came of a build: MetaSchedule's result, and the seconds it took a process; `broken` ends the run."""

    result: ms.builder.BuilderResult
    seconds: float = 0.0
    broken: Exception | None = None


OnBuilt = Callable[[Built], None]


@dataclass(frozen=True)
class _Job:
    request: BuildRequest
    on_built: OnBuilt


@dataclass
class _Slot:
    """One place in the pool: its process, and the candidate it works on since when."""

    process: ChildProcess
    since: float
    job: _Job | None = None
    failed_starts: int = 0


class BuildPool:
    """Build processes, and the thread that feeds them.

    Parameters
    ----------
    workers : int
        Processes that build at the same time.
    directory : Path
        Where artifacts are written.
    limits : BuilderLimits
        Time and memory of a build.
    stop : StopSignal
        When it is set, builds in flight are given up and reported as cancelled, as is every later one.
    server : ForkServer or None
        What forks the processes, which is not closed here; without one each is started afresh.
    """

    def __init__(
        self,
        workers: int,
        directory: Path,
        limits: BuilderLimits,
        stop: StopSignal,
        server: ForkServer | None = None,
    ) -> None:
        self._server = server
        self._directory = directory
        self._limits = limits
        self._stop = stop
        self._serial = 0
        self.clock = BusyClock()
        self.restarts = 0
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._broken: Exception | None = None
        self._wake, self._waker = multiprocessing.Pipe(duplex=False)
        self._slots = [_Slot(self._start(), time.monotonic()) for _ in range(workers)]
        self._thread = threading.Thread(target=self._work, name="relaxtune-build", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the pool."""
        return [slot.process.pid for slot in self._slots]

    @property
    def waiting(self) -> int:
        """Jobs that no process has yet."""
        return len(self._waiting)

    def submit(self, item: ms.builder.BuilderInput, on_built: OnBuilt) -> None:
        """Build a candidate; `on_built` is told in the pool's thread, with a text by `failure_text` if it failed."""
        job = _Job(self._request(item), on_built)
        with self._lock:
            self._waiting.append(job)
        self._waker.send(None)

    def close(self) -> None:
        """End all processes and the thread; what is not built is reported as cancelled."""
        if not self._closed:
            self._closed = True
            self._waker.send(None)
            self._thread.join()

    def _start(self) -> ChildProcess:
        # A worker is one thread of the pool; what it calls must not start more.
        return ChildProcess(BUILD_MODULE, {"OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}, self._server)

    def _request(self, item: ms.builder.BuilderInput) -> BuildRequest:
        self._serial += 1
        stem = str(self._directory / f"candidate-{self._serial:06d}")
        return BuildRequest(pickle.dumps(item.mod), pickle.dumps(item.target), stem)

    def _work(self) -> None:
        # The border of the thread: whatever ends it must reach those who wait for a build.
        try:
            while not self._closed:
                if self._stop.due or self._broken is not None:
                    self._give_up()
                    self._wake.recv()
                    continue
                self._hand_over()
                self._collect()
                self._end_late()
                self._end_large()
        except Exception as e:
            logger.exception("the build processes cannot be used")
            self._broken = e
        finally:
            self._give_up()
            for slot in self._slots:
                slot.process.kill()
        while not self._closed:
            self._wake.recv()
            self._give_up()

    def _hand_over(self) -> None:
        """Give waiting jobs to idle processes."""
        for slot in self._slots:
            if slot.job is not None or not slot.process.ready:
                continue
            with self._lock:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            try:
                slot.process.send(job.request)
            except ChildDiedError as e:
                # It died idle, which is not this candidate's doing.
                logger.warning("a build process is replaced: %s", e)
                with self._lock:
                    self._waiting.appendleft(job)
                self._replace(slot)
                continue
            slot.job, slot.since = job, time.monotonic()
            self.clock.enter()

    def _collect(self) -> None:
        """Wait a moment for answers and take them."""
        by_connection = {slot.process.connection: slot for slot in self._slots}
        busy = any(slot.job is not None or not slot.process.ready for slot in self._slots)
        timeout = _POLL_S if busy or self._stop.deadline is not None else None
        for connection in wait([*by_connection, self._wake], timeout=timeout):
            if connection is self._wake:
                self._wake.recv()
                continue
            slot = by_connection[connection]  # type: ignore[index]
            starting = not slot.process.ready
            try:
                reply = slot.process.receive()
            except ChildDiedError as e:
                if starting:
                    self._failed_start(slot, str(e))
                self._replace(slot, _failed(Status.BUILD_ERROR, str(e)))
                continue
            slot.failed_starts = 0
            if slot.job is None:
                continue
            if isinstance(reply.value, BuildReply):
                result = ms.builder.BuilderResult(reply.value.path, None)
            else:
                result = _failed(Status.BUILD_ERROR, reply.error or "the build returned nothing")
            if slot.process.answered >= self._limits.builds_max or reply.rss_bytes > self._limits.rss_max_bytes:
                self._replace(slot, result)
            else:
                self._finish(slot, result)

    def _end_late(self) -> None:
        """Kill processes that work too long on a candidate, or do not start."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.job is not None and now - slot.since > self._limits.timeout_s:
                told = f"the build was killed after {self._limits.timeout_s:g} s (build_timeout_s)"
                self._replace(slot, _failed(Status.TIMEOUT, told))
            elif not slot.process.ready and now - slot.since > self._limits.start_timeout_s:
                self._failed_start(slot, f"not ready after {self._limits.start_timeout_s:g} s")
                self._replace(slot)

    def _end_large(self) -> None:
        """Kill processes that take too much memory for a candidate."""
        for slot in self._slots:
            if slot.job is None:
                continue
            rss_bytes = slot.process.rss_bytes()
            if rss_bytes > self._limits.build_rss_max_bytes:
                told = (
                    f"the build was killed at {rss_bytes / 2**20:.0f} MiB of memory, "
                    f"{self._limits.build_rss_max_bytes / 2**20:.0f} are allowed (build_rss_max_bytes)"
                )
                self._replace(slot, _failed(Status.BUILD_ERROR, told))

    def _failed_start(self, slot: _Slot, reason: str) -> None:
        slot.failed_starts += 1
        if slot.failed_starts >= _STARTS_MAX:
            raise ChildDiedError(f"a build process ({BUILD_MODULE}) failed to start {_STARTS_MAX} times: {reason}")

    def _replace(self, slot: _Slot, result: ms.builder.BuilderResult | None = None) -> None:
        """Start another process in a slot, and tell what came of the job of the one before."""
        slot.process.kill()
        began, slot.process = slot.since, self._start()
        self.restarts += 1
        if result is not None:
            self._finish(slot, result, began)
        slot.since = time.monotonic()

    def _finish(self, slot: _Slot, result: ms.builder.BuilderResult, began: float | None = None) -> None:
        job, slot.job = slot.job, None
        if job is None:
            return
        self.clock.leave()
        job.on_built(Built(result, time.monotonic() - (slot.since if began is None else began)))

    def _give_up(self) -> None:
        """Report everything unfinished as cancelled; no process is needed any more."""
        cancelled = ms.builder.BuilderResult(None, f"{CANCELLED}: the run was stopped")
        for slot in self._slots:
            if slot.job is not None:
                slot.process.kill()
                job, slot.job = slot.job, None
                self.clock.leave()
                job.on_built(Built(cancelled, broken=self._broken))
        with self._lock:
            left, self._waiting = self._waiting, deque()
        for job in left:
            job.on_built(Built(cancelled, broken=self._broken))


def _failed(status: Status, error: str) -> ms.builder.BuilderResult:
    return ms.builder.BuilderResult(None, failure_text(status, error))
