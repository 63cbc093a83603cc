"""Compiled modules, how they validated and how fast they ran: the answer of `relaxtune db artifacts`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.sql.schema import ArtifactRow, BenchmarkRow, EnvironmentRow, TargetRow, ValidationRow
from relaxtune.tuning_db.store import question

DEFAULT_LIMIT = 50


@dataclass(frozen=True)
class ValidationSummary:
    """The last validation of an artifact; `max_abs` is None when it was not finite."""

    passed: bool
    samples: int
    max_abs: float | None
    device_name: str
    created_at: datetime


@dataclass(frozen=True)
class ArmSummary:
    """One arm of the last benchmark on a device: the artifact itself, or a peer of the same benchmark."""

    arm: str
    device_name: str
    latency_us: float
    created_at: datetime


@dataclass(frozen=True)
class ArtifactSummary:
    """A compiled module; `validation` is None when it was never compared with the reference."""

    key: str
    model: str
    model_sha256: str
    target_kind: str
    arch: str
    job_id: str | None
    location: str
    created_at: datetime
    validations: int
    validation: ValidationSummary | None
    benchmarks: tuple[ArmSummary, ...]


@question
def artifacts(
    session: Session,
    *,
    model: str | None = None,
    job_id: str | None = None,
    key: str | None = None,
    limit: int | None = DEFAULT_LIMIT,
) -> tuple[ArtifactSummary, ...]:
    """Return the compiled modules with how they validated and how fast they ran, the newest first."""
    chosen = (
        select(ArtifactRow, TargetRow)
        .join(TargetRow, TargetRow.id == ArtifactRow.target_id)
        .order_by(ArtifactRow.created_at.desc(), ArtifactRow.id.desc())
        .limit(limit)
    )
    if model is not None:
        chosen = chosen.where(ArtifactRow.model == model)
    if job_id is not None:
        chosen = chosen.where(ArtifactRow.job_id == job_id)
    if key is not None:
        chosen = chosen.where(ArtifactRow.key == key)
    rows = session.execute(chosen).all()
    return tuple(
        ArtifactSummary(
            key=row.key,
            model=row.model,
            model_sha256=row.model_sha256,
            target_kind=target.kind,
            arch=target.arch,
            job_id=row.job_id,
            location=row.location,
            created_at=row.created_at,
            validations=session.scalar(
                select(func.count()).select_from(ValidationRow).where(ValidationRow.artifact_id == row.id)
            )
            or 0,
            validation=_last_validation(session, row.id),
            benchmarks=_last_benchmarks(session, row.id),
        )
        for row, target in rows
    )


def _last_validation(session: Session, artifact_id: int) -> ValidationSummary | None:
    statement = (
        select(ValidationRow, EnvironmentRow.device_name)
        .join(EnvironmentRow, EnvironmentRow.id == ValidationRow.environment_id)
        .where(ValidationRow.artifact_id == artifact_id)
        .order_by(ValidationRow.created_at.desc(), ValidationRow.id.desc())
        .limit(1)
    )
    found = session.execute(statement).one_or_none()
    if found is None:
        return None
    row, device_name = found
    return ValidationSummary(row.passed, row.samples, row.max_abs, device_name, row.created_at)


def _last_benchmarks(session: Session, artifact_id: int) -> tuple[ArmSummary, ...]:
    statement = (
        select(BenchmarkRow.arm, EnvironmentRow.device_name, BenchmarkRow.latency_us, BenchmarkRow.created_at)
        .join(EnvironmentRow, EnvironmentRow.id == BenchmarkRow.environment_id)
        .where(BenchmarkRow.artifact_id == artifact_id, BenchmarkRow.latency_us.is_not(None))
        .order_by(BenchmarkRow.created_at, BenchmarkRow.id)
    )
    runs: dict[str, list[ArmSummary]] = {}
    for arm, device_name, latency_us, created_at in session.execute(statement):
        run = runs.setdefault(device_name, [])
        # Arms of different runs were not timed alternately, so that their latencies must not be compared.
        if run and run[0].created_at != created_at:
            run.clear()
        run.append(ArmSummary(arm, device_name, float(latency_us or 0.0), created_at))
    return tuple(arm for run in runs.values() for arm in run)
