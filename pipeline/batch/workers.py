"""Where cells are imported and finished while others are tuned.

    submit ── waiting work ──▶ a thread for each worker ── `_do` ──▶ answer

A worker keeps the model of a cell from its import to its end. `LocalWorkers` are processes of this machine, each pinned
to a device. On a cluster, `DeviceWorkers` are actors on reserved GPUs. They time something while no other process uses
their device. `ClusterWorkers` are tasks, for a CPU: a cell is imported on any node and finished where its device is
free, after the tuning.
"""

from __future__ import annotations

import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from relaxtune.pipeline.batch.worker import (
    CORES_EACH,
    WORKER_MODULE,
    AheadWork,
    FinishWork,
    LookWork,
    PrepareWork,
    Work,
)
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.spans import note_span, span
from relaxtune.pipeline.tuning.local.devices import pinned
from relaxtune.pipeline.tuning.ray.cluster import SHARES, Reservation
from relaxtune.pipeline.tuning.ray.machine import RayCluster
from relaxtune.pipeline.tuning.ray.node_side import WorkingActor, answer_by, answer_task
from relaxtune.pipeline.workers.fork_server import Forks
from relaxtune.pipeline.workers.worker import Worker
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.targets.host import physical_cores


class CellWorkers(Protocol):
    """Works on cells while others are tuned; nothing it does disturbs a measurement."""

    count: int  # Cells that it works on at the same time.

    def submit(self, work: Work) -> Future[object]:
        """Hand in work (`CellWorker.answer`); the future holds the answer, or an error if its process died."""

    def close(self) -> None:
        """End the workers; unfinished work is given up."""


class WorkerLostError(Exception):
    """A worker is gone, and the work that it had is no reason for that: another one is to do it."""


@dataclass(eq=False)
class _Job:
    """Work, the future of its answer, and whether a worker was lost with it."""

    work: Work
    future: Future[object]
    lost: bool = False
    since_s: float = field(default_factory=time.monotonic)


# The order in which a process does its work: others wait for the first kinds.
_ORDER = (FinishWork, PrepareWork, LookWork, AheadWork)
_STAGES = {FinishWork: "finish", PrepareWork: "prepare", LookWork: "prepare", AheadWork: "get ready"}


class HomedWorkers(ABC):
    """Workers that each do one thing at a time. A cell stays with the one that imported it, which keeps its model."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._homes: dict[str, int] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name="relaxtune-cells", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work) -> Future[object]:
        """Hand in work for the worker that has the cell, else for the next free one."""
        job = _Job(work, Future())
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()
        return job.future

    def close(self) -> None:
        """End the workers; unfinished work is given up."""
        with self._changed:
            self._closed = True
            left, self._waiting = self._waiting, []
            self._changed.notify_all()
            self._end()
        for job in left:
            job.future.cancel()
        for thread in self._threads:
            thread.join()

    @abstractmethod
    def _do(self, work: Work, number: int) -> object:
        """Have a worker do work, which may be its first, and return the answer; WorkerLostError where it is gone."""

    @abstractmethod
    def _end(self) -> None:
        """End all workers; no other is started after that. The lock is held."""

    def _serve(self, number: int) -> None:
        while (job := self._next(number)) is not None:
            try:
                what, cell = _STAGES[type(job.work)], job.work.cell.name
                note_span(f"wait to {what}", cell, job.since_s, time.monotonic())
                with span(what, cell):
                    done = self._do(job.work, number)
                job.future.set_result(done)
            except WorkerLostError as e:
                with self._changed:
                    # Other workers may have its cells: the models that it kept of them are gone.
                    self._homes = {name: home for name, home in self._homes.items() if home != number}
                    again = not (job.lost or self._closed)
                    if again:
                        job.lost = True
                        self._waiting.insert(0, job)
                    self._changed.notify_all()
                if not again:
                    job.future.set_exception(PipelineError(str(e)))
            # The border of the thread: the caller that waits for the work gets it.
            except Exception as e:
                job.future.set_exception(e)

    def _next(self, number: int) -> _Job | None:
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

    The processes are pinned to the `devices` that candidates are measured on, one after another. They time something
    only while its device measures nothing else (`locks`). `server` forks them, and is not closed here; without one each
    is started afresh. By default there are as many as the build processes leave cores for.
    """

    def __init__(
        self, devices: Sequence[str], locks: Path, server: Forks | None = None, count: int | None = None
    ) -> None:
        self._devices, self._locks = tuple(devices), locks
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
            work = replace(work, locks=self._locks, device=self._device(number))
        return answer_by(self._workers[number], work)

    def _end(self) -> None:
        for worker in self._workers:
            worker.leave()


def workers_for(devices: int, cores: int) -> int:
    """Return the number of workers for so many devices and cores."""
    return max(1, min(devices * SHARES, cores // CORES_EACH))


class DeviceWorkers(HomedWorkers):
    """Actors, on devices that are reserved.

    GPU nodes of the cluster see the plan's models and its folder of artifacts at the same paths as the driver.
    """

    def __init__(self, cluster: RayCluster, reservation: Reservation) -> None:
        self._ray, self._reservation, self._forks = cluster.ray, reservation, cluster.forks
        self._actor = cluster.ray.remote(max_restarts=0)(WorkingActor)
        self._actors: dict[int, Any] = {}
        super().__init__(workers_for(reservation.devices, reservation.cores))

    def _do(self, work: Work, number: int) -> object:
        with self._changed:
            if self._closed:
                raise PipelineError("the run has ended")
            if number not in self._actors:
                options = self._reservation.working(number % self._reservation.devices)
                started = self._actor.options(**options).remote(
                    WORKER_MODULE, self._forks, self._reservation.run, CORES_EACH
                )
                self._actors[number] = started
            actor = self._actors[number]
        try:
            answer: bytes = self._ray.get(actor.answer.remote(pickle.dumps(work)))
        except self._ray.exceptions.RayActorError as e:
            with self._changed:
                self._actors.pop(number, None)
            raise WorkerLostError(f"the cluster's actor that worked on the cell is gone: {type(e).__name__}") from e
        found: object = pickle.loads(answer)
        return found

    def _end(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)


class ClusterWorkers:
    """Tasks of a cluster.

    Nodes of the cluster see the plan's models and its folder of artifacts at the same paths as the driver.
    """

    def __init__(self, cluster: RayCluster, target: ResolvedTarget) -> None:
        place = cluster.get_place(target)
        self.count, self._forks = max(2, place.devices), cluster.forks
        # A lost node's task is done once more elsewhere. Nothing else tries it again: no thread here waits for it.
        self._prepare = cluster.ray.remote(num_cpus=1, max_retries=1)(answer_task)
        self._finish = cluster.ray.remote(max_retries=1, **place.actor)(answer_task)

    def submit(self, work: Work) -> Future[object]:
        """Hand in work."""
        if isinstance(work, AheadWork):
            # No node keeps a model for later.
            future: Future[object] = Future()
            future.set_result(False)
            return future
        task: Any = self._prepare if isinstance(work, PrepareWork) else self._finish
        answer: Future[object] = Future()
        # Giving it up does not end the task: its answer still comes.
        answer.set_running_or_notify_cancel()

        def come(done: Future[bytes]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(pickle.loads(done.result()))
            else:
                answer.set_exception(error)

        task.remote(WORKER_MODULE, self._forks, pickle.dumps(work)).future().add_done_callback(come)
        return answer

    def close(self) -> None:
        """Do nothing: unfinished work ends with the connection."""
