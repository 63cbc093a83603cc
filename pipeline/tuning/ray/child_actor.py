"""Work of other kinds on a node of a cluster: a Ray worker that has a child do it, as the processes of one machine do.

Ray imports this file before anything else of ours, so nothing here is imported that imports TVM. The child is forked by
the node's server (`pipeline.tuning.ray.node_server`), which has done all imports.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.temporary import shared_folder
from relaxtune.pipeline.tuning.ray.measuring_actor import own_gpu
from relaxtune.pipeline.tuning.ray.node_server import join_server
from relaxtune.pipeline.workers.replies import WorkerError
from relaxtune.pipeline.workers.worker import Worker


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

    Raises
    ------
    PipelineError
        The work ended its process, or was refused.
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
