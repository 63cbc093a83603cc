"""Writes, as functions inside a transaction that the store owns; none of them commits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TypeVar, cast

from sqlalchemy import String, Table, func, select, tuple_, update
from sqlalchemy.orm import Session

from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.records import TuningRecord, Workload, canonical_json, utc_now
from relaxtune.tuning_db.sql.column_types import UtcDateTime
from relaxtune.tuning_db.sql.engine import insert_new_rows, insert_or_ignore
from relaxtune.tuning_db.sql.rows import record_columns, to_job, value_columns
from relaxtune.tuning_db.sql.schema import (
    EnvironmentRow,
    JobRow,
    JobTaskRow,
    RecordRow,
    SignatureRow,
    TargetRow,
    WorkloadRow,
)
from relaxtune.tuning_db.sql.statements import select_jobs

K = TypeVar("K")
KeyedTable = type[SignatureRow] | type[TargetRow] | type[EnvironmentRow]
#: Bound values of one SELECT; SQLite before 3.32 takes 999.
CHUNK = 500


def chunks(values: Sequence[K]) -> Iterable[Sequence[K]]:
    """Return `values` in parts that fit one statement."""
    return (values[start : start + CHUNK] for start in range(0, len(values), CHUNK))


def ids_by_key(session: Session, table: KeyedTable, keys: Iterable[str]) -> dict[str, int]:
    """Return the ids of the rows that have one of `keys`."""
    found: dict[str, int] = {}
    for part in chunks(list(dict.fromkeys(keys))):
        found.update(session.execute(select(table.key, table.id).where(table.key.in_(part))).all())
    return found


def put_keyed(session: Session, table: KeyedTable, columns: Mapping[str, dict[str, object]]) -> dict[str, int]:
    """Insert the rows whose key is new, and return the ids of all.

    Most rows of a batch are usually known, and an ignored INSERT would still take a number of the sequence.
    """
    ids = ids_by_key(session, table, columns)
    missing = [row for key, row in columns.items() if key not in ids]
    if missing:
        session.execute(insert_or_ignore(session.connection(), table), missing)
        ids.update(ids_by_key(session, table, (str(row["key"]) for row in missing)))
    return ids


def put_workloads(session: Session, workloads: Sequence[Workload]) -> None:
    """Insert workloads, or bring their signatures, names and IRs up to date; of two of one key the later wins."""
    signatures: dict[str, dict[str, object]] = {
        w.signature_key: {"key": w.signature_key, "family": w.family, "signature": w.signature} for w in workloads
    }
    ids = put_keyed(session, SignatureRow, signatures)
    known = _workload_ids(session, {(w.workload_hash, w.tvm_version) for w in workloads})
    new: dict[tuple[str, str], dict[str, object]] = {}
    for workload in workloads:
        key = (workload.workload_hash, workload.tvm_version)
        content: dict[str, object] = {
            "signature_id": ids[workload.signature_key],
            "name": workload.name,
            "flops": workload.flops,
            "bytes": workload.bytes,
        }
        if workload.ir_json is not None:
            content["ir_json"] = workload.ir_json
        if key in known:
            session.execute(update(WorkloadRow).where(WorkloadRow.id == known[key]).values(**content))
        else:
            row = new.setdefault(key, {"workload_hash": key[0], "tvm_version": key[1], "ir_json": None})
            row.update(content, created_at=utc_now())
    if new:
        session.execute(insert_or_ignore(session.connection(), WorkloadRow), list(new.values()))


def put_records(session: Session, records: Sequence[TuningRecord]) -> list[int]:
    """Insert records and what they refer to; return their ids."""
    signatures = ids_by_key(session, SignatureRow, (record.signature_key for record in records))
    workloads = _workload_ids(session, {(r.workload_hash, r.environment.tvm_version) for r in records})
    require_jobs(session, {record.job_id for record in records if record.job_id is not None})
    target_keys = {record.target: record.target.key for record in records}
    environment_keys = {record.environment: record.environment.key for record in records}
    targets = put_keyed(session, TargetRow, {key: value_columns(value) for value, key in target_keys.items()})
    environments = put_keyed(
        session, EnvironmentRow, {key: value_columns(value) for value, key in environment_keys.items()}
    )
    rows: dict[str, dict[str, object]] = {}
    keys = []
    for record in records:
        workload_id = workloads.get((record.workload_hash, record.environment.tvm_version))
        signature_id = signatures.get(record.signature_key)
        if workload_id is None or signature_id is None:
            raise NotFoundError(
                f"A record refers to workload {record.workload_hash} of TVM {record.environment.tvm_version} with "
                f"signature {record.signature_key}, which the database does not have. Call record_workload first."
            )
        place = targets[target_keys[record.target]], environments[environment_keys[record.environment]]
        columns = record_columns(record, workload_id, signature_id, *place)
        key = str(columns["key"])
        keys.append(key)
        rows[key] = columns
    found = _insert_records(session, rows)
    return [found[key] for key in keys]


def _insert_records(session: Session, rows: dict[str, dict[str, object]]) -> dict[str, int]:
    """Insert the rows whose key is new, and return the ids of all.

    Past the ORM: its bookkeeping of a row takes longer than the database does.
    """
    connection = session.connection()
    last = connection.execute(select(func.coalesce(func.max(RecordRow.id), 0))).scalar_one()
    insert_new_rows(connection, cast(Table, RecordRow.__table__), list(rows.values()))
    # A new row has a higher id, whoever else writes: in PostgreSQL other writers' rows may be among them.
    added = connection.execute(select(RecordRow.key, RecordRow.id).where(RecordRow.id > last))
    found = {key: id_ for key, id_ in added if key in rows}
    known = [(row["created_at"], key) for key, row in rows.items() if key not in found]
    for part in chunks(known):
        natural_key = tuple_(RecordRow.created_at, RecordRow.key, types=[UtcDateTime(), String()])
        statement = select(RecordRow.key, RecordRow.id).where(natural_key.in_(part))
        found.update({key: id_ for key, id_ in connection.execute(statement)})
    return found


def _workload_ids(session: Session, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for part in chunks(sorted({workload_hash for workload_hash, _ in wanted})):
        statement = select(WorkloadRow.workload_hash, WorkloadRow.tvm_version, WorkloadRow.id)
        for workload_hash, tvm_version, id_ in session.execute(statement.where(WorkloadRow.workload_hash.in_(part))):
            found[workload_hash, tvm_version] = id_
    return found


def require_jobs(session: Session, wanted: set[str]) -> None:
    """Refuse a job that the database does not have."""
    for part in chunks(sorted(wanted)):
        known = set(session.scalars(select(JobRow.id).where(JobRow.id.in_(part))))
        for job_id in part:
            if job_id not in known:
                raise NotFoundError(f"No job {job_id} in the database. Make it with start_job first.")


def put_job(session: Session, job: Job) -> None:
    """Insert a job; one already known stays as it is."""
    if session.get(JobRow, job.id) is not None:
        return
    targets = put_keyed(session, TargetRow, {job.target.key: value_columns(job.target)})
    columns = {name: value for name, value in vars(job).items() if name != "target"}
    session.add(JobRow(**columns, target_id=targets[job.target.key]))


def finish_job(session: Session, job_id: str, outcome: str, moment: datetime) -> Job:
    """Note the end of a job and return it."""
    require_jobs(session, {job_id})
    row = session.get_one(JobRow, job_id)
    # A clock may be set back while a job runs.
    row.finished_at = max(moment, row.started_at)
    row.outcome = outcome
    session.flush()
    return get_job(session, job_id)


def get_job(session: Session, job_id: str) -> Job:
    """Return a job."""
    require_jobs(session, {job_id})
    return to_job(*session.execute(select_jobs().where(JobRow.id == job_id)).one())


def put_job_tasks(session: Session, job_id: str, tasks: Sequence[JobTask]) -> None:
    """Insert the tasks of a job, or bring them up to date."""
    require_jobs(session, {job_id})
    workloads = _workload_ids(session, {(task.workload_hash, task.tvm_version) for task in tasks})
    known: dict[int, JobTaskRow] = {}
    # Of a batch's job only these: it has thousands of tasks, and more come with every cell.
    for part in chunks(sorted(set(workloads.values()))):
        statement = select(JobTaskRow).where(JobTaskRow.job_id == job_id, JobTaskRow.workload_id.in_(part))
        known |= {row.workload_id: row for row in session.scalars(statement)}
    for task in tasks:
        workload_id = workloads.get((task.workload_hash, task.tvm_version))
        if workload_id is None:
            raise NotFoundError(
                f"Task {task.workload_hash} of TVM {task.tvm_version} of job {job_id} is not a workload of the "
                "database. Call record_workload first."
            )
        row = known.get(workload_id)
        if row is None:
            row = known[workload_id] = JobTaskRow(job_id=job_id, workload_id=workload_id)
            session.add(row)
        row.weight = task.weight
        row.onnx_nodes = canonical_json(list(task.onnx_nodes))
        row.seconds = task.seconds
