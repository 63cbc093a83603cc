from __future__ import annotations

from dataclasses import replace

import pytest

from relaxtune.pipeline.tuning.candidates import Candidate, State
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.record import Recorder
from relaxtune.tuning_db.errors import DatabaseLostError
from relaxtune.tuning_db.records import Route, Status
from tests.pipeline.tuning.tuning_cases import matmul_task


def measured(outcome):
    return Candidate(Route.FALLBACK, "{}", state=State.MEASURED, outcome=outcome)


def test_writes_lie_further_apart_where_they_take_longer(place, database, monkeypatch):
    task = matmul_task(16, 16, 16)
    recorder = Recorder(database, place.key, place.environment, job_id=None, seed=0, seconds={"database": 0.0})
    recorder.start([task])
    for took, interval in ((0.0, 1.0), (0.01, 2.0), (1.0, 10.0)):
        clock = iter((0.0, took))
        recorder.add(task, measured(Outcome(Status.OK, (1e-6 + took,))))
        with monkeypatch.context() as patched:
            patched.setattr("relaxtune.pipeline.tuning.record.time.monotonic", lambda clock=clock: next(clock))
            recorder.flush()
        assert recorder.flush_interval_s == pytest.approx(interval)
    assert database.count_records() == 3


def test_known_records_of_all_tasks_are_read_at_once(place, database, monkeypatch):
    tasks = [matmul_task(16, 16, size) for size in (16, 32, 48)]
    first = Recorder(database, place.key, place.environment, job_id=None, seed=0, seconds={"database": 0.0})
    first.start(tasks)
    for task in tasks[:2]:
        first.add(task, measured(Outcome(Status.OK, (1e-6,))))
    first.flush()
    asked = []
    list_known = database.list_known
    monkeypatch.setattr(database, "list_known", lambda *given, **more: asked.append(more) or list_known(*given, **more))
    second = Recorder(database, place.key, place.environment, job_id=None, seed=0, seconds={"database": 0.0})
    second.start(tasks)
    assert [len(second.known(task)) for task in tasks] == [1, 1, 0]
    assert len(asked) == 1


def test_measurements_wait_for_a_server_that_is_away_and_are_written_in_the_end(place, database, monkeypatch):
    task = matmul_task(16, 16, 16)
    recorder = Recorder(database, place.key, place.environment, job_id=None, seed=0, seconds={"database": 0.0})
    recorder.start([task])
    recorder.add(task, measured(Outcome(Status.OK, (1e-6,))))
    monkeypatch.setattr("relaxtune.pipeline.tuning.record.time.sleep", lambda seconds: None)
    tries = []
    record_measurements = database.record_measurements

    def away_four_times(records):
        tries.append(len(records))
        if len(tries) <= 4:
            raise DatabaseLostError("away")
        return record_measurements(records)

    monkeypatch.setattr(database, "record_measurements", away_four_times)
    waits = []
    for _ in range(2):
        recorder.try_flush()
        waits.append(recorder.flush_interval_s)
    assert waits[0] < waits[1]
    recorder.close()
    assert tries == [1] * 5
    assert database.count_records() == 1


def test_a_fault_of_the_machine_leaves_no_record(place, database):
    task = matmul_task(16, 16, 16)
    recorder = Recorder(database, place.key, place.environment, job_id=None, seed=0, seconds={"database": 0.0})
    recorder.start([task])
    lost = replace(measured(Outcome(Unmeasured.LOST, error="the disk is full")), state=State.LOST)
    assert recorder.add(task, lost).state is State.LOST
    failed = replace(measured(Outcome(Status.RUN_ERROR, error="it crashed")), state=State.FAILED, module="module")
    kept = recorder.add(task, failed)
    assert (kept.state, kept.module) == (State.RECORDED, None)
    recorder.flush()
    assert [(one.status, one.error) for one in database.list_records()] == [(Status.RUN_ERROR, "it crashed")]
