from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import tvm
from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.environment import code_version
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tuning import task_start
from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.local.backend import Machine, this_machine
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.pipeline.tuning.record import Recorder
from relaxtune.pipeline.tuning.result_table import to_data
from relaxtune.pipeline.tuning.search import evolution as search_module
from relaxtune.pipeline.tuning.search.evolution import TaskSearch
from relaxtune.pipeline.tuning.session import require_valid, tune
from relaxtune.tuning_db.errors import DatabaseWriteError
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import Mode, RecordFilter, Route, Status, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.winner import judge
from tests import warm_python
from tests.pipeline.tuning.tuning_cases import (
    MadeUpRecipe,
    Place,
    add_one_mod,
    all_records,
    extern_mod,
    matmul_task,
    task_of,
    unbuildable_mod,
)

OPTIONS = TuningOptions(
    trials=6,
    trials_per_iteration=4,
    population=16,
    run_timeout_s=60.0,
    workers=1,
    seed=3,
    finals=0,
    measure=MeasureOptions(repeats=3, contender_repeats=0, min_repeat_s=0.0005),
)


class Watcher:
    """Keeps the events, and does something at one of them."""

    def __init__(self, at: int = 0, action: object = None) -> None:
        self.events: list[ProgressEvent] = []
        self._at, self._action = at, action

    def __call__(self, event: ProgressEvent) -> None:
        self.events.append(event)
        if len(self.events) == self._at and callable(self._action):
            self._action()


BEFORE: set[int] = set()


@pytest.fixture(autouse=True)
def _note_children() -> None:
    # Other tests of this process may have left some, such as Python's resource tracker.
    BEFORE.clear()
    BEFORE.update(child.pid for child in psutil.Process().children(recursive=True))


def children() -> list[int]:
    ours = BEFORE | warm_python.server_pids()
    return [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in ours]


def test_tune_records_every_candidate_and_leaves_no_process(place: Place, database: TuningDatabase) -> None:
    watcher = Watcher()
    task = matmul_task(32, 64, 32)
    job = database.start_job(model="tiny", model_sha256="0" * 64, target=place.key)
    summary = tune(
        [task],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=OPTIONS,
        job_id=job.id,
        progress=watcher,
    )
    (result,) = summary.tasks
    assert result.valid + result.failed == OPTIONS.trials == len(watcher.events)
    assert result.valid > 0
    assert not summary.interrupted
    records = database.list_records(RecordFilter(workload_hash=task.workload_hash, job_id=job.id))
    assert Counter(record.route for record in records) == {Route.METASCHEDULE: OPTIONS.trials, Route.FALLBACK: 1}
    best = database.find_best(
        Question(workload_hash=task.workload_hash, signature_key=None, target=place.key, environment=place.environment)
    )
    assert best is not None
    assert best.latency_us == result.after_us
    assert best.route is result.route
    assert result.after_us <= result.before_us
    assert all(len(r.latencies_us) <= 3 and r.seed == 3 and r.environment == place.environment for r in records)
    assert {record.code_version for record in records} == {code_version()}
    assert database.list_job_tasks(job.id)[0].seconds > 0
    assert to_data(summary)["tasks"][0]["onnx_nodes"] == ["matmul_node"]
    assert children() == []


def test_tune_ends_with_a_final_between_contenders(place: Place, database: TuningDatabase) -> None:
    task = task_of("add", add_one_mod(size=4096))
    summary = tune(
        [task],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=dataclasses.replace(OPTIONS, finals=5, trials=6),
    )
    records = database.list_records(RecordFilter(workload_hash=task.workload_hash))
    again = Counter((record.route, record.decision) for record in records)
    finals = [key for key, count in again.items() if count > 1]
    # A loop over 16 KiB leaves the schedules near each other.
    assert len(finals) >= 2
    assert all(len(record.latencies_us) == 5 for record in records[-len(finals) :])
    standing = judge([r for r in records if r.status is Status.OK], place.environment).standing
    assert standing[0].latency_us == summary.tasks[0].after_us
    assert summary.tasks[0].spread is not None
    assert children() == []


