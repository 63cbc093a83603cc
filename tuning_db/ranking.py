"""The best records for a question: the rules of `tuning_db.lookup`, carried out by SQL."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from tuning_db.lookup import (
    WORKLOAD_ROUTES,
    DeviceRank,
    device_rank,
    routes_to_search,
    target_matches,
    tvm_version_matches,
)
from tuning_db.records import Environment, Route, Status, TargetKey, TuningRecord
from tuning_db.rows import to_environment, to_target
from tuning_db.schema import EnvironmentRow, RecordRow, SignatureRow, TargetRow, WorkloadRow
from tuning_db.selection import read_records, select_records


@dataclass(frozen=True)
class Question:
    """What a lookup asks: a workload, a signature, or both; where it is to run; and the route, or None for any."""

    workload_hash: str | None
    signature_key: str | None
    target: TargetKey
    environment: Environment
    route: Route | None


def top_records(session: Session, question: Question, k: int) -> list[TuningRecord]:
    """Return up to `k` records, the best first.

    Targets and environments are few: they are judged here by the pure rules, and records are then selected by their
    ids, so that the index gives the best k without reading the rest.
    """
    targets = [row.id for row in session.scalars(select(TargetRow)) if target_matches(question.target, to_target(row))]
    if not targets or k < 1:
        return []
    environments = [(row.id, to_environment(row)) for row in session.scalars(select(EnvironmentRow))]
    routes = routes_to_search(
        question.route,
        by_workload=question.workload_hash is not None,
        by_signature=question.signature_key is not None,
    )
    best: list[TuningRecord] = []
    for rank in DeviceRank:
        found: list[TuningRecord] = []
        for route in routes:
            usable = [
                id_
                for id_, environment in environments
                if device_rank(question.environment, environment) is rank
                and tvm_version_matches(question.environment, environment, route)
            ]
            if usable:
                found += _best_of_route(session, question, route, targets, usable, k - len(best))
        best += sorted(found, key=lambda record: (record.latency_us, record.id))[: k - len(best)]
        if len(best) == k:
            break
    return best


def _best_of_route(
    session: Session, question: Question, route: Route, targets: list[int], environments: list[int], k: int
) -> list[TuningRecord]:
    statement = select_records().where(
        RecordRow.route == route,
        RecordRow.status == Status.OK,
        RecordRow.target_id.in_(targets),
        RecordRow.environment_id.in_(environments),
    )
    if route in WORKLOAD_ROUTES:
        # A hash belongs to one TVM version, so both name the workload.
        workloads = select(WorkloadRow.id).where(
            WorkloadRow.workload_hash == question.workload_hash,
            WorkloadRow.tvm_version == question.environment.tvm_version,
        )
        statement = statement.where(RecordRow.workload_id.in_(workloads))
    else:
        signatures = select(SignatureRow.id).where(SignatureRow.key == question.signature_key)
        statement = statement.where(RecordRow.signature_id.in_(signatures))
    return read_records(session, statement.order_by(RecordRow.latency_us, RecordRow.id).limit(k))
