"""The best records for a question: the rules of `tuning_db.lookup`, carried out by SQL.

A lookup is two short statements: how many targets and environments there are (they are read again only when there are
more), and the best records, found by an index that holds all that decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, Select, func, select, union_all
from sqlalchemy.orm import Session

from tuning_db.lookup import (
    PORTABLE_ROUTES,
    PORTABLE_SMEM_BYTES,
    WORKLOAD_ROUTES,
    DeviceRank,
    device_rank,
    routes_to_search,
    target_is_lower,
    target_matches,
    versions_match,
)
from tuning_db.records import Environment, Route, Status, TargetKey, TuningRecord
from tuning_db.schema import BY_SIGNATURE, EnvironmentRow, RecordRow, SignatureRow, TargetRow, WorkloadRow
from tuning_db.selection import Places, read_places, read_records, select_records


@dataclass(frozen=True)
class Question:
    """What a lookup asks: a workload, a signature, or both; where it is to run; and the route, or None for any."""

    workload_hash: str | None
    signature_key: str | None
    target: TargetKey
    environment: Environment
    route: Route | None


class PlaceCache:
    """The targets and environments of a database, read again when there are more of them.

    They are few, never changed and never deleted, so their number says whether they are all known.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._places = Places({}, {})

    def get(self, connection: Connection) -> Places:
        """Return all targets and environments that the transaction sees, by id."""
        targets = select(func.count()).select_from(TargetRow).scalar_subquery()
        environments = select(func.count()).select_from(EnvironmentRow).scalar_subquery()
        counts = tuple(connection.execute(select(targets, environments)).one())
        places = self._places
        if counts != (len(places.targets), len(places.environments)):
            # Assigned whole: another thread sees the old or the new one.
            self._places = places = read_places(connection)
        return places


def top_records(session: Session, question: Question, k: int, cache: PlaceCache) -> list[TuningRecord]:
    """Return up to `k` records, the best first.

    Targets and environments are judged here by the pure rules, and records are then selected by their ids.
    """
    if k < 1:
        return []
    connection = session.connection()
    places = cache.get(connection)
    routes = routes_to_search(
        question.route,
        by_workload=question.workload_hash is not None,
        by_signature=question.signature_key is not None,
    )
    best: list[TuningRecord] = []
    for rank in DeviceRank:
        statements = _statements(question, rank, routes, places, k - len(best))
        if not statements:
            continue
        ids = union_all(*(select(statement.subquery().c.id) for statement in statements)).subquery()
        found = read_records(session, select_records().join(ids, ids.c.id == RecordRow.id), places)
        best += sorted(found, key=lambda record: (record.latency_us, record.id))[: k - len(best)]
        if len(best) == k:
            break
    return best


def _statements(
    question: Question, rank: DeviceRank, routes: tuple[Route, ...], places: Places, k: int
) -> list[Select[int]]:
    """Return the statements that find the best ids of one rank."""
    lower = rank is DeviceRank.LOWER_ARCH
    fits = target_is_lower if lower else target_matches
    targets = [id_ for id_, target in places.targets.items() if fits(question.target, target)]
    if not targets:
        return []
    # Routes that the same environments answer share a statement: most often one by workload and one by signature.
    groups: dict[tuple[bool, tuple[int, ...]], list[Route]] = {}
    for route in routes:
        environments = _environments(question.environment, rank, route, places)
        if environments and (not lower or route in PORTABLE_ROUTES):
            groups.setdefault((route in WORKLOAD_ROUTES, environments), []).append(route)
    statements = []
    for (by_workload, environments), group in groups.items():
        statement = select(RecordRow.id).where(
            RecordRow.status == Status.OK,
            RecordRow.target_id.in_(targets),
            RecordRow.route.in_(group),
            RecordRow.environment_id.in_(environments),
        )
        statement = _by_workload(statement, question) if by_workload else _by_signature(statement, question)
        if lower and question.target.kind == "cuda":
            statement = statement.where(RecordRow.smem_bytes <= PORTABLE_SMEM_BYTES)
        statements.append(statement.order_by(RecordRow.latency_us, RecordRow.id).limit(k))
    return statements


def _environments(wanted: Environment, rank: DeviceRank, route: Route, places: Places) -> tuple[int, ...]:
    return tuple(
        id_
        for id_, found in places.environments.items()
        if (rank is DeviceRank.LOWER_ARCH or device_rank(wanted, found) is rank)
        and versions_match(wanted, found, route)
    )


def _by_workload(statement: Select[int], question: Question) -> Select[int]:
    # A hash belongs to one TVM version, so both name the workload.
    workload = (
        select(WorkloadRow.id)
        .where(
            WorkloadRow.workload_hash == question.workload_hash,
            WorkloadRow.tvm_version == question.environment.tvm_version,
        )
        .scalar_subquery()
    )
    return statement.where(RecordRow.workload_id == workload)


def _by_signature(statement: Select[int], question: Question) -> Select[int]:
    signature = select(SignatureRow.id).where(SignatureRow.key == question.signature_key).scalar_subquery()
    # In these words, or the index of signatures is not used.
    return statement.where(RecordRow.signature_id == signature, BY_SIGNATURE)
