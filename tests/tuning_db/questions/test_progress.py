"""What a watcher asks of jobs: over SQLite, PostgreSQL and layers."""

from __future__ import annotations

from datetime import timedelta

from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.questions.progress import count_by_status, job_progress
from relaxtune.tuning_db.records import Status
from tests.tuning_db.conftest import Samples


def test_curve_begins_when_all_tasks_have_a_time_and_falls_with_each_improvement(
    database: TuningDatabase, samples: Samples
) -> None:
    first, second, unmeasured = (samples.workload(number) for number in (1, 2, 3))
    for workload in (first, second, unmeasured):
        database.record_workload(workload)
    job = database.start_job(model="bert", model_sha256="0" * 64, target=samples.target())
    weights = {first: 2, second: 1, unmeasured: 5}
    database.record_job_tasks(
        job.id, [JobTask(one.workload_hash, one.tvm_version, count, (), 1.5) for one, count in weights.items()]
    )
    measured = [(1, first, 10.0), (2, first, 8.0), (3, second, 30.0), (4, second, 40.0), (5, first, 6.0)]
    for seconds, workload, us in measured:
        moment = job.started_at + timedelta(seconds=seconds)
        database.record_measurement(samples.record(workload, latencies_us=(us,), job_id=job.id, created_at=moment))
    late = job.started_at + timedelta(seconds=6)
    database.record_measurement(samples.failure(second, job_id=job.id, created_at=late))

    found = job_progress(database, job.id)

    assert found.curve == ((3.0, 2 * 8.0 + 30.0), (5.0, 2 * 6.0 + 30.0))
    told = [(task.name, task.best_us, task.valid, task.failed) for task in found.tasks]
    assert told == [("matmul2", 30.0, 2, 1), ("matmul1", 6.0, 3, 0), ("matmul3", None, 0, 0)]
    assert found.by_status == {Status.OK: 5, Status.BUILD_ERROR: 1}
    assert found.candidate_s == 6 * 0.25
    assert count_by_status(database) == found.by_status


def test_an_unknown_job_has_no_progress(database: TuningDatabase) -> None:
    found = job_progress(database, "none")
    assert (found.tasks, found.curve, found.by_status) == ((), (), {})
    assert count_by_status(database) == {}
