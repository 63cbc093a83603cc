"""All that a database holds as values, one after another, and their way into another database.

Merging is commutative, associative and idempotent: what has a content key is kept once, and where two databases say
different things of one natural key, the same one wins whoever comes first:

- a workload's description (signature, name, FLOPs, bytes): a known family before `unknown`, then the higher content
  key; its IR: any before none, then the higher sha256;
- a job: a finished one before one that is not, then the higher content key; its tasks: more seconds, then more weight;
- an artifact written twice: the earlier time, then the lower location.

Records, validations and benchmarks have no conflicts, since their key covers all of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.records import RecordFilter, TuningRecord, Workload, canonical_json, content_key, normalise
from relaxtune.tuning_db.sql import artifact_rows
from relaxtune.tuning_db.sql.rows import to_job, to_job_task, to_workload, value_columns
from relaxtune.tuning_db.sql.schema import (
    ArtifactRow,
    BenchmarkRow,
    FeatureRow,
    JobRow,
    JobTaskRow,
    RecordRow,
    SignatureRow,
    TargetRow,
    ValidationRow,
    WorkloadRow,
)
from relaxtune.tuning_db.sql.statements import (
    conditions,
    iterate_records,
    select_job_tasks,
    select_jobs,
    select_records,
    select_workloads,
)
from relaxtune.tuning_db.sql.writing import put_job, put_job_tasks, put_keyed, put_records, put_workloads

UNKNOWN_FAMILY = "unknown"
#: Records written by one statement.
BATCH = 5000


@dataclass(frozen=True)
class Signature:
    """A signature by itself: a record keeps the one it was measured under, which its workload may no longer have."""

    family: str
    signature: str

    def __post_init__(self) -> None:
        """Bring the signature to canonical JSON."""
        normalise(self, json="signature")


@dataclass(frozen=True)
class TaskOfJob:
    """A task with the job it belongs to."""

    job_id: str
    task: JobTask


Entry = Signature | Workload | Job | TaskOfJob | TuningRecord | Artifact | Validation | Benchmark


@dataclass(frozen=True)
class Transfer:
    """How many of each kind were read, and how many records were new."""

    workloads: int = 0
    jobs: int = 0
    records: int = 0
    new_records: int = 0
    artifacts: int = 0
    validations: int = 0
    benchmarks: int = 0


def list_entries(session: Session, filters: RecordFilter) -> Iterator[Entry]:
    """Yield what a database holds, in an order that depends on the content alone; what is referred to comes first.

    With a filter: the records it selects and what they refer to, and no outcomes of compiling.
    """
    everything = filters == RecordFilter()
    chosen = select(RecordRow).where(*conditions(filters)).subquery()
    signatures = select(SignatureRow).order_by(SignatureRow.key)
    workloads = select_workloads().order_by(WorkloadRow.workload_hash, WorkloadRow.tvm_version)
    jobs = select_jobs().order_by(JobRow.id)
    tasks = select_job_tasks().order_by(JobTaskRow.job_id, WorkloadRow.workload_hash, WorkloadRow.tvm_version)
    if not everything:
        of_workloads = select(WorkloadRow.signature_id).where(WorkloadRow.id.in_(select(chosen.c.workload_id)))
        signatures = signatures.where(
            SignatureRow.id.in_(select(chosen.c.signature_id)) | SignatureRow.id.in_(of_workloads)
        )
        workloads = workloads.where(WorkloadRow.id.in_(select(chosen.c.workload_id)))
        jobs = jobs.where(JobRow.id.in_(select(chosen.c.job_id)))
        tasks = tasks.where(
            JobTaskRow.job_id.in_(select(chosen.c.job_id)), JobTaskRow.workload_id.in_(select(chosen.c.workload_id))
        )
    yield from (Signature(row.family, row.signature) for row in session.scalars(signatures))
    yield from (to_workload(*row) for row in session.execute(workloads))
    yield from (to_job(*row) for row in session.execute(jobs))
    yield from (TaskOfJob(row.job_id, to_job_task(row, workload)) for row, workload in session.execute(tasks))
    ordered = select_records().where(*conditions(filters)).order_by(RecordRow.created_at, RecordRow.key)
    yield from iterate_records(session, ordered)
    if everything:
        yield from sorted(artifact_rows.list_artifacts(session), key=lambda value: value.key)
        yield from sorted(artifact_rows.list_validations(session), key=lambda value: value.key)
        yield from sorted(artifact_rows.list_benchmarks(session), key=lambda value: value.key)


def merge_entries(session: Session, entries: Iterable[Entry]) -> Transfer:
    """Write entries into a database by the rules above, and count them."""
    before = _count(session)
    counts: Counter[type] = Counter()
    pending: list[TuningRecord] = []
    for entry in entries:
        if isinstance(entry, TuningRecord):
            pending.append(entry)
            if len(pending) >= BATCH:
                put_records(session, pending)
                pending = []
        else:
            _merge(session, entry)
        counts[type(entry)] += 1
    if pending:
        put_records(session, pending)
    return Transfer(
        workloads=counts[Workload],
        jobs=counts[Job],
        records=counts[TuningRecord],
        new_records=_count(session) - before,
        artifacts=counts[Artifact],
        validations=counts[Validation],
        benchmarks=counts[Benchmark],
    )


def _count(session: Session) -> int:
    return session.execute(select(func.count()).select_from(RecordRow)).scalar_one()


def _merge(session: Session, entry: Signature | Workload | Job | TaskOfJob | Artifact | Validation | Benchmark) -> None:
    match entry:
        case Signature():
            key = content_key(json.loads(entry.signature))
            put_keyed(session, SignatureRow, {key: {"key": key, **vars(entry)}})
            known = session.scalars(select(SignatureRow).where(SignatureRow.key == key)).one()
            known.family = min(known.family, entry.family, key=lambda family: (family == UNKNOWN_FAMILY, family))
        case Workload():
            same = (WorkloadRow.workload_hash == entry.workload_hash, WorkloadRow.tvm_version == entry.tvm_version)
            row = session.execute(select_workloads().where(*same)).one_or_none()
            put_workloads(session, [entry if row is None else merge_workloads(to_workload(*row), entry)])
        case Job():
            _merge_job(session, entry)
        case TaskOfJob():
            _merge_task(session, entry)
        case Artifact():
            artifact_rows.put_artifact(session, entry)
            there = session.scalars(select(ArtifactRow).where(ArtifactRow.key == entry.key)).one()
            made = [(one.created_at, one.location, one.job_id or "") for one in (there, entry)]
            there.created_at, there.location, job_id = min(made)
            there.job_id = job_id or None
        case Validation():
            artifact_rows.put_validation(session, entry)
        case Benchmark():
            artifact_rows.put_benchmark(session, entry)
    session.flush()


def merge_workloads(one: Workload, other: Workload) -> Workload:
    """Return what is kept of two descriptions of one workload."""

    def description(value: Workload) -> tuple[bool, str]:
        said = [value.family, value.signature, value.name, value.flops, value.bytes]
        return value.family != UNKNOWN_FAMILY, content_key(said)

    def ir(value: Workload) -> tuple[bool, str]:
        return value.ir_json is not None, hashlib.sha256((value.ir_json or "").encode()).hexdigest()

    return dataclasses.replace(max(one, other, key=description), ir_json=max(one, other, key=ir).ir_json)


def merge_jobs(one: Job, other: Job) -> Job:
    """Return what is kept of two states of one job."""

    def rank(value: Job) -> tuple[bool, str]:
        finished = None if value.finished_at is None else value.finished_at.isoformat()
        code = [] if value.code_version is None else [value.code_version]
        said = [value.model, value.model_sha256, value.target.key, value.options, value.outcome, *code]
        return finished is not None, content_key([*said, value.started_at.isoformat(), finished])

    return max(one, other, key=rank)


def _merge_job(session: Session, entry: Job) -> None:
    row = session.execute(select_jobs().where(JobRow.id == entry.id)).one_or_none()
    if row is None:
        put_job(session, entry)
        return
    kept = merge_jobs(to_job(*row), entry)
    job = row[0]
    for name in ("model", "model_sha256", "options", "started_at", "finished_at", "outcome", "code_version"):
        setattr(job, name, getattr(kept, name))
    job.target_id = put_keyed(session, TargetRow, {kept.target.key: value_columns(kept.target)})[kept.target.key]


def _merge_task(session: Session, entry: TaskOfJob) -> None:
    statement = select_job_tasks().where(
        JobTaskRow.job_id == entry.job_id,
        WorkloadRow.workload_hash == entry.task.workload_hash,
        WorkloadRow.tvm_version == entry.task.tvm_version,
    )
    row = session.execute(statement).one_or_none()
    known = entry.task if row is None else to_job_task(*row)

    def rank(task: JobTask) -> tuple[float, int, str]:
        return task.seconds, task.weight, canonical_json(list(task.onnx_nodes))

    put_job_tasks(session, entry.job_id, [max(known, entry.task, key=rank)])


#: Every table that `list_entries` covers; a test holds it equal to the schema, so that none is forgotten in an archive.
COVERED_TABLES = frozenset(
    table.__tablename__
    for table in (SignatureRow, WorkloadRow, JobRow, JobTaskRow, RecordRow, ArtifactRow, ValidationRow, BenchmarkRow)
) | {"targets", "environments"}
#: Left out: computed again from the others.
DERIVED_TABLES = frozenset({FeatureRow.__tablename__})
