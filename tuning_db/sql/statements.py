"""SELECT statements over records, shared by the store and the queries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, Row, Select, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session, undefer

from relaxtune.tuning_db.records import Environment, RecordFilter, TargetKey, TuningRecord
from relaxtune.tuning_db.sql.column_types import DamagedValueError
from relaxtune.tuning_db.sql.rows import to_record, to_value
from relaxtune.tuning_db.sql.schema import (
    EnvironmentRow,
    JobRow,
    JobTaskRow,
    RecordRow,
    SignatureRow,
    TargetRow,
    WorkloadRow,
)

RecordSelect = Select[Any]
#: Records read at once where there may be a million.
PART = 2000


@dataclass(frozen=True)
class Places:
    """Targets and environments by their ids."""

    targets: dict[int, TargetKey]
    environments: dict[int, Environment]


def read_places(connection: Connection) -> Places:
    """Return all targets and environments."""
    targets = connection.execute(select(TargetRow.__table__))
    environments = connection.execute(select(EnvironmentRow.__table__))
    return Places(
        {row.id: to_value(TargetKey, row) for row in targets},
        {row.id: to_value(Environment, row) for row in environments},
    )


def select_records() -> RecordSelect:
    """Return a SELECT of records, joined with their workloads and signatures."""
    return (
        select(RecordRow.__table__, WorkloadRow.workload_hash, SignatureRow.key.label("signature_key"))
        .join(WorkloadRow, WorkloadRow.id == RecordRow.workload_id)
        .join(SignatureRow, SignatureRow.id == RecordRow.signature_id)
    )


def select_workloads() -> Select[WorkloadRow, SignatureRow]:
    """Return a SELECT of workloads with their IR, each with its signature."""
    joined = select(WorkloadRow, SignatureRow).join(SignatureRow, SignatureRow.id == WorkloadRow.signature_id)
    return joined.options(undefer(WorkloadRow.ir_json))


def select_jobs() -> Select[JobRow, TargetRow]:
    """Return a SELECT of jobs, each with its target."""
    return select(JobRow, TargetRow).join(TargetRow, TargetRow.id == JobRow.target_id)


def select_job_tasks() -> Select[JobTaskRow, WorkloadRow]:
    """Return a SELECT of the tasks of jobs, each with its workload."""
    return select(JobTaskRow, WorkloadRow).join(WorkloadRow, WorkloadRow.id == JobTaskRow.workload_id)


def iterate_records(session: Session, statement: RecordSelect) -> Iterator[TuningRecord]:
    """Yield the values that a `select_records` statement selects, without holding all of them."""
    connection = session.connection()
    places = read_places(connection)
    for part in connection.execute(statement.execution_options(yield_per=PART)).partitions():
        yield from (_to_record(row, places) for row in part)


def read_records(
    session: Session,
    statement: RecordSelect,
    places: Places | None = None,
    parameters: Mapping[str, object] | None = None,
) -> list[TuningRecord]:
    """Return the values that a `select_records` statement selects, read past the ORM."""
    connection = session.connection()
    places = places or read_places(connection)
    return [_to_record(row, places) for row in connection.execute(statement, parameters)]


def _to_record(row: Row[Any], places: Places) -> TuningRecord:
    target, environment = places.targets.get(row.target_id), places.environments.get(row.environment_id)
    if target is None or environment is None:
        raise DamagedValueError("a record refers to a target or an environment that is not there")
    return to_record(cast(RecordRow, row), row.workload_hash, row.signature_key, target, environment)


def workloads_of_model(model: str) -> ColumnElement[bool]:
    """Return the condition that a record's workload was found in `model`, or measured by a job of it."""
    jobs = select(JobRow.id).where(JobRow.model == model)
    found = select(JobTaskRow.workload_id).where(JobTaskRow.job_id.in_(jobs))
    return or_(RecordRow.workload_id.in_(found), RecordRow.job_id.in_(jobs))


# Fields of a filter that are equal to a column; signatures have more (`signature_conditions`).
_COLUMNS: dict[str, InstrumentedAttribute[Any]] = {
    "workload_hash": WorkloadRow.workload_hash,
    "target_kind": TargetRow.kind,
    "arch": TargetRow.arch,
    "device_name": EnvironmentRow.device_name,
    "tvm_version": EnvironmentRow.tvm_version,
    "route": RecordRow.route,
    "status": RecordRow.status,
    "job_id": RecordRow.job_id,
}
_REFERENCES: dict[type[Any], InstrumentedAttribute[int]] = {
    SignatureRow: RecordRow.signature_id,
    WorkloadRow: RecordRow.workload_id,
    TargetRow: RecordRow.target_id,
    EnvironmentRow: RecordRow.environment_id,
}


def conditions(filters: RecordFilter) -> list[ColumnElement[bool]]:
    """Return the conditions of a filter on a statement over `RecordRow`, joined with anything or nothing.

    Rows that a record refers to are selected by their ids, which are few, and not joined to a million rows.
    """
    of_table: dict[Any, list[ColumnElement[bool]]] = {SignatureRow: signature_conditions(filters), RecordRow: []}
    for name, column in _COLUMNS.items():
        value = getattr(filters, name)
        if value is not None:
            of_table.setdefault(column.class_, []).append(column == value)
    wanted = of_table.pop(RecordRow)
    wanted += [_REFERENCES[table].in_(select(table.id).where(*part)) for table, part in of_table.items() if part]
    if filters.since is not None:
        wanted.append(RecordRow.created_at >= filters.since)
    if filters.until is not None:
        wanted.append(RecordRow.created_at < filters.until)
    if filters.model is not None:
        wanted.append(workloads_of_model(filters.model))
    return wanted


def signature_conditions(filters: RecordFilter) -> list[ColumnElement[bool]]:
    """Return the conditions of a filter on `SignatureRow`."""
    wanted: list[ColumnElement[bool]] = []
    if filters.family is not None:
        wanted.append(SignatureRow.family == filters.family)
    if filters.signature_key is not None:
        wanted.append(SignatureRow.key == filters.signature_key)
    # Signatures are canonical JSON, in which an input or output is written [[1,128,768],"float16"].
    if filters.shape is not None:
        sizes = ",".join(map(str, filters.shape))
        wanted.append(SignatureRow.signature.contains(f'[[{sizes}],"', autoescape=True))
    if filters.dtype is not None:
        wanted.append(SignatureRow.signature.contains(f'],"{filters.dtype}"]', autoescape=True))
    return wanted
