"""A record whose latency no device reaches neither wins a look-up nor hides what was measured."""

from __future__ import annotations

import pytest

from relaxtune.pipeline.choose.record_lookup import RecordLookup, without_stale
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.winner import impossible_latency, least_latency_us
from tests.pipeline.artifact.test_compile import keep, matmul, parallel_trace, record_of


def test_an_impossible_latency_is_not_believed_at_look_up(lowered, tasks, llvm_target, caplog) -> None:
    task = matmul(tasks)
    decision = parallel_trace(task)
    environment = detect_environment(llvm_target)
    with TuningDatabase.open("sqlite://") as database:
        wrong = keep(database, task, record_of(task, llvm_target, decision="[[], []]", latencies_us=(0.001,)))
        true = keep(database, task, record_of(task, llvm_target, decision=decision, latencies_us=(3.0,)))
        choices = select_kernels(lowered, tasks, database=database, target=llvm_target, environment=environment)
    assert next(choice for choice in choices if choice.task == task.name).record_id == true
    assert f"relaxtune db delete {wrong}" in caplog.text


def test_a_tuning_run_does_not_know_an_impossible_latency(tasks, llvm_target) -> None:
    task = matmul(tasks)
    record = record_of(task, llvm_target, latencies_us=(0.001,))
    with TuningDatabase.open("sqlite://") as database:
        lookup = RecordLookup(database, llvm_target, detect_environment(llvm_target))
        assert without_stale(lookup, task, [record]) == []


@pytest.mark.parametrize(("kind", "least_us"), [("cpu", 0.002), ("cuda", 0.5)])
def test_least_latency_is_that_of_a_call_for_a_small_kernel(tasks, kind, least_us) -> None:
    task = min(tasks, key=lambda one: one.bytes)
    assert least_latency_us(task.flops, task.bytes, kind) == least_us


def test_failed_records_stay(tasks, llvm_target) -> None:
    failed = record_of(tasks[0], llvm_target, status="run_error", latencies_us=(), error="boom")
    assert impossible_latency(failed, tasks[0].flops, tasks[0].bytes) is None