def test_of_a_settled_task_only_its_reference_is_kept(place: Place, database: TuningDatabase) -> None:
    kept: list[str] = []

    @contextlib.contextmanager
    def machine(*asked: Any) -> Iterator[Machine]:
        with this_machine(*asked) as found:
            assert isinstance(found.builder, BuildPool)
            yield found
            kept.extend(path.name for path in found.builder._directory.glob("*.so"))

    summary = tune(
        [task_of("add", add_one_mod(size=4096))],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=dataclasses.replace(OPTIONS, finals=5, min_gain=1e6),
        machine=machine,
    )
    assert summary.tasks[0].ended is not None
    assert kept == ["candidate-000001.so"]


def test_tune_measures_nothing_again_when_enough_is_known(place: Place, database: TuningDatabase) -> None:
    def run(**changes: object) -> object:
        return tune(
            [matmul_task()],
            target=place.target,
            database=database,
            environment=place.environment,
            still_true=all_records,
            options=dataclasses.replace(OPTIONS, trials=2, **changes),
        )

    first = run()
    known = first.tasks[0].valid
    assert known == 2
    count = database.count_records()
    again = run(enough_records=known)
    assert again.candidates == 0
    assert again.tasks[0].skipped is not None
    assert again.tasks[0].after_us == first.tasks[0].after_us
    require_valid(again)
    assert database.count_records() == count
    forced = run(enough_records=known, mode=Mode.FORCE)
    assert forced.candidates == 2


def test_tune_skips_a_task_whose_reference_cannot_be_computed(place: Place, database: TuningDatabase) -> None:
    summary = tune(
        [task_of("crash", extern_mod("raise", 11)), task_of("good", add_one_mod(size=64))],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=dataclasses.replace(OPTIONS, trials=2, trials_per_iteration=2),
    )
    by_name = {task.task.name: task for task in summary.tasks}
    assert by_name["good"].valid > 0
    assert by_name["crash"].valid + by_name["crash"].failed == 0
    assert by_name["crash"].skipped == "the reference cannot be computed"
    assert "SIGSEGV" in str(by_name["crash"].last_error)
    statuses = Counter(record.status for record in database.list_records(RecordFilter(route=Route.FALLBACK)))
    assert statuses == {Status.RUN_ERROR: 1, Status.OK: 1}
    assert children() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "status", "text"),
    [
        (add_one_mod(2.0, size=64), Status.WRONG_RESULT, "elements are off"),
        (extern_mod("raise", 11, size=64), Status.RUN_ERROR, "SIGSEGV"),
        (extern_mod("sleep", 100, size=64), Status.TIMEOUT, "run_timeout_s"),
        (unbuildable_mod(64), Status.BUILD_ERROR, "activemask"),
    ],
    ids=["wrong", "crash", "hang", "unbuildable"],
)
def test_tune_goes_on_and_records_the_status_when_candidates_fail(
    place: Place,
    database: TuningDatabase,
    monkeypatch: pytest.MonkeyPatch,
    bad: tvm.ir.IRModule,
    status: Status,
    text: str,
) -> None:
    # Nothing makes a scheduler err on request: its candidates, but for the last, are exchanged for bad kernels.
    honest = TaskSearch.propose

    def spoilt(self: TaskSearch) -> list[Candidate]:
        good = honest(self)
        schedule = tvm.s_tir.Schedule(bad)
        return [
            dataclasses.replace(c, module=bad, schedule=ms.MeasureCandidate(schedule, c.schedule.args_info))
            for c in good[:-1]
        ] + good[-1:]

    monkeypatch.setattr(search_module.TaskSearch, "propose", spoilt)
    monkeypatch.setattr(search_module.TaskSearch, "learn", lambda self, candidates, seconds: None)
    task = task_of("add", add_one_mod(size=64))
    summary = tune(
        [task],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=dataclasses.replace(
            OPTIONS,
            trials=2,
            trials_per_iteration=2,
            run_timeout_s=2.0 if status is Status.TIMEOUT else OPTIONS.run_timeout_s,
        ),
    )
    (result,) = summary.tasks
    assert result.failures == {status: 1}
    assert result.valid == 1
    assert summary.restarts == (status in (Status.RUN_ERROR, Status.TIMEOUT))
    failed = database.list_records(RecordFilter(status=status))
    assert len(failed) == 1
    assert text in str(failed[0].error)
    best = database.find_best(
        Question(workload_hash=task.workload_hash, signature_key=None, target=place.key, environment=place.environment)
    )
    assert best is not None
    assert best.decision != failed[0].decision
    assert children() == []


