"""Records what jobs made in the tuning database: artifacts, how they validated, how fast they ran.

An artifact is known by the hashes of its files, so that validations and benchmarks of a later day, from its directory
alone and by a later version, are noted of the same one.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from relaxtune.pipeline.artifact.entries import KernelEntry
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.records import Environment, TuningRecord, canonical_json, utc_now
from relaxtune.tuning_db.store import TuningDatabase

if TYPE_CHECKING:
    from relaxtune.pipeline.bench.measure import BenchmarkReport
    from relaxtune.pipeline.validate.report import ValidationReport

_US_PER_MS = 1e3


def environment_of(manifest: Manifest) -> Environment:
    """Return what a validation or benchmark of an artifact on this machine is true for."""
    from relaxtune.schedules.targets import resolve_target

    return detect_environment(resolve_target(manifest.target.config))


def artifact_of(manifest: Manifest, directory: Path, job_id: str | None = None) -> Artifact:
    """Return the database's form of an artifact, whether it was validated since or not."""
    from relaxtune.schedules.targets import resolve_target  # TVM, of which a store without new artifacts has no need

    return Artifact(
        model=manifest.model,
        model_sha256=manifest.model_sha256,
        target=target_key(resolve_target(manifest.target.config)),
        manifest=replace(manifest, validation=None).to_json(),
        location=str(directory.absolute()),
        job_id=job_id,
    )


def record_of(database: TuningDatabase, kernel: KernelEntry) -> TuningRecord | None:
    """Return the record that a manifest names for a kernel; None where the database has none of its decision there."""
    try:
        record = database.get_record(kernel.record_id or 0)
    except NotFoundError:
        return None
    same = kernel.decision_sha256 in (None, hashlib.sha256(record.decision.encode()).hexdigest())
    return record if same and record.route.value == kernel.route else None


def note_validation(
    database: TuningDatabase, artifact: Artifact, environment: Environment, report: ValidationReport
) -> None:
    """Keep a validation, with the worst absolute error over all outputs, and its artifact if it is not known yet."""
    errors = [output.worst("max_abs") for output in report.outputs]
    database.record_artifact(artifact)
    database.record_validation(
        Validation(
            artifact_key=artifact.key,
            environment=environment,
            passed=report.passed,
            samples=report.samples,
            max_abs=max((error for error in errors if error is not None), default=0.0),
            report=canonical_json(report.to_json()),
        )
    )


def note_benchmark(
    database: TuningDatabase, artifact: Artifact, environment: Environment, report: BenchmarkReport
) -> None:
    """Keep the raw latencies of every arm of a benchmark, and its artifact if it is not known yet.

    The arms have one time, which says that they took turns in one run.
    """
    moment = utc_now()
    conditions = canonical_json({**report.conditions, "runs": report.runs, "warmup": report.warmup})
    database.record_artifact(artifact)
    for arm in report.arms:
        latencies_us = tuple(value * _US_PER_MS for value in arm.latencies_ms)
        database.record_benchmark(Benchmark(artifact.key, environment, arm.name, latencies_us, conditions, moment))
