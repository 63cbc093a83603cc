"""Cells that are imported and finished by a Ray cluster.

For GPUs, actors beside the measuring one of each device do that while others are tuned. They hold the device's turn
while they time something. For a CPU, tasks do it: a cell is imported on any node. It is finished where its device is
free, after the tuning, so that nothing is timed beside a measurement.
"""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from typing import Any

from relaxtune.pipeline.batch.worker import WORKER_MODULE, AheadWork, PrepareWork, Work
from relaxtune.pipeline.batch.workers import (
    CORES_EACH,
    CellWorkers,
    HomedWorkers,
    WorkerLostError,
    with_threads,
    workers_for,
)
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.tuning.ray.child_actor import WorkingActor, answer_task
from relaxtune.pipeline.tuning.ray.machine import RayCluster
from relaxtune.pipeline.tuning.ray.reservation import Reservation
from relaxtune.schedules.targets import ResolvedTarget


class DeviceWorkers(HomedWorkers):
    """Actors, on devices that are reserved.

    Parameters
    ----------
    cluster : RayCluster
        Whose GPU nodes see the plan's models and its folder of artifacts at the same paths as the driver.
    reservation : Reservation
        The devices.
    """

    def __init__(self, cluster: RayCluster, reservation: Reservation) -> None:
        self._ray, self._reservation, self._forks = cluster.ray, reservation, cluster.forks
        self._made = cluster.ray.remote(max_restarts=0)(WorkingActor)
        self._actors: dict[int, Any] = {}
        super().__init__(workers_for(reservation.devices, reservation.cores))

    def _do(self, work: Work, number: int) -> object:
        with self._changed:
            if self._closed:
                raise PipelineError("the run has ended")
            if number not in self._actors:
                asked = self._reservation.working(number % self._reservation.devices)
                started = self._made.options(**asked).remote(
                    WORKER_MODULE, self._forks, self._reservation.run, CORES_EACH
                )
                self._actors[number] = started
            actor = self._actors[number]
        try:
            answer: bytes = self._ray.get(actor.answer.remote(pickle.dumps(with_threads(work))))
        except self._ray.exceptions.RayActorError as e:
            with self._changed:
                self._actors.pop(number, None)
            self._leave(number)
            raise WorkerLostError(f"the cluster's actor that worked on the cell is gone: {type(e).__name__}") from e
        found: object = pickle.loads(answer)
        return found

    def _end(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)


class ClusterWorkers(CellWorkers):
    """Tasks of a cluster.

    Parameters
    ----------
    cluster : RayCluster
        Whose nodes see the plan's models and its folder of artifacts at the same paths as the driver.
    target : ResolvedTarget
        Of the cells.
    """

    def __init__(self, cluster: RayCluster, target: ResolvedTarget) -> None:
        place = cluster.get_place(target)
        self._count, self._forks = max(2, place.devices), cluster.forks
        # A lost node's task is done again elsewhere.
        self._prepare = cluster.ray.remote(num_cpus=1, max_retries=2)(answer_task)
        self._finish = cluster.ray.remote(max_retries=2, **place.actor)(answer_task)

    @property
    def count(self) -> int:
        """Cells that are imported at the same time."""
        return self._count

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
        """Do nothing: what is not done ends with the connection."""
