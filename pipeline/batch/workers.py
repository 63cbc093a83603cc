"""Where cells are imported and finished while others are tuned: processes of this machine, each pinned to a device."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from relaxtune.pipeline.batch.worker import WORKER_MODULE, AheadWork, FinishWork, PrepareWork, Work
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.tuning.local.devices import pinned
from relaxtune.pipeline.tuning.local.process import ChildDiedError, ChildProcess
from relaxtune.schedules.targets.host import physical_cores

# Cores for each process that imports and compiles beside the build processes, and processes for each device.
_CORES_EACH = 2
_EACH_DEVICE_MAX = 8


class CellWorkers(ABC):
    """Does work on cells beside the tuning; nothing it does disturbs a measurement."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Cells that it works on at the same time."""

    @abstractmethod
    def submit(self, work: Work) -> Future[object]:
        """Hand in work (`CellWorker.answer`); the future holds the answer, or an error if its process died."""

    @abstractmethod
    def close(self) -> None:
        """End what was started here; what is not done is given up."""


@dataclass(eq=False)
class _Asked:
    """Work, and who waits for it."""

    work: Work
    future: Future[object]


# What a process does first: what others wait for.
_ORDER = (FinishWork, PrepareWork, AheadWork)


class LocalWorkers(CellWorkers):
    """Processes of this machine. A cell stays with the process that imported it, which keeps its model.

    Parameters
    ----------
    devices : sequence of str
        Devices that candidates are measured on; the processes are pinned to them, one after another.
    turns : Path
        The folder of the devices' turns: a process times something only while its device measures nothing else.
    """

    def __init__(self, devices: Sequence[str], turns: Path) -> None:
        most = len(devices) * _EACH_DEVICE_MAX
        self._count = max(1, min(most, (physical_cores() or 1) // _CORES_EACH))
        self._turns = turns
        self._changed = threading.Condition()
        self._waiting: list[_Asked] = []
        self._homes: dict[str, int] = {}
        self._processes: dict[int, ChildProcess] = {}
        self._closed = False
        self._threads = [
            threading.Thread(
                target=self._serve, args=(number, devices[number % len(devices)]), name="relaxtune-cells", daemon=True
            )
            for number in range(self._count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """The number of processes."""
        return self._count

    def submit(self, work: Work) -> Future[object]:
        """Hand in work for the process that has the cell, else for the next free one."""
        asked = _Asked(work, Future())
        with self._changed:
            self._waiting.append(asked)
            self._changed.notify_all()
        return asked.future

    def close(self) -> None:
        """Kill the processes."""
        with self._changed:
            self._closed = True
            left, self._waiting = self._waiting, []
            self._changed.notify_all()
            for process in self._processes.values():
                process.kill()
        for asked in left:
            asked.future.cancel()
        for thread in self._threads:
            thread.join()

    def _serve(self, number: int, device: str) -> None:
        while (asked := self._next(number)) is not None:
            try:
                asked.future.set_result(self._do(asked.work, number, device))
            # The border of the thread: whoever waits for the work is told.
            except Exception as e:
                asked.future.set_exception(e)

    def _next(self, number: int) -> _Asked | None:
        """Wait for work that this process may do; None at the end."""
        with self._changed:
            while not self._closed:
                mine = [one for one in self._waiting if self._homes.get(one.work.cell.name, number) == number]
                if not mine:
                    self._changed.wait()
                    continue
                first = min(mine, key=lambda one: _ORDER.index(type(one.work)))
                self._waiting.remove(first)
                if first.future.set_running_or_notify_cancel():
                    self._homes[first.work.cell.name] = number
                    return first
            return None

    def _do(self, work: Work, number: int, device: str) -> object:
        if isinstance(work, FinishWork):
            work = replace(work, turns=self._turns, device=device)
        elif isinstance(work, AheadWork):
            work = replace(work, threads=_CORES_EACH)
        try:
            process = self._processes.get(number) or self._start(number, device)
            process.send(work)
            reply = process.receive()
        except (ChildDiedError, OSError) as e:
            self._lose(number)
            lines = str(e).strip().splitlines() or [type(e).__name__]
            told = " ".join(dict.fromkeys([lines[0], lines[-1].strip()]))
            raise PipelineError(f"the process that worked on the cell is gone: {told}") from e
        if reply.error is not None:
            raise PipelineError(reply.error.strip().splitlines()[-1])
        return reply.value

    def _start(self, number: int, device: str) -> ChildProcess:
        with self._changed:
            if self._closed:
                raise OSError("the run has ended")
            process = ChildProcess(WORKER_MODULE, {**pinned(device).environment, "OMP_NUM_THREADS": str(_CORES_EACH)})
            self._processes[number] = process
        process.receive()
        return process

    def _lose(self, number: int) -> None:
        """Let other processes have the cells of one that died; what it kept of them is made anew."""
        with self._changed:
            process = self._processes.pop(number, None)
            if process is not None:
                process.kill()
            self._homes = {name: home for name, home in self._homes.items() if home != number}
            self._changed.notify_all()
