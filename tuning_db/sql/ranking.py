"""The best records for a question: the rules of `tuning_db.lookup`, carried out by SQL.

A lookup is two short statements: how many targets and environments there are (they are read again only when there are
more), and the best records, found by an index that holds all that decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sqlalchemy import Connection, Integer, Select, bindparam, func, select, union_all
from sqlalchemy.orm import Session

from relaxtune.tuning_db.lookup import (
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
from relaxtune.tuning_db.records import Environment, Route, Status, TargetKey, TuningRecord
from relaxtune.tuning_db.sql.schema import BY_SIGNATURE, EnvironmentRow, RecordRow, SignatureRow, TargetRow, WorkloadRow
from relaxtune.tuning_db.sql.statements import Places, RecordSelect, read_places, read_records, select_records

_PLACES = select(
    select(func.count()).select_from(TargetRow).scalar_subquery(),
    select(func.count()).select_from(EnvironmentRow).scalar_subquery(),
)


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
        counts = tuple(connection.execute(_PLACES).one())
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
        search = _search(question, rank, routes, places)
        if search is None:
            continue
        statement, parameters = search
        found = read_records(session, statement, places, {**parameters, "k": k - len(best)})
        best += sorted(found, key=lambda record: (record.latency_us, record.id))[: k - len(best)]
        if len(best) == k:
            break
    return best


def _search(
    question: Question, rank: DeviceRank, routes: tuple[Route, ...], places: Places
) -> tuple[RecordSelect, dict[str, object]] | None:
    """Return the statement that finds the best records of one rank, and its parameters; None when there can be none."""
    lower = rank is DeviceRank.LOWER_ARCH
    fits = target_is_lower if lower else target_matches
    targets = [id_ for id_, target in places.targets.items() if fits(question.target, target)]
    if not targets:
        return None
    # Routes that the same environments answer share a part: most often one by workload and one by signature.
    groups: dict[tuple[bool, tuple[int, ...]], list[Route]] = {}
    for route in routes:
        environments = _environments(question.environment, rank, route, places)
        if environments and (not lower or route in PORTABLE_ROUTES):
            groups.setdefault((route in WORKLOAD_ROUTES, environments), []).append(route)
    if not groups:
        return None
    statement = _statement(
        tuple((by_workload, tuple(group)) for (by_workload, _), group in groups.items()),
        portable_only=lower and question.target.kind == "cuda",
    )
    parameters: dict[str, object] = {f"environments{n}": ids for n, (_, ids) in enumerate(groups)}
    parameters |= {"targets": targets, "tvm_version": question.environment.tvm_version}
    parameters |= {"workload_hash": question.workload_hash, "signature_key": question.signature_key}
    return statement, parameters


def _environments(wanted: Environment, rank: DeviceRank, route: Route, places: Places) -> tuple[int, ...]:
    return tuple(
        id_
        for id_, found in places.environments.items()
        if (rank is DeviceRank.LOWER_ARCH or device_rank(wanted, found) is rank)
        and versions_match(wanted, found, route)
    )


@cache
def _statement(groups: tuple[tuple[bool, tuple[Route, ...]], ...], *, portable_only: bool) -> RecordSelect:
    """Return the statement for groups of routes, each found by workload or else by signature.

    Made once for each form of question: putting it together takes as long as the database takes to answer it.
    """
    parts = []
    for number, (by_workload, group) in enumerate(groups):
        part = select(RecordRow.id).where(
            RecordRow.status == Status.OK,
            RecordRow.target_id.in_(bindparam("targets", expanding=True)),
            RecordRow.route.in_(group),
            RecordRow.environment_id.in_(bindparam(f"environments{number}", expanding=True)),
        )
        part = _by_workload(part) if by_workload else _by_signature(part)
        if portable_only:
            part = part.where(RecordRow.smem_bytes <= PORTABLE_SMEM_BYTES)
        best = part.order_by(RecordRow.latency_us, RecordRow.id).limit(bindparam("k", type_=Integer()))
        parts.append(select(best.subquery().c.id))
    ids = union_all(*parts).subquery()
    return select_records().join(ids, ids.c.id == RecordRow.id)


def _by_workload(statement: Select[int]) -> Select[int]:
    # A hash belongs to one TVM version, so both name the workload.
    workload = (
        select(WorkloadRow.id)
        .where(
            WorkloadRow.workload_hash == bindparam("workload_hash"),
            WorkloadRow.tvm_version == bindparam("tvm_version"),
        )
        .scalar_subquery()
    )
    return statement.where(RecordRow.workload_id == workload)


def _by_signature(statement: Select[int]) -> Select[int]:
    signature = select(SignatureRow.id).where(SignatureRow.key == bindparam("signature_key")).scalar_subquery()
    # In these words, or the index of signatures is not used.
    return statement.where(RecordRow.signature_id == signature, BY_SIGNATURE)
