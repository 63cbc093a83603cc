"""A database with something in every table, and what an archive of it says."""

from __future__ import annotations

import gzip
import math
from datetime import UTC, datetime, timedelta

from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.exchange.archive import export_archive
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.records import Route, Status

START = datetime(2026, 1, 1, tzinfo=UTC)


def fill(database, samples, numbers=range(6)):
    """Record what every table can hold; equal numbers give equal content."""
    target = samples.target()
    for number in numbers:
        workload = samples.workload(number % 3)
        database.record_workload(workload)
        database.record_measurements(
            [
                samples.record(workload, seed=number, created_at=START + timedelta(days=number)),
                samples.failure(
                    workload,
                    seed=number,
                    created_at=START + timedelta(days=number, hours=1),
                    status=Status.RUN_ERROR,
                    latencies_us=(math.nan, math.inf, 1.5),
                ),
            ]
        )
    job = Job(f"job{min(numbers)}", "bert", "0" * 64, target, "{}", START, START + timedelta(hours=1), "done")
    with_job = samples.record(samples.workload(min(numbers) % 3), job_id=job.id, created_at=START, route=Route.TEMPLATE)
    artifact = Artifact("bert", "0" * 64, target, '{"kernels":[1]}', f"out{min(numbers)}", job.id, START)
    database.write(lambda session: put_all(session, job, samples.workload(min(numbers) % 3)))
    database.record_measurement(with_job)
    database.record_artifact(artifact)
    database.record_validation(Validation(artifact.key, samples.environment(), False, 1, math.nan, "{}", START))
    database.record_benchmark(Benchmark(artifact.key, samples.environment(), "ort", (3.0,), "{}", START))


def put_all(session, job, workload):
    from relaxtune.tuning_db.sql.writing import put_job, put_job_tasks

    put_job(session, job)
    session.flush()
    put_job_tasks(session, job.id, [JobTask(workload.workload_hash, workload.tvm_version, 3, ("n",), 1.0)])


def export(database, path, *filters):
    with path.open("wb") as file:
        return export_archive(database, file, *filters)


def content(database, path):
    export(database, path)
    return path.read_bytes()


def lines_of(path):
    return gzip.decompress(path.read_bytes()).decode().splitlines()
