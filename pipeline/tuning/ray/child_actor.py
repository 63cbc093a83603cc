"""Work of other kinds on a node of a cluster: a Ray worker that has a child do it, as the processes of one machine do.

Ray imports this file before anything else of ours, so nothing here is imported that imports TVM. The child is forked by
the node's server (`pipeline.tuning.ray.node_server`), which has done all imports.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.processes.process import ChildDiedError, ChildProcess
from relaxtune.pipeline.temporary import shared_folder
from relaxtune.pipeline.tuning.ray.measuring_actor import own_gpu
from relaxtune.pipeline.tuning.ray.node_server import join_server

# Children that may be lost with one piece of work, through no fault of it.
_LOST_MAX = 2


@dataclass(frozen=True)
class PackedWork:
    """Work as bytes, so that who passes it on imports nothing for it; the answer is bytes, too.

    Attributes
    ----------
    turns, device
        The folder and the name of the lock to hold while something is timed; None where nothing else is.
    keep
        Whether the child may keep what later work of the same cell needs.
    """

    work: bytes
    turns: Path | None = None
    device: str = ""
    keep: bool = True


class WorkingChild:
    """A child that does packed work; one that is gone is replaced.

    Parameters
    ----------
    module : str
        What it runs (`pipeline.processes.child`).
    forks : str
        The run whose server on this host forks it; where there is none, it is started afresh.
    environment : dict
        Environment variables over those of this process.
    gpu : bool
        Whether it is to use a GPU.
    """

    def __init__(self, module: str, forks: str, environment: dict[str, str], *, gpu: bool) -> None:
        self._module, self._forks, self._environment, self._gpu = module, forks, environment, gpu
        self._process = self._start()

    def answer(self, work: PackedWork) -> bytes:
        """Have work done.

        Raises
        ------
        PipelineError
            The work ended its process, or was refused.
        """
        for left in reversed(range(_LOST_MAX + 1)):
            try:
                self._process.send(work)
                reply = self._process.receive()
                break
            except (ChildDiedError, OSError) as e:
                self._process.kill()
                self._process = self._start()
                # What was killed from outside, by the memory killer say, another process does again.
                if not (left and isinstance(e, ChildDiedError) and e.from_outside):
                    told = e.short if isinstance(e, ChildDiedError) else str(e)
                    raise PipelineError(f"the process that worked on the cell is gone: {told}") from e
        if not isinstance(reply.value, bytes):
            raise PipelineError((reply.error or "no answer").strip().splitlines()[-1])
        return reply.value

    def close(self) -> None:
        """End the child."""
        self._process.kill()

    def _start(self) -> ChildProcess:
        process = ChildProcess(self._module, self._environment, join_server(self._forks, gpus=self._gpu))
        process.receive()
        return process


class WorkingActor:
    """Works on a GPU that Ray has chosen, one request at a time.

    Parameters
    ----------
    module, forks : str
        See `WorkingChild`.
    run : str
        Names the folder of the devices' turns.
    cores : int
        Threads that its libraries start.
    """

    def __init__(self, module: str, forks: str, run: str, cores: int) -> None:
        self._stack = ExitStack()
        self._turns = self._stack.enter_context(shared_folder(run))
        self._child = WorkingChild(module, forks, {"OMP_NUM_THREADS": str(cores)}, gpu=True)

    def answer(self, work: bytes) -> bytes:
        """Do pickled work."""
        return self._child.answer(PackedWork(work, self._turns, own_gpu()))


_children: dict[tuple[str, str], WorkingChild] = {}


def answer_task(module: str, forks: str, work: bytes) -> bytes:
    """Do pickled work for a CPU. The Ray worker keeps its child for the next, which keeps nothing of this one."""
    key = (module, forks)
    if key not in _children:
        _children[key] = WorkingChild(module, forks, {}, gpu=False)
    return _children[key].answer(PackedWork(work, keep=False))
