"""Where cells are imported and finished while others are tuned.

    submit ── waiting work ──▶ a thread for each worker ── `_do` ──▶ answer

A worker keeps the model of a cell from its import to its end. `LocalWorkers` are processes of this machine, each pinned
to a device; `relaxtune.pipeline.batch.cluster_workers` has those of a cluster.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from relaxtune.pipeline.batch.worker import WORKER_MODULE, AheadWork, FinishWork, LookWork, PrepareWork, Work
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.spans import note_span, span
from relaxtune.pipeline.tuning.local.devices import pinned
from relaxtune.pipeline.tuning.ray.child_actor import answer_by
from relaxtune.pipeline.tuning.ray.reservation import SHARES
from relaxtune.pipeline.workers.fork_server import Forks
from relaxtune.pipeline.workers.worker import Worker
from relaxtune.schedules.targets.host import physical_cores

# Cores for each worker that imports and compiles beside the build processes; `SHARES` are the most for a device.
CORES_EACH = 2


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


class WorkerLostError(Exception):
    """A worker is gone, and the work that it had is no reason for that: another one is to do it."""


@dataclass(eq=False)
class _Asked:
    """Work, who waits for it, and whether a worker was lost with it."""

    work: Work
    future: Future[object]
    lost: bool = False
    since_s: float = field(default_factory=time.monotonic)


# What a process does first: what others wait for.
_ORDER = (FinishWork, PrepareWork, LookWork, AheadWork)
_STAGES = {FinishWork: "finish", PrepareWork: "prepare", LookWork: "prepare", AheadWork: "get ready"}


class HomedWorkers(CellWorkers):
    """Workers that each do one thing at a time. A cell stays with the one that imported it, which keeps its model.

    Parameters
    ----------
    count : int
        How many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._waiting: list[_Asked] = []
        self._homes: dict[str, int] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name="relaxtune-cells", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """The number of workers."""
        return self._count

    def submit(self, work: Work) -> Future[object]:
        """Hand in work for the worker that has the cell, else for the next free one."""
        asked = _Asked(work, Future())
        with self._changed:
            self._waiting.append(asked)
            self._changed.notify_all()
        return asked.future

    def close(self) -> None:
        """End the workers; what is not done is given up."""
        with self._changed:
            self._closed = True
            left, self._waiting = self._waiting, []
            self._changed.notify_all()
            self._end()
        for asked in left:
            asked.future.cancel()
        for thread in self._threads:
            thread.join()

    @abstractmethod
    def _do(self, work: Work, number: int) -> object:
        """Have a worker do work, which may be its first, and return the answer.

        Raises
        ------
        WorkerLostError
            The worker is gone. `_leave` was called.
        """

    @abstractmethod
    def _end(self) -> None:
        """End all workers; no other is started after that. The lock is held."""

    def _leave(self, number: int) -> None:
        """Let other workers have the cells of one that is gone; what it kept of them is made anew."""
        with self._changed:
            self._homes = {name: home for name, home in self._homes.items() if home != number}
            self._changed.notify_all()

    def _serve(self, number: int) -> None:
        while (asked := self._next(number)) is not None:
            try:
                what, cell = _STAGES[type(asked.work)], asked.work.cell.name
                note_span(f"wait to {what}", cell, asked.since_s, time.monotonic())
                with span(what, cell):
                    done = self._do(asked.work, number)
                asked.future.set_result(done)
            except WorkerLostError as e:
                with self._changed:
                    again = not (asked.lost or self._closed)
                    if again:
                        asked.lost = True
                        self._waiting.insert(0, asked)
                        self._changed.notify_all()
                if not again:
                    asked.future.set_exception(PipelineError(str(e)))
            # The border of the thread: the caller that waits for the work is told.
            except Exception as e:
                asked.future.set_exception(e)

    def _next(self, number: int) -> _Asked | None:
        """Wait for work that this worker may do; None at the end."""
        with self._changed:
            while not self._closed:
                mine = [one for one in self._waiting if self._homes.get(one.work.cell.name, number) == number]
                if not mine:
                    self._changed.wait()
                    continue
                first = min(mine, key=lambda one: _ORDER.index(type(one.work)))
                self._waiting.remove(first)
                if first.lost or first.future.set_running_or_notify_cancel():
                    self._homes[first.work.cell.name] = number
                    return first
            return None


class LocalWorkers(HomedWorkers):
    """Processes of this machine.

    Parameters
    ----------
    devices : sequence of str
        Devices that candidates are measured on; the processes are pinned to them, one after another.
    turns : Path
        The folder of the devices' turns: a process times something only while its device measures nothing else.
    server : Forks or None
        What forks them, which is not closed here; without one each is started afresh.
    count : int or None
        How many there are; None is as many as there should be beside the build processes.
    """

    def __init__(
        self, devices: Sequence[str], turns: Path, server: Forks | None = None, count: int | None = None
    ) -> None:
        self._devices, self._turns = tuple(devices), turns
        count = count or workers_for(len(devices), physical_cores() or 1)
        self._workers = [
            Worker(
                WORKER_MODULE,
                {**pinned(self._device(number)).environment, "OMP_NUM_THREADS": str(CORES_EACH)},
                server=server,
                gpu=True,
            )
            for number in range(count)
        ]
        super().__init__(count)

    def close(self) -> None:
        """End the processes; work that is not done is given up."""
        super().close()
        for worker in self._workers:
            worker.close()

    def _device(self, number: int) -> str:
        return self._devices[number % len(self._devices)]

    def _do(self, work: Work, number: int) -> object:
        if isinstance(work, FinishWork):
            work = replace(work, turns=self._turns, device=self._device(number))
        return answer_by(self._workers[number], with_threads(work))

    def _end(self) -> None:
        for worker in self._workers:
            worker.leave()


def workers_for(devices: int, cores: int) -> int:
    """Return how many workers devices get, of so many cores beside them."""
    return max(1, min(devices * SHARES, cores // CORES_EACH))


def with_threads(work: Work) -> Work:
    """Return work with the threads that a worker may use."""
    return replace(work, threads=CORES_EACH) if isinstance(work, AheadWork) else work
