"""Records of fallbacks hold as long as the default schedules make the kernel that was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relaxtune.pipeline.choose.record_lookup import RecordLookup, without_stale
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment
from relaxtune.schedules import fallback
from relaxtune.schedules.cpu.generic import plain
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.artifact.test_compile import elementwise, fallback_record, keep, parallel_trace, record_of

ANOTHER = "0" * 16


@pytest.fixture
def database():
    with TuningDatabase.open("sqlite://") as opened:
        yield opened


@pytest.fixture
def task(tasks):
    return elementwise(tasks)


def test_stale_fallback_neither_wins_nor_hides_a_true_record(lowered, tasks, task, llvm_target, database):
    environment = detect_environment(llvm_target)
    keep(database, task, fallback_record(task, llvm_target, latencies_us=(0.1,), kernel_hash=ANOTHER))
    keep(database, task, fallback_record(task, llvm_target, latencies_us=(0.2,), kernel_hash=None))

    def chosen():
        choices = select_kernels(lowered, tasks, database=database, target=llvm_target, environment=environment)
        return next(choice for choice in choices if choice.task == task.name)

    assert (chosen().record_id, chosen().note) == (None, "no record")
    true = keep(database, task, fallback_record(task, llvm_target, latencies_us=(9.0,)))
    # Measured later, of other code: no newer measurement of this kernel.
    keep(database, task, fallback_record(task, llvm_target, latencies_us=(1.0,), kernel_hash=ANOTHER))
    assert (chosen().record_id, chosen().route) == (true, Route.FALLBACK)
    decision = parallel_trace(task)
    trace = keep(database, task, record_of(task, llvm_target, latencies_us=(5.0,), decision=decision))
    assert (chosen().record_id, chosen().route) == (trace, Route.METASCHEDULE)


@pytest.fixture
def lookup(database, llvm_target):
    return RecordLookup(database, llvm_target, detect_environment(llvm_target))


def test_tuning_run_does_not_know_a_stale_fallback(task, llvm_target, lookup):
    stale, true = (
        fallback_record(task, llvm_target, kernel_hash=ANOTHER),
        fallback_record(task, llvm_target, latencies_us=(2.0,)),
    )
    assert without_stale(lookup, task, [stale]) == []
    assert without_stale(lookup, task, [stale, true]) == [true]


def test_fallback_holds_whatever_version_of_the_schedules_was_noted(task, llvm_target, lookup):
    environment = replace(detect_environment(llvm_target), schedules_version="0123456789abcdef")
    record = fallback_record(task, llvm_target, environment=environment)
    assert without_stale(lookup, task, [record]) == [record]


def test_changed_schedule_makes_the_record_of_its_fallback_stale(task, llvm_target, lookup, monkeypatch):
    record = fallback_record(task, llvm_target)
    monkeypatch.setattr(fallback, "elementwise", plain)
    assert without_stale(lookup, task, [record]) == []
