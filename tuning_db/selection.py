"""SELECT statements over records, shared by the store and the queries."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from tuning_db.records import RecordFilter, TuningRecord
from tuning_db.rows import to_environment, to_record, to_target
from tuning_db.schema import (
    EnvironmentRow,
    JobRow,
    JobTaskRow,
    RecordRow,
    SignatureRow,
    TargetRow,
    WorkloadRow,
)

RecordSelect = Select[RecordRow, str, str, TargetRow, EnvironmentRow]


def select_records() -> RecordSelect:
    """Return a SELECT of records with all they refer to."""
    return (
        select(RecordRow, WorkloadRow.workload_hash, SignatureRow.key, TargetRow, EnvironmentRow)
        .join(WorkloadRow, WorkloadRow.id == RecordRow.workload_id)
        .join(SignatureRow, SignatureRow.id == RecordRow.signature_id)
        .join(TargetRow, TargetRow.id == RecordRow.target_id)
        .join(EnvironmentRow, EnvironmentRow.id == RecordRow.environment_id)
    )


def read_records(session: Session, statement: RecordSelect) -> list[TuningRecord]:
    """Return the values that a `select_records` statement selects."""
    return [
        to_record(row, workload_hash, signature_key, to_target(target), to_environment(environment))
        for row, workload_hash, signature_key, target, environment in session.execute(statement)
    ]


def workloads_of_model(model: str) -> ColumnElement[bool]:
    """Return the condition that a record's workload was found in `model`, or measured by a job of it."""
    jobs = select(JobRow.id).where(JobRow.model == model)
    found = select(JobTaskRow.workload_id).where(JobTaskRow.job_id.in_(jobs))
    return or_(RecordRow.workload_id.in_(found), RecordRow.job_id.in_(jobs))


def conditions(filters: RecordFilter) -> list[ColumnElement[bool]]:
    """Return the conditions of a filter on a statement that joins as `select_records` does."""
    equal: list[tuple[InstrumentedAttribute[Any], object]] = [
        (SignatureRow.family, filters.family),
        (WorkloadRow.workload_hash, filters.workload_hash),
        (SignatureRow.key, filters.signature_key),
        (TargetRow.kind, filters.target_kind),
        (TargetRow.arch, filters.arch),
        (EnvironmentRow.device_name, filters.device_name),
        (EnvironmentRow.tvm_version, filters.tvm_version),
        (RecordRow.route, filters.route),
        (RecordRow.status, filters.status),
        (RecordRow.job_id, filters.job_id),
    ]
    wanted: list[ColumnElement[bool]] = [column == value for column, value in equal if value is not None]
    if filters.since is not None:
        wanted.append(RecordRow.created_at >= filters.since)
    if filters.until is not None:
        wanted.append(RecordRow.created_at < filters.until)
    if filters.model is not None:
        wanted.append(workloads_of_model(filters.model))
    return wanted
