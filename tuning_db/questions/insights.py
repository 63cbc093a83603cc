"""Questions over time: history, failures by cause, coverage of a model, cost of a job.

All answers are frozen values, of one consistent state of the database.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.jobs import Job
from relaxtune.tuning_db.records import RecordFilter, Route, Status, utc_now
from relaxtune.tuning_db.sql import writing
from relaxtune.tuning_db.sql.rows import latencies_from_text
from relaxtune.tuning_db.sql.schema import EnvironmentRow, JobRow, JobTaskRow, RecordRow, SignatureRow, WorkloadRow
from relaxtune.tuning_db.sql.statements import conditions, read_places
from relaxtune.tuning_db.store import NO_FILTER, question

CAUSE_LENGTH = 160


@dataclass(frozen=True)
class HistoryPoint:
    """The candidates of a task of one day, relaxtune, TVM version, driver and device.

    `code_version` is the relaxtune that measured, None where it is not known. `so_far_us` is the best up to then on the
    device; `kernel_hash` is of the best kernel of the day, where it is known.
    """

    day: date
    name: str
    tvm_version: str
    device_name: str
    candidates: int
    valid: int
    best_us: float | None
    route: Route | None
    so_far_us: float | None
    driver: str | None
    kernel_hash: str | None
    code_version: str | None


@dataclass(frozen=True)
class FailureCause:
    """Failed candidates of one cause: the last line of the error text, with numbers and addresses as `#`."""

    status: Status
    cause: str
    count: int
    workloads: int
    last_at: datetime
    example_id: int


@dataclass(frozen=True)
class TaskCoverage:
    """A task of a model on one device; without records, `device_name` and all after it are None or 0."""

    name: str
    family: str
    workload_hash: str
    tvm_version: str
    weight: int
    device_name: str | None = None
    arch: str | None = None
    valid: int = 0
    failed: int = 0
    best_us: float | None = None
    last_at: datetime | None = None
    age_days: float | None = None

    @property
    def covered(self) -> bool:
        """Whether a valid record is there."""
        return self.valid > 0


@dataclass(frozen=True)
class JobCost:
    """The cost of a job.

    `wall_s` is from its start to its end, None while it runs or when it was killed. `candidate_s` adds the building and
    measuring of all candidates, which may overlap. `device_s` adds the raw latencies: the least the device was busy.
    """

    job: Job
    tasks: int
    candidates: int
    by_status: tuple[tuple[Status, int], ...]
    wall_s: float | None
    task_s: float
    candidate_s: float
    device_s: float


def failure_cause(error: str | None) -> str:
    """Return the last line of an error text, without what differs from candidate to candidate."""
    lines = [line.strip() for line in (error or "").splitlines() if line.strip()]
    text = lines[-1] if lines else "no reason was recorded"
    return re.sub(r"0x[0-9a-fA-F]+|\d+(\.\d+)?", "#", text)[:CAUSE_LENGTH]


@question
def history(
    session: Session, filters: RecordFilter = NO_FILTER, *, workload_hash: str | None = None
) -> tuple[HistoryPoint, ...]:
    """Return what was measured of the selected tasks, day by day, oldest first."""
    statement = (
        select(
            RecordRow.created_at,
            RecordRow.status,
            RecordRow.route,
            RecordRow.latency_us,
            WorkloadRow.name,
            EnvironmentRow.tvm_version,
            EnvironmentRow.device_name,
            EnvironmentRow.driver,
            RecordRow.kernel_hash,
            RecordRow.code_version,
        )
        .join(WorkloadRow, WorkloadRow.id == RecordRow.workload_id)
        .join(EnvironmentRow, EnvironmentRow.id == RecordRow.environment_id)
        .where(*conditions(filters))
        .order_by(RecordRow.created_at, RecordRow.id)
    )
    if workload_hash is not None:
        statement = statement.where(WorkloadRow.workload_hash == workload_hash)
    groups: dict[tuple[date, str, str, str, str | None, str | None], list[Any]] = defaultdict(list)
    for row in session.execute(statement):
        where = (row.name, row.tvm_version, row.device_name, row.driver, row.code_version)
        groups[row.created_at.date(), *where].append(row)
    points = []
    best_of: dict[tuple[str, str], float] = {}
    for (day, name, tvm_version, device_name, driver, code_version), candidates in groups.items():
        valid = [one for one in candidates if one.status is Status.OK and one.latency_us is not None]
        best = min(valid, key=lambda one: (one.latency_us, one.route), default=None)
        place = (name, device_name)
        if best is not None:
            best_of[place] = min(best.latency_us, best_of.get(place, math.inf))
        points.append(
            HistoryPoint(
                day=day,
                name=name,
                tvm_version=tvm_version,
                device_name=device_name,
                candidates=len(candidates),
                valid=len(valid),
                best_us=None if best is None else best.latency_us,
                route=None if best is None else best.route,
                so_far_us=best_of.get(place),
                driver=driver,
                kernel_hash=None if best is None else best.kernel_hash,
                code_version=code_version,
            )
        )
    return tuple(points)


@question
def failures(
    session: Session, filters: RecordFilter = NO_FILTER, *, limit: int | None = None
) -> tuple[FailureCause, ...]:
    """Return why candidates failed, the most frequent cause first."""
    statement = (
        select(
            RecordRow.status,
            RecordRow.error,
            RecordRow.workload_id,
            func.count().label("failed"),
            func.max(RecordRow.created_at).label("last_at"),
            func.max(RecordRow.id).label("example_id"),
        )
        .where(RecordRow.status.in_([status for status in Status if status is not Status.OK]), *conditions(filters))
        .group_by(RecordRow.status, RecordRow.error, RecordRow.workload_id)
    )
    groups: dict[tuple[Status, str], list[tuple[int, int, datetime, int]]] = defaultdict(list)
    for row in session.execute(statement):
        group = groups[row.status, failure_cause(row.error)]
        group.append((row.failed, row.workload_id, row.last_at, row.example_id))
    found = [
        FailureCause(
            status=status,
            cause=cause,
            count=sum(count for count, *_ in group),
            workloads=len({workload_id for _, workload_id, *_ in group}),
            last_at=max(last_at for _, _, last_at, _ in group),
            example_id=max(example_id for *_, example_id in group),
        )
        for (status, cause), group in groups.items()
    ]
    return tuple(sorted(found, key=lambda cause: (-cause.count, cause.status, cause.cause)))[:limit]


@question
def coverage(
    session: Session, model: str, filters: RecordFilter = NO_FILTER, *, now: datetime | None = None
) -> tuple[TaskCoverage, ...]:
    """Return the tasks that jobs found in a model, each with all its records by device, of any job."""
    moment = now or utc_now()
    # A task may be of several jobs of the model; the last one says how often it runs.
    tasks = (
        select(JobTaskRow.workload_id, JobTaskRow.weight, WorkloadRow, SignatureRow.family)
        .join(JobRow, JobRow.id == JobTaskRow.job_id)
        .join(WorkloadRow, WorkloadRow.id == JobTaskRow.workload_id)
        .join(SignatureRow, SignatureRow.id == WorkloadRow.signature_id)
        .where(JobRow.model == model)
        .order_by(JobRow.started_at, JobTaskRow.id)
    )
    found = {row.workload_id: row for row in session.execute(tasks)}
    counted = (
        select(
            RecordRow.workload_id,
            RecordRow.target_id,
            RecordRow.environment_id,
            RecordRow.status,
            func.count().label("records"),
            func.min(RecordRow.latency_us).label("best_us"),
            func.max(RecordRow.created_at).label("last_at"),
        )
        .where(RecordRow.workload_id.in_(list(found)), *conditions(filters))
        .group_by(RecordRow.workload_id, RecordRow.target_id, RecordRow.environment_id, RecordRow.status)
    )
    places = read_places(session.connection())
    devices: dict[int, dict[tuple[str, str], list[tuple[Status, int, float | None, datetime]]]] = {}
    for row in session.execute(counted):
        place = (places.environments[row.environment_id].device_name, places.targets[row.target_id].arch)
        of_task = devices.setdefault(row.workload_id, defaultdict(list))
        of_task[place].append((row.status, row.records, row.best_us, row.last_at))
    lines = []
    for workload_id, task in found.items():
        workload: WorkloadRow = task.WorkloadRow
        name, hash_, version = workload.name, workload.workload_hash, workload.tvm_version
        if workload_id not in devices:
            lines.append(TaskCoverage(name, task.family, hash_, version, task.weight))
        for (device_name, arch), groups in sorted(devices.get(workload_id, {}).items()):
            last_at = max(moment for *_, moment in groups).astimezone(UTC)
            lines.append(
                TaskCoverage(
                    name=name,
                    family=task.family,
                    workload_hash=hash_,
                    tvm_version=version,
                    weight=task.weight,
                    device_name=device_name,
                    arch=arch,
                    valid=sum(count for status, count, *_ in groups if status is Status.OK),
                    failed=sum(count for status, count, *_ in groups if status is not Status.OK),
                    best_us=min((us for s, _, us, _ in groups if s is Status.OK and us is not None), default=None),
                    last_at=last_at,
                    age_days=(moment - last_at).total_seconds() / 86400,
                )
            )
    return tuple(lines)


@question
def count_candidates(session: Session, job_id: str) -> int:
    """Return how many candidates a job's search tried: defaults left out, and one that was measured again once."""
    tried = select(RecordRow.workload_id, RecordRow.decision).where(
        RecordRow.job_id == job_id, RecordRow.route != Route.FALLBACK
    )
    return session.execute(select(func.count()).select_from(tried.distinct().subquery())).scalar_one()


@question
def job_cost(session: Session, job_id: str) -> JobCost:
    """Return what a job took.

    Raises `NotFoundError`: it is not known.
    """
    job = writing.get_job(session, job_id)
    statuses: Counter[Status] = Counter()
    candidate_s = device_us = 0.0
    statement = select(RecordRow.status, RecordRow.duration_s, RecordRow.latencies).where(RecordRow.job_id == job_id)
    for status, duration_s, latencies in session.execute(statement):
        statuses[status] += 1
        candidate_s += duration_s
        device_us += sum(value for value in latencies_from_text(latencies) if math.isfinite(value))
    tasks = select(func.count(), func.coalesce(func.sum(JobTaskRow.seconds), 0.0)).where(JobTaskRow.job_id == job_id)
    number, task_s = session.execute(tasks).one()
    return JobCost(
        job=job,
        tasks=number,
        candidates=statuses.total(),
        by_status=tuple((status, statuses[status]) for status in Status),
        wall_s=job.wall_s,
        task_s=float(task_s),
        candidate_s=candidate_s,
        device_s=device_us / 1e6,
    )
