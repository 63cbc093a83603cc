"""A run that a feed gives its tasks: what starts before they come, and when it hears that one of them is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.waiting_backend import WaitingBackend
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.local.machine import Machine
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.plan.feed import Arrival
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.pipeline.tuning.session import tune
from relaxtune.tuning_db.contract import TuningDatabase
from tests.pipeline.tuning.tuning_cases import Place, all_records, matmul_task

TRIALS = 8


class Feed:
    """Gives its tasks in turn, and writes down what happens."""

    def __init__(self, tasks: Sequence[TuningTask]) -> None:
        self.left = list(tasks)
        self.heard: list[str] = []

    @property
    def arriving(self) -> bool:
        return bool(self.left)

    def take(self, *, idle: bool) -> list[Arrival]:
        if not self.left or (not idle and "take" not in self.heard):
            self.heard.append("take")
            return []
        self.heard.append("arrived")
        return [Arrival((self.left.pop(0),), TRIALS // 2)]

    def settled(self, workload_hashes: Sequence[str]) -> None:
        self.heard += workload_hashes

    def improved(self, workload_hash: str, best_us: float) -> None:
        """Hear of a latency."""

    def wait(self, seconds: float) -> None:
        """Wait for nothing."""

    def candidate_measured(self, event: ProgressEvent) -> None:
        self.heard.append("measured")


def test_processes_start_before_tasks_come_and_a_task_is_told_of_when_it_is_done(
    place: Place, database: TuningDatabase
) -> None:
    first, second = matmul_task(16, 16, 16, "first"), matmul_task(32, 16, 16, "second")
    feed = Feed([first, second])
    # What is waited for as a GPU is.
    environment = replace(place.environment, device_name="a device that waits")

    @contextmanager
    def machine(*_: object) -> Iterator[Machine]:
        feed.heard.append("started")
        with temporary_folder() as folder:
            pool, backend = BuildPool(1, folder), WaitingBackend(environment, 1, 0.05)
            yield Machine(pool, backend)
            pool.close()
            backend.close()

    options = TuningOptions(trials=TRIALS, trials_per_iteration=4, population=16, workers=1, seed=3)
    summary = tune(
        (),
        target=place.target,
        database=database,
        environment=environment,
        options=options,
        still_true=all_records,
        machine=machine,
        feed=feed,
        progress=feed,
    )
    assert summary.candidates == TRIALS
    assert feed.heard.index("started") < feed.heard.index("arrived")
    told = [one for one in feed.heard if one.isdigit()]
    assert sorted(told) == sorted([first.workload_hash, second.workload_hash])
    # Candidates of the other task are still to be measured then.
    assert feed.heard[: feed.heard.index(told[0])].count("measured") <= TRIALS - 2
