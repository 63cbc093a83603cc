"""Artifacts, validations and benchmarks: their way into rows and out of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.records import Environment, TargetKey
from relaxtune.tuning_db.sql.column_types import NumberKind
from relaxtune.tuning_db.sql.engine import insert_or_ignore
from relaxtune.tuning_db.sql.rows import latencies_from_text, latencies_to_text, number_kind, to_value, value_columns
from relaxtune.tuning_db.sql.schema import ArtifactRow, BenchmarkRow, EnvironmentRow, TargetRow, ValidationRow
from relaxtune.tuning_db.sql.writing import put_keyed, require_jobs

_Row = TypeVar("_Row", ValidationRow, BenchmarkRow)


def put_artifact(session: Session, artifact: Artifact) -> None:
    """Insert an artifact; one already known stays as it is."""
    if artifact.job_id is not None:
        require_jobs(session, {artifact.job_id})
    targets = put_keyed(session, TargetRow, {artifact.target.key: value_columns(artifact.target)})
    row = {**value_columns(artifact, "target"), "target_id": targets[artifact.target.key]}
    session.execute(insert_or_ignore(session.connection(), ArtifactRow), [row])


def _place(session: Session, artifact_key: str, environment: Environment) -> dict[str, object]:
    artifact_id = session.scalar(select(ArtifactRow.id).where(ArtifactRow.key == artifact_key))
    if artifact_id is None:
        raise NotFoundError(f"No artifact {artifact_key} in the database. Call record_artifact first.")
    environments = put_keyed(session, EnvironmentRow, {environment.key: value_columns(environment)})
    return {"artifact_id": artifact_id, "environment_id": environments[environment.key]}


def put_validation(session: Session, validation: Validation) -> None:
    """Insert a validation; one already known stays as it is."""
    kind = number_kind(validation.max_abs)
    row = {
        **_place(session, validation.artifact_key, validation.environment),
        **value_columns(validation, "artifact_key", "environment"),
        "max_abs": validation.max_abs if kind is NumberKind.FINITE else None,
        "max_abs_kind": kind,
    }
    session.execute(insert_or_ignore(session.connection(), ValidationRow), [row])


def put_benchmark(session: Session, benchmark: Benchmark) -> None:
    """Insert a benchmark; one already known stays as it is."""
    row = {
        **_place(session, benchmark.artifact_key, benchmark.environment),
        **value_columns(benchmark, "artifact_key", "environment", "latencies_us"),
        "latency_us": benchmark.latency_us,
        "latency_kind": NumberKind.FINITE,
        "latencies": latencies_to_text(benchmark.latencies_us),
    }
    session.execute(insert_or_ignore(session.connection(), BenchmarkRow), [row])


def list_artifacts(session: Session) -> list[Artifact]:
    """Return the artifacts, in the order they were recorded."""
    statement = select(ArtifactRow, TargetRow).join(TargetRow, TargetRow.id == ArtifactRow.target_id)
    rows = session.execute(statement.order_by(ArtifactRow.id))
    return [to_value(Artifact, row, target=to_value(TargetKey, target)) for row, target in rows]


def _placed(session: Session, of: type[_Row]) -> Iterator[tuple[_Row, dict[str, object]]]:
    """Yield the rows, each with its artifact's key and its environment."""
    statement = (
        select(of, ArtifactRow.key, EnvironmentRow)
        .join(ArtifactRow, ArtifactRow.id == of.artifact_id)
        .join(EnvironmentRow, EnvironmentRow.id == of.environment_id)
        .order_by(of.id)
    )
    for row, key, environment in session.execute(statement):
        yield row, {"artifact_key": key, "environment": to_value(Environment, environment)}


def list_validations(session: Session) -> list[Validation]:
    """Return the validations, in the order they were recorded."""
    return [
        to_value(Validation, row, **place, max_abs=float(row.max_abs_kind) if row.max_abs is None else row.max_abs)
        for row, place in _placed(session, ValidationRow)
    ]


def list_benchmarks(session: Session) -> list[Benchmark]:
    """Return the benchmarks, in the order they were recorded."""
    return [
        to_value(Benchmark, row, **place, latencies_us=latencies_from_text(row.latencies))
        for row, place in _placed(session, BenchmarkRow)
    ]
