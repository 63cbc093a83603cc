"""Records of fallbacks that an earlier version of the default schedules made are left aside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.pipeline.tuning.plan.recorder import Recorder
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.store import SqlDatabase
from tests.pipeline.artifact.test_compile import elementwise, parallel_trace, record_of, workload_of


@pytest.fixture
def database():
    with SqlDatabase.open("sqlite://") as opened:
        yield opened


@pytest.fixture
def task(tasks):
    return elementwise(tasks)


def keep(database, task, target, *, version, latency_us, route=Route.FALLBACK, decision="{}"):
    environment = replace(detect_environment(target), schedules_version=version)
    record = record_of(
        task, target, environment=environment, route=route, decision=decision, latencies_us=(latency_us,)
    )
    database.record_workload(workload_of(task))
    return database.record_measurement(record)


def test_environment_says_which_schedules_are_there(llvm_target):
    assert detect_environment(llvm_target).schedules_version


def test_stale_fallback_neither_wins_nor_hides_a_true_record(lowered, tasks, task, llvm_target, database):
    environment = detect_environment(llvm_target)
    keep(database, task, llvm_target, version="0123456789abcdef", latency_us=0.001)
    keep(database, task, llvm_target, version=None, latency_us=0.002)

    def chosen():
        choices = select_kernels(lowered, tasks, database=database, target=llvm_target, environment=environment)
        return next(choice for choice in choices if choice.task == task.name)

    assert (chosen().record_id, chosen().note) == (None, "no record")
    true = keep(database, task, llvm_target, version=environment.schedules_version, latency_us=9.0)
    assert (chosen().record_id, chosen().route) == (true, Route.FALLBACK)
    trace = keep(
        database,
        task,
        llvm_target,
        version="0123456789abcdef",
        latency_us=5.0,
        route=Route.METASCHEDULE,
        decision=parallel_trace(task),
    )
    assert (chosen().record_id, chosen().route) == (trace, Route.METASCHEDULE)


def test_tuning_run_does_not_know_a_stale_fallback(task, llvm_target, database):
    environment = detect_environment(llvm_target)
    keep(database, task, llvm_target, version="0123456789abcdef", latency_us=1.0)

    def known():
        recorder = Recorder(
            database, target_key(llvm_target), environment, job_id=None, seed=0, seconds={"database": 0.0}
        )
        recorder.start([task])
        return [record.latency_us for record in recorder.known(task)]

    assert known() == []
    keep(database, task, llvm_target, version=environment.schedules_version, latency_us=2.0)
    assert known() == [2.0]
