"""A persistent pool of warm build processes, fed by a thread of its own.

Jobs are submitted at any time and answered one by one as they are built: a slow build delays no other.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import pickle
import threading
from collections import deque
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from relaxtune.pipeline.processes.child import NICENESS
from relaxtune.pipeline.processes.fork_client import ForkServer
from relaxtune.pipeline.processes.process import ChildDiedError, ChildProcess, Reply
from relaxtune.pipeline.tuning.local.build_worker import BuildReply, BuildRequest
from relaxtune.pipeline.tuning.measure.backend import Builder, Built, OnBuilt, Unmeasured
from relaxtune.pipeline.tuning.measure.clock import AwakeClock
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact
from relaxtune.pipeline.workers.machine_faults import is_of_the_machine
from relaxtune.tuning_db.records import Status

if TYPE_CHECKING:
    import tvm

    from relaxtune.pipeline.tuning.measure.recipe import Buildable

logger = logging.getLogger(__name__)

BUILD_MODULE = "relaxtune.pipeline.tuning.local.build_worker"
_STARTS_MAX = 3
_POLL_S = 0.1
# Processes that build fill all cores; the one that measures must get one at once, or its device is idle. Where cores
# are short, it gets three times as much (Linux, `sched_prio_to_weight`). With 10 it would be nine times, and builds on
# a busy machine would time out.
_NICENESS = 5


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
class _Job:
    """A build that was asked for; `lost` is set once its process was killed from outside."""

    request: BuildRequest
    on_built: OnBuilt
    lost: bool = False


@dataclass
class _Slot:
    """One place in the pool: its process, and the candidate that it works on since then."""

    process: ChildProcess
    since: float
    job: _Job | None = None
    failed_starts: int = 0


class BuildPool(Builder):
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
        When it is due, all builds are reported as stopped, those in flight too.
    server : ForkServer or None
        What forks the processes, which is not closed here; without one each is started afresh.
    """

    def __init__(
        self,
        workers: int,
        directory: Path,
        limits: BuilderLimits | None = None,
        stop: StopSignal | None = None,
        server: ForkServer | None = None,
    ) -> None:
        super().__init__()
        self._server = server
        self._directory = directory
        self._limits = limits or BuilderLimits()
        self._stop = stop or StopSignal()
        self._serial = 0
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._ended = Built(Unmeasured.STOPPED, error="the run was stopped")
        self._wake, self._waker = multiprocessing.Pipe(duplex=False)
        self._awake = AwakeClock()
        self._slots = [_Slot(self._start(), self._awake.seconds()) for _ in range(workers)]
        self._thread = threading.Thread(target=self._work, name="relaxtune-build", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the pool."""
        return [slot.process.pid for slot in self._slots]

    @property
    def capacity(self) -> int:
        """The number of processes."""
        return len(self._slots)

    @property
    def waiting(self) -> int:
        """Jobs that no process has yet."""
        return len(self._waiting)

    def submit(self, what: Buildable, target: tvm.target.Target, on_built: OnBuilt) -> None:
        """Build a candidate; `on_built` is called in the pool's thread."""
        self.submit_pickled(pickle.dumps(what), pickle.dumps(target), on_built)

    def submit_pickled(self, what: bytes, target: bytes, on_built: OnBuilt) -> None:
        """Do the same with a `Buildable` and a target that are pickled already."""
        self._serial += 1
        stem = str(self._directory / f"candidate-{self._serial:06d}")
        job = _Job(BuildRequest(what, target, stem), on_built)
        with self._lock:
            self._waiting.append(job)
        self._waker.send(None)

    def discard(self, artifact: BuiltArtifact) -> None:
        """Remove an artifact's file."""
        with contextlib.suppress(OSError):
            Path(str(artifact.content)).unlink()

    def close(self) -> None:
        """End all processes and the thread; what is not built is reported as stopped."""
        if not self._closed:
            self._closed = True
            self._waker.send(None)
            self._thread.join()

    def _start(self) -> ChildProcess:
        # A worker is one thread of the pool; what it calls must not start more. It sees no GPU: TVM sets CUDA up when
        # it drops a compiled module. Thirty-two processes that did so at once stood still for five seconds.
        # What it needs for a while goes with the pool's directory, also where it is killed.
        environment = {
            "OMP_NUM_THREADS": "1",
            "TVM_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(self._directory),
            NICENESS: str(_NICENESS),
        }
        return ChildProcess(BUILD_MODULE, environment, self._server)

    def _work(self) -> None:
        # The border of the thread: its error must reach those who wait for a build.
        try:
            while not self._closed:
                if self._stop.due or self._ended.status is Unmeasured.BROKEN:
                    self._give_up()
                    self._wake.recv()
                    continue
                self._hand_over()
                self._collect()
                self._end_late()
                self._end_large()
        except Exception as e:
            logger.exception("the build processes cannot be used")
            self._ended = Built(Unmeasured.BROKEN, error=str(e))
        finally:
            ChildProcess.kill_all([slot.process for slot in self._slots])
            self._give_up()
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
            slot.job, slot.since = job, self._awake.seconds()
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
                self._take_death(slot, e)
                continue
            slot.failed_starts = 0
            if slot.job is None:
                continue
            result = _built(reply)
            if slot.process.answered >= self._limits.builds_max or reply.rss_bytes > self._limits.rss_max_bytes:
                self._replace(slot, result)
            else:
                self._finish(slot, result)

    def _take_death(self, slot: _Slot, death: ChildDiedError) -> None:
        """Replace a process that died; a build that was killed from outside is tried once more."""
        job = slot.job
        if job is not None and death.from_outside and not job.lost:
            job.lost, slot.job = True, None
            self.clock.leave()
            with self._lock:
                self._waiting.appendleft(job)
        self._replace(slot, _failed(str(death), from_outside=death.from_outside))

    def _end_late(self) -> None:
        """Kill processes that work too long on a candidate, or do not start."""
        now = self._awake.seconds()
        for slot in self._slots:
            if slot.job is not None and now - slot.since > self._limits.timeout_s:
                told = f"the build was killed after {self._limits.timeout_s:g} s (build_timeout_s)"
                self._replace(slot, Built(Status.TIMEOUT, error=told))
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
                self._replace(slot, Built(Status.BUILD_ERROR, error=told))

    def _failed_start(self, slot: _Slot, reason: str) -> None:
        slot.failed_starts += 1
        if slot.failed_starts >= _STARTS_MAX:
            raise ChildDiedError(f"a build process ({BUILD_MODULE}) failed to start {_STARTS_MAX} times: {reason}")

    def _replace(self, slot: _Slot, result: Built | None = None) -> None:
        """Start another process in a slot, and tell what came of the job of the one before."""
        slot.process.kill()
        began, slot.process = slot.since, self._start()
        self.restarts += 1
        if result is not None:
            self._finish(slot, result, began)
        slot.since = self._awake.seconds()

    def _finish(self, slot: _Slot, result: Built, began: float | None = None) -> None:
        job, slot.job = slot.job, None
        if job is None:
            return
        self.clock.leave()
        job.on_built(replace(result, seconds=self._awake.seconds() - (slot.since if began is None else began)))

    def _give_up(self) -> None:
        """Report everything unfinished as stopped, or broken; no process is needed any more."""
        ChildProcess.kill_all([slot.process for slot in self._slots if slot.job is not None])
        for slot in self._slots:
            if slot.job is not None:
                job, slot.job = slot.job, None
                self.clock.leave()
                job.on_built(self._ended)
        with self._lock:
            left, self._waiting = self._waiting, deque()
        for job in left:
            job.on_built(self._ended)


def _built(reply: Reply) -> Built:
    if isinstance(reply.value, BuildReply):
        return Built(Status.OK, reply.value.artifact)
    return _failed(reply.error or "the build returned nothing")


def _failed(error: str, *, from_outside: bool = False) -> Built:
    lost = from_outside or is_of_the_machine(error)
    return Built(Unmeasured.LOST if lost else Status.BUILD_ERROR, error=error)
