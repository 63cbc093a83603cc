"""Questions people ask, answered with frozen values: what `relaxtune db info | top | query | workloads` print."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, case, func, or_, select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.records import MODEL_FAMILY, RecordFilter, Status, TuningRecord
from relaxtune.tuning_db.sql.schema import (
    ArtifactRow,
    EnvironmentRow,
    JobRow,
    JobTaskRow,
    RecordRow,
    SignatureRow,
    TargetRow,
    WorkloadRow,
)
from relaxtune.tuning_db.sql.statements import (
    conditions,
    read_places,
    read_records,
    select_records,
    signature_conditions,
)
from relaxtune.tuning_db.store import NO_FILTER, TuningDatabase, question

DEFAULT_LIMIT = 50
# Conditions of a filter on workloads; all others are on records.
_OF_WORKLOAD = ("family", "model", "workload_hash", "signature_key", "tvm_version", "shape", "dtype")


@dataclass(frozen=True)
class TaskBest:
    """The best valid record of a workload on one device, and how many candidates there were on it."""

    name: str
    family: str
    best: TuningRecord
    valid: int
    failed: int


@dataclass(frozen=True)
class RecordLine:
    """A record with the name and family of its workload, and the model of the job that measured it."""

    name: str
    family: str
    model: str | None
    record: TuningRecord


@dataclass(frozen=True)
class WorkloadSummary:
    """A workload and its records; `best_us` is the lowest median on any device, None without a valid record."""

    workload_hash: str
    tvm_version: str
    name: str
    family: str
    signature: str
    signature_key: str
    flops: float
    bytes: float
    records: int
    valid: int
    best_us: float | None
    last_at: datetime | None

    @property
    def failed(self) -> int:
        """Records that are not valid."""
        return self.records - self.valid


# Tables of the values of a filter; they are small.
_NAMED = {
    "model": (JobRow.model, ArtifactRow.model),
    "family": (SignatureRow.family,),
    "workload": (WorkloadRow.workload_hash,),
    "target": (TargetRow.kind,),
    "arch": (TargetRow.arch,),
    "device": (EnvironmentRow.device_name,),
    "tvm": (EnvironmentRow.tvm_version,),
}


def known_values(database: TuningDatabase, name: str) -> frozenset[str]:
    """Return every value that a filter of this name could select by: `model`, `family`, `arch`, `device`, ..."""
    statements = [select(column).distinct() for column in _NAMED[name]]
    return frozenset(database.read(lambda session: [value for one in statements for value in session.scalars(one)]))


@dataclass
class _Place:
    """The records of one workload on one device; a device is a kind, an architecture and a product name."""

    targets: set[int]
    environments: set[int]
    valid: int = 0
    records: int = 0
    best_us: float | None = None


@question
def top(
    session: Session, filters: RecordFilter = NO_FILTER, *, limit: int | None = DEFAULT_LIMIT
) -> tuple[TaskBest, ...]:
    """Return the best valid record of every task, target and device, the slowest first.

    A filter by status is left out of account, since only valid records can be best. Records of whole models are not of
    tasks: they are listed where the filter names their family, `MODEL_FAMILY`.
    """
    # Group by ids alone, which an index holds, and read only the records that are shown.
    filters = dataclasses.replace(filters, status=None)
    names = read_places(session.connection())
    grouped = (
        select(
            RecordRow.workload_id,
            RecordRow.target_id,
            RecordRow.environment_id,
            RecordRow.status,
            func.count().label("records"),
            func.min(RecordRow.latency_us).label("best_us"),
        )
        .where(*conditions(filters))
        .group_by(RecordRow.workload_id, RecordRow.target_id, RecordRow.environment_id, RecordRow.status)
    )
    places: dict[tuple[int, str, str, str], _Place] = {}
    for row in session.execute(grouped):
        target, environment = names.targets[row.target_id], names.environments[row.environment_id]
        key = (row.workload_id, target.kind, target.arch, environment.device_name)
        place = places.setdefault(key, _Place(set(), set()))
        place.targets.add(row.target_id)
        place.environments.add(row.environment_id)
        place.records += row.records
        if row.status is Status.OK:
            place.valid += row.records
            place.best_us = row.best_us if place.best_us is None else min(place.best_us, row.best_us)
    models = select(WorkloadRow.id).join(SignatureRow).where(SignatureRow.family == MODEL_FAMILY)
    left_out = set() if filters.family == MODEL_FAMILY else set(session.scalars(models))
    found = [
        (place.best_us, key[0], place)
        for key, place in places.items()
        if place.best_us is not None and key[0] not in left_out
    ]
    # Equal latencies in the order of the workloads, so that answers are stable.
    found.sort(key=lambda item: (-item[0], item[1]))
    return tuple(_task_best(session, workload_id, place, filters) for _, workload_id, place in found[:limit])


def _task_best(session: Session, workload_id: int, place: _Place, filters: RecordFilter) -> TaskBest:
    statement = (
        select(RecordRow.id, WorkloadRow.name, SignatureRow.family)
        .join(WorkloadRow, WorkloadRow.id == RecordRow.workload_id)
        .join(SignatureRow, SignatureRow.id == RecordRow.signature_id)
        .where(
            RecordRow.workload_id == workload_id,
            RecordRow.status == Status.OK,
            RecordRow.target_id.in_(place.targets),
            RecordRow.environment_id.in_(place.environments),
            *conditions(filters),
        )
        .order_by(RecordRow.latency_us, RecordRow.id)
        .limit(1)
    )
    row = session.execute(statement).one()
    best = _records_by_id(session, [row.id])[row.id]
    return TaskBest(row.name, row.family, best, place.valid, place.records - place.valid)


@question
def query(
    session: Session, filters: RecordFilter = NO_FILTER, *, limit: int | None = DEFAULT_LIMIT
) -> tuple[RecordLine, ...]:
    """Return the records that a filter selects, the newest first."""
    chosen = (
        select(RecordRow.id, WorkloadRow.name, SignatureRow.family, JobRow.model)
        .join(WorkloadRow, WorkloadRow.id == RecordRow.workload_id)
        .join(SignatureRow, SignatureRow.id == RecordRow.signature_id)
        .outerjoin(JobRow, JobRow.id == RecordRow.job_id)
        .where(*conditions(filters))
        .order_by(RecordRow.created_at.desc(), RecordRow.id.desc())
        .limit(limit)
    )
    rows = session.execute(chosen).all()
    records = _records_by_id(session, [row.id for row in rows])
    return tuple(RecordLine(row.name, row.family, row.model, records[row.id]) for row in rows)


def _records_by_id(session: Session, ids: list[int]) -> dict[int | None, TuningRecord]:
    found: dict[int | None, TuningRecord] = {}
    for start in range(0, len(ids), 500):
        statement = select_records().where(RecordRow.id.in_(ids[start : start + 500]))
        found.update({record.id: record for record in read_records(session, statement)})
    return found


@question
def workloads(
    session: Session, filters: RecordFilter = NO_FILTER, *, limit: int | None = DEFAULT_LIMIT
) -> tuple[WorkloadSummary, ...]:
    """Return the workloads, in the order they were recorded, with their records counted.

    Workloads without a record are listed too, unless the filter asks for something that only a record has (target,
    device, route, status, job, time); then records outside the filter are not counted.
    """
    of_record = dataclasses.replace(filters, **dict.fromkeys(_OF_WORKLOAD))
    valid = RecordRow.status == Status.OK
    counted = (
        select(
            RecordRow.workload_id,
            func.count().label("records"),
            func.sum(case((valid, 1), else_=0)).label("valid"),
            func.min(case((valid, RecordRow.latency_us))).label("best_us"),
            func.max(RecordRow.created_at).label("last_at"),
        )
        .where(*conditions(of_record))
        .group_by(RecordRow.workload_id)
        .subquery()
    )
    statement = (
        select(
            *(WorkloadRow.workload_hash, WorkloadRow.tvm_version, WorkloadRow.name, WorkloadRow.flops),
            *(WorkloadRow.bytes, SignatureRow.family, SignatureRow.signature, SignatureRow.key.label("signature_key")),
            *(func.coalesce(counted.c[name], 0).label(name) for name in ("records", "valid")),
            *(counted.c.best_us, counted.c.last_at),
        )
        .join(SignatureRow, SignatureRow.id == WorkloadRow.signature_id)
        .join(counted, counted.c.workload_id == WorkloadRow.id, isouter=of_record == NO_FILTER)
        .where(*_workload_conditions(filters))
        .order_by(WorkloadRow.id)
        .limit(limit)
    )
    return tuple(WorkloadSummary(**row._mapping) for row in session.execute(statement))


def _workload_conditions(filters: RecordFilter) -> list[ColumnElement[bool]]:
    wanted = signature_conditions(filters)
    if filters.workload_hash is not None:
        wanted.append(WorkloadRow.workload_hash == filters.workload_hash)
    if filters.tvm_version is not None:
        wanted.append(WorkloadRow.tvm_version == filters.tvm_version)
    if filters.model is not None:
        jobs = select(JobRow.id).where(JobRow.model == filters.model)
        tasks = select(JobTaskRow.workload_id).where(JobTaskRow.job_id.in_(jobs))
        measured = select(RecordRow.workload_id).where(RecordRow.job_id.in_(jobs))
        wanted.append(or_(WorkloadRow.id.in_(tasks), WorkloadRow.id.in_(measured)))
    return wanted
