from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections import Counter

import psutil
import pytest
import tvm
from tvm.s_tir import meta_schedule as ms

from pipeline.errors import NothingMeasuredError, UsageError
from pipeline.tuning import search as search_module
from pipeline.tuning.measure_worker import MeasureOptions
from pipeline.tuning.options import TuningOptions
from pipeline.tuning.progress import ProgressEvent
from pipeline.tuning.search import Candidate, TaskSearch
from pipeline.tuning.session import require_valid, tune
from pipeline.tuning.table import to_json
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, extern_mod, matmul_task, task_of, unbuildable_mod
from tuning_db.records import Mode, RecordFilter, Route, Status
from tuning_db.store import TuningDatabase

OPTIONS = TuningOptions(
    trials=6,
    trials_per_iteration=4,
    population=16,
    run_timeout_s=3.0,
    workers=1,
    seed=3,
    measure=MeasureOptions(repeats=3, min_repeat_s=0.0005),
)


class Watcher:
    """Keeps the events, and does something at one of them."""

    def __init__(self, at: int = 0, action: object = None) -> None:
        self.events: list[ProgressEvent] = []
        self._at, self._action = at, action

    def candidate_measured(self, event: ProgressEvent) -> None:
        self.events.append(event)
        if len(self.events) == self._at and callable(self._action):
            self._action()


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def test_tune_records_every_candidate_and_leaves_no_process(place: Place, database: TuningDatabase) -> None:
    watcher = Watcher()
    task = matmul_task(32, 64, 32)
    job = database.start_job(model="tiny", model_sha256="0" * 64, target=place.key)
    summary = tune(
        [task],
        target=place.target,
        database=database,
        environment=place.environment,
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
        workload_hash=task.workload_hash, signature_key=None, target=place.key, environment=place.environment
    )
    assert best is not None
    assert best.latency_us == result.after_us
    assert best.route is result.route
    assert result.after_us <= result.before_us
    assert all(len(r.latencies_us) <= 3 and r.seed == 3 and r.environment == place.environment for r in records)
    assert database.list_job_tasks(job.id)[0].seconds > 0
    assert json.loads(to_json(summary))["tasks"][0]["onnx_nodes"] == ["matmul_node"]
    assert children() == []


def test_tune_measures_nothing_again_when_enough_is_known(place: Place, database: TuningDatabase) -> None:
    def run(**changes: object) -> object:
        return tune(
            [matmul_task()],
            target=place.target,
            database=database,
            environment=place.environment,
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


def test_tune_goes_on_when_kernels_crash_hang_or_do_not_build(place: Place, database: TuningDatabase) -> None:
    tasks = [
        task_of("crash", extern_mod("raise", 11)),
        task_of("unbuildable", unbuildable_mod()),
        task_of("good", add_one_mod(size=64)),
    ]
    summary = tune(
        tasks,
        target=place.target,
        database=database,
        environment=place.environment,
        options=dataclasses.replace(OPTIONS, trials=9, trials_per_iteration=3),
    )
    by_name = {task.task.name: task for task in summary.tasks}
    assert by_name["good"].valid > 0
    assert by_name["crash"].valid == by_name["unbuildable"].valid == 0
    assert "SIGSEGV" in str(by_name["crash"].last_error)
    statuses = Counter(record.status for record in database.list_records())
    assert statuses[Status.RUN_ERROR] > 0
    assert statuses[Status.OK] > 0
    assert children() == []


def test_tune_records_wrong_results_and_selects_none_of_them(
    place: Place, database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing makes a scheduler err on request: the candidates are exchanged for kernels that add 2 instead of 1.
    honest = TaskSearch.propose

    def wrong(self: TaskSearch) -> list[Candidate]:
        schedule = tvm.s_tir.Schedule(add_one_mod(2.0, size=64))
        return [
            dataclasses.replace(c, measure=ms.MeasureCandidate(schedule, c.measure.args_info)) for c in honest(self)
        ]

    monkeypatch.setattr(search_module.TaskSearch, "propose", wrong)
    monkeypatch.setattr(search_module.TaskSearch, "learn", lambda self, candidates, seconds: None)
    task = task_of("add", add_one_mod(size=64))
    summary = tune(
        [task],
        target=place.target,
        database=database,
        environment=place.environment,
        options=dataclasses.replace(OPTIONS, trials=3),
    )
    (result,) = summary.tasks
    assert result.failures == {Status.WRONG_RESULT: result.failed}
    assert result.failed > 0
    assert result.route is Route.FALLBACK
    best = database.find_best(
        workload_hash=task.workload_hash, signature_key=None, target=place.key, environment=place.environment
    )
    assert best is not None
    assert best.route is Route.FALLBACK
    with pytest.raises(NothingMeasuredError, match=r"wrong_result.*elements are off"):
        require_valid(summary)


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
        options=dataclasses.replace(OPTIONS, trials=1000),
        progress=watcher,
    )
    assert summary.interrupted
    assert 2 <= summary.candidates < 10
    assert database.count_records(RecordFilter(route=Route.METASCHEDULE)) == summary.candidates
    assert children() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_tune_leaves_no_process_when_the_listener_raises(place: Place, database: TuningDatabase) -> None:
    def fail() -> None:
        raise OSError("the screen is gone")

    with pytest.raises(OSError, match="the screen is gone"):
        tune(
            [matmul_task()],
            target=place.target,
            database=database,
            environment=place.environment,
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
            options=dataclasses.replace(OPTIONS, **changes),
        )
