"""Build processes that stay warm: candidates are submitted at any time, and answered one by one as they are built."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from relaxtune.pipeline.tuning.local.build_worker import BuildRequest
from relaxtune.pipeline.tuning.measure.backend import Builder, Built, OnBuilt, Unmeasured
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact
from relaxtune.pipeline.workers.fork_server import Forks
from relaxtune.pipeline.workers.limits import Limit, Limits
from relaxtune.pipeline.workers.machine_faults import is_of_the_machine
from relaxtune.pipeline.workers.pool import WorkerPool
from relaxtune.pipeline.workers.replies import WorkerDiedError, WorkerKilledError, WorkerStoppedError
from relaxtune.pipeline.workers.worker import Worker
from relaxtune.tuning_db.records import Status

if TYPE_CHECKING:
    import tvm

    from relaxtune.pipeline.tuning.measure.recipe import Buildable

BUILD_MODULE = "relaxtune.pipeline.tuning.local.build_worker"
# Processes that build fill all cores; the one that measures must get one at once, or its device is idle. Where cores
# are short, it gets three times as much (Linux, `sched_prio_to_weight`). With 10 it would be nine times, and builds on
# a busy machine would time out.
_NICENESS = 5


@dataclass(frozen=True)
class BuilderLimits:
    """Limits of a build."""

    timeout_s: float = 30.0  # Seconds for one candidate; its process is killed after that.
    # A process is replaced after that many builds, or when it holds that much memory afterwards: LLVM and TVM keep some
    # of what every build allocates.
    builds_max: int = 2000
    rss_max_bytes: int = 1 << 30
    # A process that grows beyond this during a build is killed: some candidates unroll to gigabytes of code.
    build_rss_max_bytes: int = 4 << 30


class BuildPool(Builder):
    """Build processes, each fed by a thread.

    Artifacts are written to `directory`. When `stop` is due, all builds are reported as stopped, those in flight too.
    `server` forks the processes, and is not closed here; without one each is started afresh.
    """

    def __init__(
        self,
        workers: int,
        directory: Path,
        limits: BuilderLimits | None = None,
        stop: StopSignal | None = None,
        server: Forks | None = None,
    ) -> None:
        super().__init__()
        self._directory, self._limits, self._stop = directory, limits or BuilderLimits(), stop or StopSignal()
        self._serials = count(1)
        # A worker is one thread of the pool; what it calls must not start more. It sees no GPU: TVM sets CUDA up when
        # it drops a compiled module. Thirty-two processes that did so at once stood still for five seconds.
        # Its temporary files go with the pool's directory, also where it is killed.
        environment = {
            "OMP_NUM_THREADS": "1",
            "TVM_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(directory),
        }
        self._pool = WorkerPool(
            [
                Worker(BUILD_MODULE, environment, server=server, niceness=_NICENESS, stop=lambda: self._stop.due)
                for _ in range(workers)
            ],
            "relaxtune-build",
        )

    @property
    def capacity(self) -> int:
        """The number of processes."""
        return len(self._pool.workers)

    @property
    def restarts(self) -> int:
        """How many processes were replaced."""
        return sum(worker.restarts for worker in self._pool.workers)

    @property
    def waiting(self) -> int:
        """Jobs that no process has yet."""
        return self._pool.waiting

    def submit(self, what: Buildable, target: tvm.target.Target, on_built: OnBuilt) -> None:
        """Build a candidate; `on_built` is called in a thread of the pool."""
        self.submit_pickled(pickle.dumps(what), pickle.dumps(target), on_built)

    def submit_pickled(self, what: bytes, target: bytes, on_built: OnBuilt) -> None:
        """Do the same with a `Buildable` and a target that are pickled already."""
        request = BuildRequest(what, target, str(self._directory / f"candidate-{next(self._serials):06d}"))

        def answer(done: Future[Built]) -> None:
            error = done.exception()
            if error is None:
                on_built(done.result())
            else:
                status = Unmeasured.STOPPED if isinstance(error, WorkerStoppedError) else Unmeasured.BROKEN
                on_built(Built(status, error=str(error)))

        self._pool.submit(lambda worker: self._build(worker, request)).add_done_callback(answer)

    def close(self) -> None:
        """End all processes; candidates that are not built are reported as stopped."""
        self._pool.close()

    def _build(self, worker: Worker, request: BuildRequest) -> Built:
        limits = self._limits
        self.clock.enter()
        try:
            reply = worker.ask(request, Limits(limits.timeout_s, limits.build_rss_max_bytes))
        except WorkerKilledError as e:
            late = e.limit is Limit.TIME
            option = "build_timeout_s" if late else "build_rss_max_bytes"
            built = Built(Status.TIMEOUT if late else Status.BUILD_ERROR, error=f"the build was {e} ({option})")
        except WorkerDiedError as e:
            built = _failed(str(e), from_outside=e.from_outside)
        else:
            if isinstance(reply.value, BuiltArtifact):
                built = Built(Status.OK, reply.value)
            else:
                built = _failed(reply.error or "the build returned nothing")
            if worker.answered >= limits.builds_max or reply.rss_bytes > limits.rss_max_bytes:
                worker.replace()
        finally:
            self.clock.leave()
        return replace(built, seconds=worker.seconds)


def _failed(error: str, *, from_outside: bool = False) -> Built:
    lost = from_outside or is_of_the_machine(error)
    return Built(Unmeasured.LOST if lost else Status.BUILD_ERROR, error=error)
