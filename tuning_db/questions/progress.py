"""Questions of someone who watches: how far jobs are, what they found so far, and how many records there are.

Each reads what an index holds, so that a page asks it every few seconds of a database of a million records.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.records import Status
from relaxtune.tuning_db.sql.schema import EnvironmentRow, JobRow, JobTaskRow, RecordRow, SignatureRow, WorkloadRow
from relaxtune.tuning_db.sql.statements import read_places
from relaxtune.tuning_db.store import TuningDatabase, question


@dataclass(frozen=True)
class TaskProgress:
    """A job's measurements of one task."""

    name: str
    family: str
    workload_hash: str
    weight: int  # Calls in the model.
    seconds: float  # Of its search.
    valid: int  # Candidates that were right, and those that were not.
    failed: int
    best_us: float | None  # Of a call; None where nothing valid was measured.
    signature: str
    flops: float  # Of one call, as its bytes.
    bytes: float


@dataclass(frozen=True)
class JobProgress:
    """How a job came on."""

    tasks: tuple[TaskProgress, ...]  # The largest share of the model's time first; tasks without a time are last.
    # (seconds since the job began, microseconds of all calls of the tasks with a time, each by its best kernel then).
    # It begins when the last of these tasks got its first time.
    curve: tuple[tuple[float, float], ...]
    by_status: Mapping[Status, int]  # Status -> candidates.
    candidate_s: float  # Seconds of building and measuring all candidates, which may overlap.
    devices: tuple[str, ...] = ()  # Names of the devices that measured.


@dataclass(frozen=True)
class JobCandidates:
    """How many tasks and candidates a job has, how many of them are valid, and the seconds that all took."""

    tasks: int
    candidates: int
    valid: int
    candidate_s: float


@dataclass(frozen=True)
class ModelCoverage:
    """Tasks of a model, and how many of them have a valid record on each device: (device, architecture) -> tasks."""

    model: str
    tasks: int
    covered: Mapping[tuple[str, str], int]


def count_by_status(database: TuningDatabase) -> Mapping[Status, int]:
    """Return how many records there are of each status; statuses without records are left out."""
    statement = select(RecordRow.status, func.count()).group_by(RecordRow.status)
    return database.read(lambda session: {status: count for status, count in session.execute(statement)}, single=True)


@question
def job_progress(session: Session, job_id: str) -> JobProgress:
    """Return what a job measured so far; of an unknown job, nothing."""
    tasks = session.execute(
        select(
            *(JobTaskRow.workload_id, JobTaskRow.weight, JobTaskRow.seconds, WorkloadRow.name),
            *(WorkloadRow.workload_hash, WorkloadRow.flops, WorkloadRow.bytes),
            *(SignatureRow.family, SignatureRow.signature),
        )
        .join(WorkloadRow, WorkloadRow.id == JobTaskRow.workload_id)
        .join(SignatureRow, SignatureRow.id == WorkloadRow.signature_id)
        .where(JobTaskRow.job_id == job_id)
    ).all()
    began = session.execute(select(JobRow.started_at).where(JobRow.id == job_id)).scalar_one_or_none()
    counted = (
        select(
            RecordRow.workload_id,
            RecordRow.environment_id,
            RecordRow.status,
            func.count(),
            func.sum(RecordRow.duration_s),
        )
        .where(RecordRow.job_id == job_id)
        .group_by(RecordRow.workload_id, RecordRow.environment_id, RecordRow.status)
    )
    counts: dict[int, Counter[Status]] = defaultdict(Counter)
    candidate_s = 0.0
    environments = set()
    for workload_id, environment_id, status, count, duration_s in session.execute(counted):
        environments.add(environment_id)
        counts[workload_id][status] += count
        candidate_s += duration_s or 0.0
    weights = {row.workload_id: row.weight for row in tasks}
    best: dict[int, float] = {}
    curve: list[tuple[float, float]] = []
    improvements = session.execute(_improvements(job_id)).all()
    timed = len({row.workload_id for row in improvements} & weights.keys())
    for row in improvements:
        best[row.workload_id] = row.latency_us
        known = best.keys() & weights.keys()
        if len(known) == timed and began is not None:
            total = sum(weights[task] * best[task] for task in known)
            curve.append(((row.created_at - began).total_seconds(), total))
    found = []
    for task_row in tasks:
        facts = dict(task_row._mapping)
        task = facts.pop("workload_id")
        valid = counts[task][Status.OK]
        found.append(TaskProgress(valid=valid, failed=counts[task].total() - valid, best_us=best.get(task), **facts))
    by_status: Counter[Status] = Counter()
    for of_task in counts.values():
        by_status += of_task
    slowest = sorted(found, key=lambda task: -1.0 if task.best_us is None else task.weight * task.best_us, reverse=True)
    names = select(EnvironmentRow.device_name).where(EnvironmentRow.id.in_(environments)).distinct()
    devices = tuple(session.scalars(names.order_by(EnvironmentRow.device_name)))
    return JobProgress(tuple(slowest), tuple(curve), by_status, candidate_s, devices)


