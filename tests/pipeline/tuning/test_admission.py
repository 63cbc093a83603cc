"""A run that a feed gives its tasks: what starts before they come, and when it hears that one of them is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import tvm

from benchmarks.tuning.waiting_backend import WaitingBackend
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning import admission
from relaxtune.pipeline.tuning.admission import Arrival
from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.local.backend import Machine
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.measure.backend import Builder, Built, OnBuilt
from relaxtune.pipeline.tuning.measure.recipe import Buildable
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.pipeline.tuning.session import tune
from relaxtune.pipeline.tuning.task_start import TaskStart
from relaxtune.tuning_db.records import Route, Status
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.tuning.tuning_cases import Place, all_records, given, matmul_task

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

    def __call__(self, event: ProgressEvent) -> None:
        self.heard.append("measured")


class InstantBuilder(Builder):
    """Builds nothing: each candidate has code of its own at once."""

    def __init__(self) -> None:
        super().__init__()
        self.built = 0

    capacity, waiting = 4, 0

    def submit(self, what: Buildable, target: tvm.target.Target, on_built: OnBuilt) -> None:
        self.built += 1
        on_built(Built(Status.OK, BuiltArtifact(b"code", f"code {self.built}")))

    def discard(self, artifact: BuiltArtifact) -> None:
        """There is nothing."""

    def close(self) -> None:
        """There is nothing."""


def test_first_proposals_count_against_the_candidates_of_the_run(place: Place, database: TuningDatabase) -> None:
    tasks = [matmul_task(16, 16, 16 * size, f"task{size}") for size in range(1, 7)]
    environment = replace(place.environment, device_name="a device that waits")
    options = TuningOptions(trials=7, trials_per_iteration=4, routes=frozenset({Route.TEMPLATE}))
    starts = {}
    for task in tasks:
        starts[task.workload_hash] = start = TaskStart(task, place.target, options.routes)
        start.__dict__["offers"] = tuple(
            Candidate(Route.TEMPLATE, f'{{"tile": {size}}}', task.packed) for size in range(1, 9)
        )
    arrivals = [Arrival(tuple(tasks), options.trials, starts=starts)]
    feed = Feed([])
    feed.take = lambda *, idle: [arrivals.pop()] if arrivals else []  # type: ignore[method-assign]
    with closing(WaitingBackend(environment, 1, 0.01)) as backend:
        summary = tune(
            (),
            target=place.target,
            database=database,
            environment=environment,
            options=options,
            still_true=all_records,
            machine=given(InstantBuilder(), backend),
            feed=feed,
        )
    assert summary.candidates == options.trials


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


def test_memory_is_given_back_as_tasks_come(
    place: Place, database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    feed = Feed([matmul_task(16, 16, 16 * size, f"task{size}") for size in range(1, 6)])
    monkeypatch.setattr(admission, "_RETURN_EVERY", 2)
    monkeypatch.setattr(admission, "return_freed_memory", lambda: given_back.append(len(feed.left)))
    environment = replace(place.environment, device_name="a device that waits")
    with closing(WaitingBackend(environment, 1, 0.01)) as backend:
        tune(
            (),
            target=place.target,
            database=database,
            environment=environment,
            options=TuningOptions(trials=0, routes=frozenset({Route.TEMPLATE})),
            still_true=all_records,
            machine=given(InstantBuilder(), backend),
            feed=feed,
        )
    assert len(given_back) == 2
