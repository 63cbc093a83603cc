"""The Ray workers on a node: they build, measure and work on cells, each in a child process as on one machine.

A candidate may crash or hang its process. So a Ray worker does nothing itself: a child of it does, with the limits, the
time-outs and the statuses of one machine. When the Ray worker itself dies, no candidate did it. Children are forked by
the node's server (`pipeline.tuning.ray.node_server`), which has done all imports. References are computed here, where
the device is; actors of one machine share the files.

Ray imports this file before anything else of ours, so nothing here is imported that imports TVM, and PyTorch with it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.temporary import shared_folder, temporary_folder
from relaxtune.pipeline.tuning.measure.device_lock import lock_of
from relaxtune.pipeline.tuning.ray.node_server import join_server
from relaxtune.pipeline.workers.child import leave_out_torch
from relaxtune.pipeline.workers.replies import WorkerError
from relaxtune.pipeline.workers.worker import Worker

if TYPE_CHECKING:
    from relaxtune.pipeline.tuning.local.build_pool import BuildPool
    from relaxtune.pipeline.tuning.measure.backend import Built
    from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
    from relaxtune.schedules.targets import ResolvedTarget
    from relaxtune.tuning_db.records import Environment

_pools: dict[bytes, BuildPool] = {}


def build(what: bytes, target: bytes, limits: bytes, forks: str = "") -> Built:
    """Return a finished build, whose artifact holds its bytes; `limits` are pickled too.

    `forks` names the run whose server on this host forks the build process.
    """
    leave_out_torch()
    from relaxtune.pipeline.tuning.measure.backend import Built, Unmeasured, pack

    done: SimpleQueue[Built] = SimpleQueue()
    try:
        _pool(limits, forks).submit_pickled(what, target, done.put)
        built = done.get()
        if built.artifact is None:
            return built
        path = Path(str(built.artifact.content))
        code = pack(path.read_bytes())
        path.unlink()
    except OSError as e:
        # The node's disk is full, or no process can be started.
        return Built(Unmeasured.LOST, error=str(e))
    return replace(built, artifact=replace(built.artifact, content=code))


def warm(limits: bytes, forks: str = "") -> None:
    """Start a worker's build process before there is something to build."""
    _pool(limits, forks)


def _pool(limits: bytes, forks: str) -> BuildPool:
    if limits not in _pools:
        leave_out_torch()
        from relaxtune.pipeline.tuning.local.build_pool import BuildPool

        stack = contextlib.ExitStack()
        directory = Path(stack.enter_context(temporary_folder()))
        pool = BuildPool(1, directory, pickle.loads(limits), server=join_server(forks))
        _pools[limits] = stack.enter_context(contextlib.closing(pool))
        atexit.register(stack.close)
    return _pools[limits]


@dataclass(frozen=True)
class ActorSettings:
    """Settings of an actor."""

    run: str  # Of the tuning run; its references are shared under this name.
    # The target, and the environment of the outcomes.
    target: ResolvedTarget
    environment: Environment
    # See `MeasuringProcess`.
    options: MeasureOptions
    timeout_s: float
    seed: int
    forks: str = ""  # The run whose server on the host forks the measuring process; without, it is started afresh.


class MeasuringActor:
    """A `MeasuringProcess` on its device, for candidates that come as bytes.

    It is started with a pickled `ActorSettings`.

    Raises `PipelineError`: the device is of another model than the run's.
    """

    def __init__(self, pickled: bytes) -> None:
        leave_out_torch()
        from relaxtune.pipeline.environment import detect_environment
        from relaxtune.pipeline.tuning.local.devices import pinned
        from relaxtune.pipeline.tuning.local.measuring_process import MeasuringProcess
        from relaxtune.pipeline.tuning.measure.stop import StopSignal

        settings: ActorSettings = pickle.loads(pickled)
        gpu = settings.target.kind == "cuda"
        with contextlib.ExitStack() as stack:
            references = stack.enter_context(shared_folder(settings.run))
            # Actors that work on cells time them on the same device.
            lock = stack.enter_context(contextlib.closing(lock_of(references, own_gpu()))) if gpu else None
            # It starts while this process looks at the device.
            self._process = MeasuringProcess(
                pinned("cuda:0" if gpu else "cpu:0"),
                settings.environment,
                settings.options,
                settings.timeout_s,
                StopSignal(),
                settings.seed,
                Path(stack.enter_context(temporary_folder())),
                join_server(settings.forks),
                references=references,
                lock=lock,
            )
            stack.callback(self._process.close)
            found = detect_environment(settings.target)
            if found != settings.environment:
                raise PipelineError(
                    f"{socket.gethostname()} measures for another environment than the run's: expected "
                    f"{settings.environment}, got {found}"
                )
            self._stack = stack.pop_all()

    def begin(self) -> str:
        """Set the device up; return the host's name."""
        self._process.ready()
        return socket.gethostname()

    def call(self, method: str, *arguments: object) -> object:
        """Return what a method of the process returns."""
        return getattr(self._process, method)(*arguments)

    def leave(self) -> None:
        """End the child and remove the files."""
        self._stack.close()


def own_gpu() -> str:
    """Return the name that all actors on this process's GPU have for it; Ray says which it is."""
    return f"cuda:{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"


@dataclass(frozen=True)
class PackedWork:
    """Work as bytes, so that who passes it on imports nothing for it; the answer is bytes, too."""

    work: bytes
    # The folder and the name of the lock to hold while something is timed; None where nothing else is.
    locks: Path | None = None
    device: str = ""
    keep: bool = True  # Whether the child may keep what later work of the same cell needs.


def answer_by(worker: Worker, work: object) -> object:
    """Return the answer of a worker to work on a cell.

    Raises `PipelineError`: the work ended its process, or was refused.
    """
    try:
        reply = worker.ask(work)
    except (WorkerError, OSError) as e:
        reason = e.short if isinstance(e, WorkerError) else str(e)
        raise PipelineError(f"the process that worked on the cell is gone: {reason}") from e
    if reply.error is not None:
        raise PipelineError(reply.error.strip().splitlines()[-1])
    return reply.value


class WorkingActor:
    """Works on a GPU that Ray has chosen, one request at a time.

    Its child runs `module`, forked by the server of the run `forks` on this host; without one, the child is started
    afresh. `run` names the folder of the devices' locks. Libraries start `cores` threads.
    """

    def __init__(self, module: str, forks: str, run: str, cores: int) -> None:
        self._stack = ExitStack()
        self._locks = self._stack.enter_context(shared_folder(run))
        self._worker = Worker(module, {"OMP_NUM_THREADS": str(cores)}, server=join_server(forks), gpu=True)
        self._worker.start()

    def answer(self, work: bytes) -> object:
        """Do pickled work."""
        return answer_by(self._worker, PackedWork(work, self._locks, own_gpu()))


_workers: dict[tuple[str, str], Worker] = {}


def answer_task(module: str, forks: str, work: bytes) -> object:
    """Do pickled work for a CPU. The Ray worker keeps its child for the next, which keeps nothing of this one."""
    key = (module, forks)
    if key not in _workers:
        _workers[key] = Worker(module, server=join_server(forks))
    return answer_by(_workers[key], PackedWork(work, keep=False))
