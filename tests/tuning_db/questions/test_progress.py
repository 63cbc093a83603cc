"""What a watcher asks of jobs: over SQLite, PostgreSQL and layers."""

from __future__ import annotations

from datetime import timedelta

from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.questions.progress import (
    JobCandidates,
    ModelCoverage,
    candidates_of_jobs,
    count_by_status,
    covered_tasks,
    job_progress,
)
from relaxtune.tuning_db.records import Status
from relaxtune.tuning_db.store import TuningDatabase
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
    assert found.devices == ("EPYC 9654",)
    assert [(task.flops, task.bytes) for task in found.tasks] == [(first.flops, first.bytes)] * 3
    assert candidates_of_jobs(database, [job.id, "none"]) == {
        job.id: JobCandidates(3, 6, 5, 6 * 0.25),
        "none": JobCandidates(0, 0, 0, 0),
    }


def test_an_unknown_job_has_no_progress(database: TuningDatabase) -> None:
    found = job_progress(database, "none")
    assert (found.tasks, found.curve, found.by_status) == ((), (), {})
    assert count_by_status(database) == {}


def test_coverage_counts_tasks_with_a_valid_record_by_model_and_device(
    database: TuningDatabase, samples: Samples
) -> None:
    both, mine, failed = (samples.workload(number) for number in (1, 2, 3))
    for workload in (both, mine, failed):
        database.record_workload(workload)
    for model, tasks in (("bert", (both, mine)), ("vit", (both, failed))):
        job = database.start_job(model=model, model_sha256="0" * 64, target=samples.target())
        database.record_job_tasks(job.id, [JobTask(one.workload_hash, one.tvm_version, 1, (), 0.0) for one in tasks])
    on_gpu = {"environment": samples.gpu(), "target": samples.target("cuda", "sm_90a")}
    database.record_measurements([samples.record(both), samples.record(both, **on_gpu), samples.record(mine)])
    database.record_measurement(samples.failure(failed))
    cpu, gpu = ("EPYC 9654", "znver4"), ("NVIDIA H200", "sm_90a")
    assert covered_tasks(database) == (
        ModelCoverage("bert", 2, {cpu: 2, gpu: 1}),
        ModelCoverage("vit", 2, {cpu: 1, gpu: 1}),
    )
