"""Measurements of tasks before and after: like with like, and no verdict (`pipeline.gate.history` gives it).

Two filters give the sides: two TVM versions, two spans of time, or anything else. Only measurements of one task,
device, route and TVM version are compared (of both versions where the filters name them). The driver may differ: it
decides nothing in a look-up, and may be the cause of slower kernels. Kernels that were measured on both sides are
compared with themselves. Without such a kernel, the best of both are compared if a search on each side was carried to
its end. An interrupted run does not count.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.records import RecordFilter, Route, Status
from relaxtune.tuning_db.sql.rows import latencies_from_text
from relaxtune.tuning_db.sql.schema import EnvironmentRow, JobRow, RecordRow, SignatureRow, TargetRow, WorkloadRow
from relaxtune.tuning_db.sql.statements import conditions
from relaxtune.tuning_db.store import question

# The outcome of a job that was carried to its end.
DONE = "done"

_Latencies = tuple[float, ...]


@dataclass(frozen=True)
class TaskChange:
    """The latencies of one route for a task on one device, before and after."""

    name: str
    family: str
    signature_key: str
    arch: str
    device_name: str
    route: Route
    # Whether each pair is one kernel that was measured on both sides; else there is one pair, the best of both.
    same_kernels: bool
    # Pairs of raw latencies, those of the fastest kernel first.
    before_us: tuple[_Latencies, ...]
    after_us: tuple[_Latencies, ...]


@dataclass(frozen=True)
class _Measured:
    decision: str
    median_us: float
    latencies_us: _Latencies
    completed: bool


# Signature, target kind, architecture, cores and TVM version, device, route.
_Place = tuple[int, str, str, tuple[object, ...], str, Route]


@question
def changes(session: Session, before: RecordFilter, after: RecordFilter) -> tuple[TaskChange, ...]:
    """Return what was measured both before and after, by task, device, environment and route."""
    across = before.tvm_version != after.tvm_version
    old, new = (_measured(session, filters, across) for filters in (before, after))
    found = []
    for place in sorted(old.keys() & new.keys(), key=repr):
        pairs = _pairs(old[place], new[place])
        if pairs is None:
            continue
        same, ordered = pairs
        signature_id, _, arch, _, device_name, route = place
        key, family, name = _named(session, signature_id)
        before_us, after_us = zip(*ordered, strict=True)
        found.append(TaskChange(name, family, key, arch, device_name, route, same, before_us, after_us))
    return tuple(found)


def _pairs(
    old: dict[str, _Measured], new: dict[str, _Measured]
) -> tuple[bool, list[tuple[_Latencies, _Latencies]]] | None:
    common = sorted(old.keys() & new.keys(), key=lambda decision: old[decision].median_us)
    if common:
        return True, [(old[decision].latencies_us, new[decision].latencies_us) for decision in common]
    sides = [[one for one in side.values() if one.completed] for side in (old, new)]
    if not all(sides):
        return None
    a, b = (min(side, key=lambda one: one.median_us) for side in sides)
    return False, [(a.latencies_us, b.latencies_us)]


def _measured(session: Session, filters: RecordFilter, across: bool) -> dict[_Place, dict[str, _Measured]]:
    """Return the newest valid measurement of each kernel, by where it was taken."""
    statement = (
        select(
            RecordRow.signature_id,
            RecordRow.route,
            RecordRow.decision,
            RecordRow.latency_us,
            RecordRow.latencies,
            RecordRow.job_id,
            TargetRow.kind,
            TargetRow.arch,
            EnvironmentRow.device_name,
            EnvironmentRow.cores,
            EnvironmentRow.tvm_version,
            JobRow.outcome,
        )
        .join(TargetRow, TargetRow.id == RecordRow.target_id)
        .join(EnvironmentRow, EnvironmentRow.id == RecordRow.environment_id)
        .outerjoin(JobRow, JobRow.id == RecordRow.job_id)
        .where(RecordRow.status == Status.OK, *conditions(filters))
        .order_by(RecordRow.created_at, RecordRow.id)
    )
    found: dict[_Place, dict[str, _Measured]] = defaultdict(dict)
    for row in session.execute(statement):
        where = (row.cores, None if across else row.tvm_version)
        place = (row.signature_id, row.kind, row.arch, where, row.device_name, row.route)
        # Records that no job of this database measured are taken as they are.
        completed = row.job_id is None or row.outcome == DONE
        if row.latency_us is not None:
            found[place][row.decision] = _Measured(
                row.decision, row.latency_us, latencies_from_text(row.latencies), completed
            )
    return found


def _named(session: Session, signature_id: int) -> tuple[str, str, str]:
    """Return key, family and name of a task."""
    statement = (
        select(SignatureRow.key, SignatureRow.family, WorkloadRow.name)
        .outerjoin(WorkloadRow, WorkloadRow.signature_id == SignatureRow.id)
        .where(SignatureRow.id == signature_id)
        .order_by(WorkloadRow.id.desc())
        .limit(1)
    )
    # A record keeps the signature of its time, which no workload may have any more.
    key, family, name = session.execute(statement).one()
    return key, family, name or ""
