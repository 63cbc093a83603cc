from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.questions import queries
from relaxtune.tuning_db.records import MODEL_FAMILY, RecordFilter, Route, Status

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def filled(database, samples):
    """Two matmuls and a norm without records; one matmul measured on two devices and failing on one."""
    first, second = samples.workload(1), samples.workload(2)
    norm = samples.workload(3, family="norm", signature='{"family":"norm"}', name="layer_norm")
    for workload in (first, second, norm):
        database.record_workload(workload)
    job = database.start_job(model="bert", model_sha256="0" * 64, target=samples.target())
    database.record_job_tasks(job.id, [JobTask(w.workload_hash, w.tvm_version, 1, ("n",), 0.0) for w in (first, norm)])
    database.record_measurements(
        [
            samples.record(first, latencies_us=(8.0,), created_at=START, job_id=job.id),
            samples.record(first, latencies_us=(5.0,), created_at=START + timedelta(days=1), route=Route.FALLBACK),
            samples.failure(first, created_at=START + timedelta(days=2)),
            samples.record(
                first,
                latencies_us=(1.0,),
                created_at=START + timedelta(days=3),
                target=samples.target("cuda", "sm_90a"),
                environment=samples.gpu(),
            ),
            samples.record(second, latencies_us=(20.0,), created_at=START + timedelta(days=4)),
            samples.failure(second, created_at=START + timedelta(days=5), target=samples.target("llvm", "znver5")),
        ]
    )
    return database


def test_top_has_the_best_of_each_task_and_device_slowest_first(filled):
    rows = [(t.name, t.best.environment.device_name, t.best.latency_us, t.valid, t.failed) for t in queries.top(filled)]
    assert rows == [
        ("matmul2", "EPYC 9654", 20.0, 1, 0),
        ("matmul1", "EPYC 9654", 5.0, 2, 1),
        ("matmul1", "NVIDIA H200", 1.0, 1, 0),
    ]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (RecordFilter(target_kind="cuda"), [1.0]),
        (RecordFilter(model="bert"), [5.0, 1.0]),
        (RecordFilter(route=Route.METASCHEDULE), [20.0, 8.0, 1.0]),
        (RecordFilter(status=Status.BUILD_ERROR, target_kind="llvm"), [20.0, 5.0]),
        (RecordFilter(family="norm"), []),
    ],
)
def test_top_obeys_the_filter(filled, filters, expected):
    assert [task.best.latency_us for task in queries.top(filled, filters)] == expected


def test_top_has_whole_models_only_where_they_are_asked_for(database, samples):
    task, model = samples.workload(1), samples.workload(2, family=MODEL_FAMILY, name="bert")
    for work in (task, model):
        database.record_workload(work)
        database.record_measurement(samples.record(work))
    assert [line.name for line in queries.top(database, limit=1)] == ["matmul1"]
    assert [line.name for line in queries.top(database, RecordFilter(family=MODEL_FAMILY))] == ["bert"]


def test_query_lists_records_newest_first_with_their_model(filled):
    lines = queries.query(filled)
    assert [line.record.id for line in lines] == [6, 5, 4, 3, 2, 1]
    assert (lines[-1].model, lines[-1].name, lines[-1].family) == ("bert", "matmul1", "matmul")
    assert lines[0].model is None
    assert lines[0].record.error == "no such intrinsic"


def test_query_obeys_filter_and_limit(filled):
    failures = RecordFilter(status=Status.BUILD_ERROR)
    assert [line.record.id for line in queries.query(filled, failures)] == [6, 3]
    assert [line.record.id for line in queries.query(filled, failures, limit=1)] == [6]
    window = RecordFilter(since=START + timedelta(days=1), until=START + timedelta(days=3))
    assert [line.record.id for line in queries.query(filled, window)] == [3, 2]


def test_workloads_are_counted_and_listed_also_without_records(filled):
    rows = [(w.name, w.records, w.valid, w.failed, w.best_us) for w in queries.workloads(filled)]
    assert rows == [("matmul1", 4, 3, 1, 1.0), ("matmul2", 2, 1, 1, 20.0), ("layer_norm", 0, 0, 0, None)]
    first, _, norm = queries.workloads(filled)
    assert first.last_at == START + timedelta(days=3)
    assert first.last_at.tzinfo is UTC
    assert norm.last_at is None


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (RecordFilter(family="norm"), [("layer_norm", 0)]),
        (RecordFilter(model="bert"), [("matmul1", 4), ("layer_norm", 0)]),
        (RecordFilter(workload_hash="hash2"), [("matmul2", 2)]),
        (RecordFilter(tvm_version="0.1"), []),
        (RecordFilter(status=Status.BUILD_ERROR), [("matmul1", 1), ("matmul2", 1)]),
        (RecordFilter(target_kind="cuda"), [("matmul1", 1)]),
    ],
)
def test_workloads_obey_the_filter(filled, filters, expected):
    assert [(w.name, w.records) for w in queries.workloads(filled, filters)] == expected


def test_workloads_obey_signature_and_limit(filled, samples):
    key = samples.workload(2).signature_key
    assert [w.signature_key for w in queries.workloads(filled, RecordFilter(signature_key=key))] == [key]
    assert len(queries.workloads(filled, limit=1)) == 1
    assert len(queries.top(filled, limit=1)) == 1