@question
def candidates_of_jobs(session: Session, job_ids: Sequence[str]) -> Mapping[str, JobCandidates]:
    """Return what jobs are made of."""
    counted = (
        select(RecordRow.job_id, RecordRow.status, func.count(), func.sum(RecordRow.duration_s))
        .where(RecordRow.job_id.in_(job_ids))
        .group_by(RecordRow.job_id, RecordRow.status)
    )
    of_job: dict[str, list[tuple[Status, int, float]]] = defaultdict(list)
    for job_id, status, count, duration_s in session.execute(counted):
        of_job[str(job_id)].append((status, count, duration_s or 0.0))
    numbers = select(JobTaskRow.job_id, func.count()).where(JobTaskRow.job_id.in_(job_ids)).group_by(JobTaskRow.job_id)
    tasks = {job_id: count for job_id, count in session.execute(numbers)}
    return {
        job_id: JobCandidates(
            tasks=tasks.get(job_id, 0),
            candidates=sum(count for _, count, _ in of_job[job_id]),
            valid=sum(count for status, count, _ in of_job[job_id] if status is Status.OK),
            candidate_s=sum(seconds for *_, seconds in of_job[job_id]),
        )
        for job_id in job_ids
    }


@question
def covered_tasks(session: Session) -> tuple[ModelCoverage, ...]:
    """Return how many tasks of each model have a valid record, of any job, on each device; models by name."""
    tasks: dict[str, set[int]] = defaultdict(set)
    of_models = select(JobRow.model, JobTaskRow.workload_id).join(JobRow, JobRow.id == JobTaskRow.job_id).distinct()
    for model, workload_id in session.execute(of_models):
        tasks[model].add(workload_id)
    measured = (
        select(RecordRow.workload_id, RecordRow.target_id, RecordRow.environment_id)
        .where(RecordRow.status == Status.OK)
        .distinct()
    )
    places = read_places(session.connection())
    at: dict[tuple[str, str], set[int]] = defaultdict(set)
    for workload_id, target_id, environment_id in session.execute(measured):
        at[places.environments[environment_id].device_name, places.targets[target_id].arch].add(workload_id)
    return tuple(
        ModelCoverage(model, len(own), {place: len(own & there) for place, there in at.items() if own & there})
        for model, own in sorted(tasks.items())
    )


def _improvements(job_id: str) -> Select[int, float, datetime]:
    """Return the statement that selects the records of a job that were the best of their task when they were made."""
    before = func.min(RecordRow.latency_us).over(
        partition_by=RecordRow.workload_id, order_by=(RecordRow.created_at, RecordRow.id), rows=(None, -1)
    )
    seen = (
        select(RecordRow.id, RecordRow.workload_id, RecordRow.latency_us, RecordRow.created_at, before.label("before"))
        .where(RecordRow.job_id == job_id, RecordRow.latency_us.is_not(None))
        .subquery()
    )
    return (
        select(seen.c.workload_id, seen.c.latency_us, seen.c.created_at)
        .where(or_(seen.c.before.is_(None), seen.c.latency_us < seen.c.before))
        .order_by(seen.c.created_at, seen.c.id)
    )
