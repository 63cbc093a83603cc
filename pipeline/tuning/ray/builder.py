"""Builds on a cluster: each candidate is a Ray task, on any node with a free core."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import tvm

from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tuning.local.build_pool import BuilderLimits
from relaxtune.pipeline.tuning.measure.backend import Builder, Built, OnBuilt, Unmeasured
from relaxtune.pipeline.tuning.measure.recipe import Buildable
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.ray.node_side import build, warm

logger = logging.getLogger(__name__)

# A build that found no room in an object store is tried again so often, after so long each time.
_FULL_MAX = 60
_FULL_WAIT_S = 5.0
_POLL_S = 0.1
_CAPACITY_EVERY_S = 5.0
_STOPPED = Built(Unmeasured.STOPPED, error="the run was stopped")


@dataclass(eq=False)
class _Job:
    """A build on its way: what `build` is given, Ray's reference to the answer, and who waits for it."""

    what: bytes
    target: bytes
    on_built: OnBuilt
    answer: Any = None
    full: int = 0
    again_at: float | None = None


class RayBuilder(Builder):
    """Builders as tasks of a cluster.

    Measuring actors take `reserved` CPUs of the cluster. `forks` is the run whose servers on the nodes fork the build
    processes; without it, each is started afresh.
    """

    def __init__(
        self, ray: ModuleType, limits: BuilderLimits, stop: StopSignal, reserved: float = 0.0, forks: str = ""
    ) -> None:
        super().__init__()
        self._ray = ray
        self._limits = pickle.dumps(limits)
        self._stop = stop
        self._reserved = reserved
        self._forks = forks
        # A build that is lost with its node or worker is the `Evaluator`'s to try again, as on one machine.
        self._task = ray.remote(num_cpus=1, max_retries=0)(build)
        self._lock = threading.Lock()
        self._jobs: set[_Job] = set()
        self._closed = threading.Event()
        self._capacity, self._counted_s = 1, 0.0
        # Every core's worker imports what it needs while the first candidates are made; a lost one does so later.
        start = ray.remote(num_cpus=1, max_retries=0)(warm)
        self._warming = [start.remote(self._limits, self._forks) for _ in range(self.capacity)]
        self._watcher = threading.Thread(target=self._watch, name="relaxtune-build", daemon=True)
        self._watcher.start()

    @property
    def capacity(self) -> int:
        """CPUs of the living nodes, less those that measure."""
        if time.monotonic() - self._counted_s > _CAPACITY_EVERY_S or not self._counted_s:
            self._counted_s = time.monotonic()
            self._capacity = max(1, int(self._ray.cluster_resources().get("CPU", 0) - self._reserved))
        return self._capacity

    @property
    def waiting(self) -> int:
        """Builds beyond what the cluster does at the same time."""
        return max(0, len(self._jobs) - self.capacity)

    def submit(self, what: Buildable, target: tvm.target.Target, on_built: OnBuilt) -> None:
        """Build a candidate; `on_built` is called in another thread."""
        if self._closed.is_set() or self._stop.due:
            on_built(_STOPPED)
            return
        job = _Job(pickle.dumps(what), pickle.dumps(target), on_built)
        with self._lock:
            self._jobs.add(job)
        self.clock.enter()
        self._start(job)

    def close(self) -> None:
        """Cancel what is not built; it is reported as stopped."""
        self._closed.set()
        self._watcher.join()
        self._give_up()

    def _start(self, job: _Job) -> None:
        job.again_at = None
        job.answer = self._task.remote(job.what, job.target, self._limits, self._forks)
        job.answer.future().add_done_callback(lambda future: self._answered(job, future))

    def _answered(self, job: _Job, future: Future[Built]) -> None:
        """Take an answer; what an object store had no room for is built again when there may be some."""
        exceptions = self._ray.exceptions
        full = (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError)
        error = future.exception()
        if isinstance(getattr(error, "cause", error), full) and job.full < _FULL_MAX:
            if not job.full:
                logger.warning("an object store of the cluster is full; a build waits: %s", last_line(str(error)))
            job.full += 1
            job.again_at = time.monotonic() + _FULL_WAIT_S
            return
        self._finish(job, _built(future))

    def _finish(self, job: _Job, built: Built) -> None:
        with self._lock:
            if job not in self._jobs:
                return
            self._jobs.discard(job)
        self.clock.leave()
        job.on_built(built)

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            if self._stop.due:
                self._give_up()
            with self._lock:
                due = [one for one in self._jobs if one.again_at is not None and one.again_at <= time.monotonic()]
            for job in due:
                self._start(job)

    def _give_up(self) -> None:
        with self._lock:
            left = list(self._jobs)
        for job in left:
            self._ray.cancel(job.answer, force=False)
            self._finish(job, _STOPPED)


def _built(future: Future[Built]) -> Built:
    """Return a finished build; an error of Ray itself is no fault of the candidate."""
    error = future.exception()
    if error is None:
        return future.result()
    return Built(Unmeasured.LOST, error=f"Ray: {type(error).__name__}: {last_line(str(error))}")