def test_tune_records_a_template_that_cannot_be_made(
    place: Place, database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = {n: json.dumps({"template": "made_up", "tile": n}) for n in (1, 2, 4)}
    offered = [
        Candidate(Route.TEMPLATE, decision, MadeUpRecipe(b"", place.target, decision, n == 2))
        for n, decision in decisions.items()
    ]
    monkeypatch.setattr(task_start, "template_candidates", lambda task, target, routes: offered)
    summary = tune(
        [task_of("add", add_one_mod(size=64))],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=dataclasses.replace(OPTIONS, trials=None, time_budget_s=60.0, routes=frozenset({Route.TEMPLATE})),
    )
    (result,) = summary.tasks
    assert (result.valid, result.failures) == (2, {Status.BUILD_ERROR: 1})
    assert result.ended == "the routes have no search"
    (failed,) = database.list_records(RecordFilter(status=Status.BUILD_ERROR))
    assert failed.route is Route.TEMPLATE
    assert "the tile is wider than the matrix" in str(failed.error)


@pytest.mark.quick_cases("signal")
@pytest.mark.parametrize("how", ["signal", "exception"])
def test_tune_keeps_finished_candidates_when_interrupted(place: Place, database: TuningDatabase, how: str) -> None:
    def interrupt() -> None:
        if how == "exception":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGINT)

    watcher = Watcher(2, interrupt)
    summary = tune(
        [matmul_task(32, 32, 32)],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=dataclasses.replace(OPTIONS, trials=1000),
        progress=watcher,
    )
    assert summary.interrupted
    assert 2 <= summary.candidates < 10
    assert database.count_records(RecordFilter(route=Route.METASCHEDULE)) == summary.candidates
    assert children() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_tune_goes_on_when_the_database_cannot_be_written_for_a_while(
    place: Place, database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, failures = database.record_measurements, []

    def full(records: list[TuningRecord]) -> list[int]:
        if len(failures) < 2:
            failures.append(len(records))
            raise DatabaseWriteError("database or disk is full")
        return write(records)

    monkeypatch.setattr(database, "record_measurements", full)
    monkeypatch.setattr(Recorder, "flush_interval_s", 0.0)
    summary = tune(
        [matmul_task()],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=OPTIONS,
    )
    assert len(failures) == 2
    assert summary.candidates == OPTIONS.trials
    assert database.count_records() == OPTIONS.trials + 1


def test_tune_leaves_no_process_when_the_listener_raises(place: Place, database: TuningDatabase) -> None:
    def fail() -> None:
        raise OSError("the screen is gone")

    with pytest.raises(OSError, match="the screen is gone"):
        tune(
            [matmul_task()],
            target=place.target,
            database=database,
            environment=place.environment,
            still_true=all_records,
            options=OPTIONS,
            progress=Watcher(1, fail),
        )
    assert database.count_records(RecordFilter(route=Route.METASCHEDULE)) >= 1
    assert children() == []


def test_tune_ends_when_the_time_is_up(place: Place, database: TuningDatabase) -> None:
    summary = tune(
        [matmul_task(32, 32, 32)],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=dataclasses.replace(OPTIONS, trials=None, time_budget_s=1.0),
    )
    assert summary.seconds < 60
    assert not summary.interrupted


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"trials": None}, "needs a limit"), ({"mode": Mode.READ_ONLY}, "got read-only")],
)
def test_tune_refuses_options_that_cannot_work(
    place: Place, database: TuningDatabase, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        tune(
            [],
            target=place.target,
            database=database,
            environment=place.environment,
            still_true=all_records,
            options=dataclasses.replace(OPTIONS, **changes),
        )
