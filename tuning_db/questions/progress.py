"""Questions of someone who watches: how far jobs are, what they found so far, and how many records there are.

Each reads what an index holds, so that a page asks it every few seconds of a database of a million records.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.contract import TuningDatabase, question
from relaxtune.tuning_db.records import Status
from relaxtune.tuning_db.sql.schema import JobRow, JobTaskRow, RecordRow, SignatureRow, WorkloadRow


@dataclass(frozen=True)
class TaskProgress:
    """What a job measured of one task. `best_us` is of a call, None where nothing valid was measured."""

    name: str
    family: str
    workload_hash: str
    weight: int
    seconds: float
    valid: int
    failed: int
    best_us: float | None


@dataclass(frozen=True)
class JobProgress:
    """How a job came on.

    Attributes
    ----------
    tasks
        What takes most of the model's time first; tasks without a time are last.
    curve
        (seconds since the job began, microseconds of all calls of the tasks with a time, each by its best kernel then).
        It begins when the last of these tasks got its first time.
    by_status
        Status -> candidates.
    candidate_s
        Seconds of building and measuring all candidates, which may overlap.
    """

    tasks: tuple[TaskProgress, ...]
    curve: tuple[tuple[float, float], ...]
    by_status: Mapping[Status, int]
    candidate_s: float


def count_by_status(database: TuningDatabase) -> Mapping[Status, int]:
    """Return how many records there are of each status; statuses without records are left out."""
    statement = select(RecordRow.status, func.count()).group_by(RecordRow.status)
    return database.read(lambda session: {status: count for status, count in session.execute(statement)}, single=True)


@question
def job_progress(session: Session, job_id: str) -> JobProgress:
    """Return what a job measured so far; of an unknown job, nothing."""
    tasks = session.execute(
        select(JobTaskRow, WorkloadRow.name, WorkloadRow.workload_hash, SignatureRow.family)
        .join(WorkloadRow, WorkloadRow.id == JobTaskRow.workload_id)
        .join(SignatureRow, SignatureRow.id == WorkloadRow.signature_id)
        .where(JobTaskRow.job_id == job_id)
    ).all()
    began = session.execute(select(JobRow.started_at).where(JobRow.id == job_id)).scalar_one_or_none()
    counted = (
        select(RecordRow.workload_id, RecordRow.status, func.count(), func.sum(RecordRow.duration_s))
        .where(RecordRow.job_id == job_id)
        .group_by(RecordRow.workload_id, RecordRow.status)
    )
    counts: dict[int, Counter[Status]] = defaultdict(Counter)
    candidate_s = 0.0
    for workload_id, status, count, duration_s in session.execute(counted):
        counts[workload_id][status] += count
        candidate_s += duration_s or 0.0
    weights = {row.JobTaskRow.workload_id: row.JobTaskRow.weight for row in tasks}
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
    found = [
        TaskProgress(
            name=row.name,
            family=row.family,
            workload_hash=row.workload_hash,
            weight=row.JobTaskRow.weight,
            seconds=row.JobTaskRow.seconds,
            valid=counts[row.JobTaskRow.workload_id][Status.OK],
            failed=counts[row.JobTaskRow.workload_id].total() - counts[row.JobTaskRow.workload_id][Status.OK],
            best_us=best.get(row.JobTaskRow.workload_id),
        )
        for row in tasks
    ]
    by_status: Counter[Status] = Counter()
    for of_task in counts.values():
        by_status += of_task
    return JobProgress(tuple(sorted(found, key=_time, reverse=True)), tuple(curve), by_status, candidate_s)


def _improvements(job_id: str) -> Select[tuple[int, float, datetime]]:
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


def _time(task: TaskProgress) -> float:
    return -1.0 if task.best_us is None else task.weight * task.best_us
