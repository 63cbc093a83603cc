"""A cluster whose devices wait instead of measuring, for benchmarks.batch.bench_cluster."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from relaxtune.pipeline.batch.cells import Cell
from relaxtune.pipeline.batch.finishing import FinishedCell, FinishRequest
from relaxtune.pipeline.batch.tasks import CellTasks
from relaxtune.pipeline.batch.worker import AheadWork, PrepareWork, Work
from relaxtune.pipeline.batch.workers import CellWorkers
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.ray.backend import ActorMeasurer
from relaxtune.pipeline.tuning.ray.builder import RayBuilder
from relaxtune.pipeline.tuning.task_start import TaskStart
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.tuning_db.batches import move_cell
from relaxtune.tuning_db.cell_states import CellFacts, CellState
from relaxtune.tuning_db.records import Environment, Status
from relaxtune.tuning_db.store import TuningDatabase

BUILDING_ACTORS = 4


_FINISH_S = 0.05


_FINISHERS = 2


class WaitingMeasurer(ActorMeasurer):
    """An actor that only waits; what is lost and found is Ray's business as ever."""

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Do nothing: no result is compared."""

    def measure(self, artifact: BuiltArtifact, spec: WorkloadSpec) -> Outcome:
        """Let the actor wait."""
        if self._stop.due:
            return Outcome(Unmeasured.STOPPED)
        answer = self._ask("measure", spec.workload, artifact.content)
        if isinstance(answer, float):
            return Outcome(Status.OK, (answer,) * 3, environment=ENVIRONMENT)
        return answer if isinstance(answer, Outcome) else Outcome(Unmeasured.LOST)

    def compare(self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int) -> None:
        """Do nothing: no final is held."""


class BuildTask:
    """What `RayBuilder` calls: the next of the building actors."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._next = itertools.cycle(actors)

    def remote(self, *arguments: object) -> Any:
        """Hand a build to the next actor."""
        return next(self._next).build.remote(*arguments)


class WaitingRayBuilder(RayBuilder):
    """As many builders as the devices of the run have."""

    builders = 1

    @property
    def capacity(self) -> int:
        """Builds at the same time."""
        return self.builders


class WaitingWorkers(CellWorkers):
    """Importing is a wait, and then the driver gets the bytes of a real cell; finishing only changes states.

    Parameters
    ----------
    builders : sequence of handle
        Of `WaitingBuilders`.
    paths : sequence of Path
        Pickled `CellTasks`.
    numbers : dict
        A cell's name -> its number in the plan.
    """

    def __init__(self, count: int, builders: Sequence[Any], paths: Sequence[Path], numbers: dict[str, int]) -> None:
        self.count, self._paths, self._numbers = count, paths, numbers
        self._next = itertools.cycle(builders)
        self._finisher = ProcessPoolExecutor(_FINISHERS, multiprocessing.get_context("spawn"))

    def submit(self, work: Work) -> Future[object]:
        """Wait for an import, or finish a cell in another process."""
        if isinstance(work, AheadWork):
            done = Future[object]()
            done.set_result(None)
            return done
        if not isinstance(work, PrepareWork):
            return self._finisher.submit(finish, work.request)
        number, answer = self._numbers[work.cell.name], Future[object]()
        answer.set_running_or_notify_cancel()
        path = self._paths[number % len(self._paths)]
        again = number // len(self._paths)

        def come(one: Future[bytes]) -> None:
            try:
                answer.set_result(renamed(pickle.loads(one.result()), work.cell, again))
            except BaseException as e:  # the border of a callback: the driver must hear of it
                answer.set_exception(e)

        next(self._next).prepare.remote(str(path)).future().add_done_callback(come)
        return answer

    def close(self) -> None:
        """End the processes that finish; what they have in hand is given up."""
        for process in self._finisher._processes.values():
            process.kill()
        self._finisher.shutdown(cancel_futures=True)


class WaitingExecutors:
    """Devices that wait."""

    def __init__(self, machine: Any, workers: CellWorkers) -> None:
        self._machine, self._workers = machine, workers

    def find_environment(self, target: ResolvedTarget) -> Environment:
        """Return the environment of a device that waits."""
        return ENVIRONMENT

    def count_devices(self, target: ResolvedTarget) -> int:
        """Return how many actors wait."""
        return self._workers.count

    def machine(
        self, target: ResolvedTarget, environment: Environment, options: TuningOptions, stop: StopSignal
    ) -> Any:
        """Start nothing: the actors are there."""
        return self._machine(stop)

    def workers(self, target: ResolvedTarget) -> CellWorkers:
        """Return what imports and finishes."""
        return self._workers

    def close(self) -> None:
        """End what finishes."""
        self._workers.close()


def finish(request: FinishRequest) -> FinishedCell:
    """Let a cell be validated, in a process of its own as a real one does."""
    time.sleep(_FINISH_S)
    if str(request.database) not in _databases:
        _databases[str(request.database)] = TuningDatabase.open(request.database, create=False)
    move_cell(_databases[str(request.database)], request.batch_id, request.cell.name, CellState.VALIDATING)
    return FinishedCell(CellState.DONE, CellFacts())


TARGET = resolve_target("cuda:sm_90a")


ENVIRONMENT = replace(detect_environment(TARGET), device_name="a device that waits")


_databases: dict[str, TuningDatabase] = {}


def renamed(found: CellTasks, cell: Cell, again: int) -> CellTasks:
    """Return the tasks of a cell for another one; those of the second round and later are tasks of their own."""
    if again == 0:
        return replace(found, cell=cell)
    tasks = tuple(_other(task, again) for task in found.tasks)
    starts = {}
    for task, old in zip(tasks, found.tasks, strict=True):
        start = TaskStart(task, found.target, found.starts[old.workload_hash].routes)
        known = vars(found.starts[old.workload_hash])
        start.__dict__.update({**known, "task": task, "spec": replace(known["spec"], workload=task.workload_hash)})
        starts[task.workload_hash] = start
    return replace(found, cell=cell, tasks=tasks, starts=starts)


def _other(task: TuningTask, again: int) -> TuningTask:
    signature = json.dumps({**json.loads(task.signature), "again": again}, sort_keys=True, separators=(",", ":"))
    other = str((int(task.workload_hash) + again) % 2**63)
    return replace(task, workload_hash=other, signature=signature)
