"""Runs of one job after each other: what is done is not done again, what was broken off goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relaxtune.pipeline.jobs.tuned_model import plain_options
from relaxtune.pipeline.tuning import session
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.options import TuningOptions, TuningSummary
from relaxtune.pipeline.tuning.session import require_valid, tune
from relaxtune.tuning_db.records import Mode, RecordFilter, Route
from relaxtune.tuning_db.store import TuningDatabase
from tests import warm_python
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, all_records, matmul_task, task_of

OPTIONS = TuningOptions(
    trials=6,
    trials_per_iteration=4,
    population=16,
    workers=1,
    seed=3,
    finals=0,
    measure=MeasureOptions(repeats=3, contender_repeats=0, min_repeat_s=0.0005),
)
TASKS = [matmul_task(32, 32, 32), task_of("add", add_one_mod(size=64))]


def run(
    place: Place, database: TuningDatabase, outcome: str | None = "done", model: str = "tiny", **changes: object
) -> TuningSummary:
    options = dataclasses.replace(OPTIONS, **changes)
    told = json.dumps(plain_options(options), default=str)
    job = database.start_job(model=model, model_sha256="0" * 64, target=place.key, options=told)
    summary = tune(
        TASKS,
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=options,
        job_id=job.id,
    )
    if outcome is not None:
        database.finish_job(job.id, outcome)
    return summary


@pytest.mark.timing
def test_a_second_run_measures_nothing_and_starts_no_process(
    place: Place, database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(place, database)
    count = database.count_records()
    monkeypatch.setattr(session, "this_machine", None)
    began = time.monotonic()
    again = run(place, database)
    assert time.monotonic() - began < 5
    assert again.candidates == 0
    assert database.count_records() == count
    assert [task.after_us for task in again.tasks] == [task.after_us for task in first.tasks]
    assert all("an earlier run did the same" in str(task.ended) for task in again.tasks)
    require_valid(again)


@pytest.mark.slow
def test_more_is_measured_for_more_trials_by_force_or_for_another_model(place: Place, database: TuningDatabase) -> None:
    run(place, database, trials=2)
    assert run(place, database, trials=3).candidates == 3
    assert run(place, database, trials=2, mode=Mode.FORCE).candidates == 2
    assert run(place, database, model="other", trials=2).candidates > 0


@pytest.mark.slow
def test_a_run_that_was_broken_off_goes_on(place: Place, database: TuningDatabase) -> None:
    assert run(place, database, None, trials=2).candidates == 2
    assert run(place, database, "interrupted", trials=3).candidates == 1
    assert run(place, database, trials=4).candidates == 1
    assert run(place, database, trials=4).candidates == 0
    assert database.count_records(RecordFilter(route=Route.METASCHEDULE)) == 4


KILLED = """
import dataclasses, json, sys
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.pipeline.jobs.tuned_model import plain_options
from relaxtune.pipeline.tuning.record import Recorder
from relaxtune.pipeline.tuning.session import tune
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.tuning.test_resume import OPTIONS, TASKS, all_records
from relaxtune.tuning_db.store import TuningDatabase
target = resolve_target("llvm")
options = dataclasses.replace(OPTIONS, trials=5000)
Recorder.flush_interval_s = 0.3
class Progress:
    def __call__(self, event):
        print(event.done, flush=True)
with TuningDatabase.open(sys.argv[1]) as database:
    job = database.start_job(model="tiny", model_sha256="0" * 64, target=target_key(target),
                             options=json.dumps(plain_options(options), default=str))
    tune(TASKS, target=target, database=database, environment=detect_environment(target), options=options,
         job_id=job.id, progress=Progress(), still_true=all_records)
"""


@pytest.mark.slow
def test_a_killed_run_keeps_what_was_written_and_goes_on(place: Place, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/killed.db"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    with warm_python.Popen(
        [sys.executable, "-c", KILLED, url], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 6:
            pass
        with TuningDatabase.open(url) as database:
            while process.poll() is None and database.count_records(RecordFilter(route=Route.METASCHEDULE)) < 6:
                time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    with TuningDatabase.open(url) as database:
        recorded = database.count_records(RecordFilter(route=Route.METASCHEDULE))
        assert recorded >= 6
        resumed = run(place, database, trials=recorded + 3)
        assert resumed.candidates == 3
        decisions = [record.decision for record in database.list_records(RecordFilter(route=Route.METASCHEDULE))]
        assert len(set(decisions)) == len(decisions)
