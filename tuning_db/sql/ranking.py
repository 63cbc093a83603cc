"""The best records for a question: the rules of `tuning_db.lookup`, carried out by SQL.

A lookup is two short statements: how many targets and environments there are (they are read again only when there are
more), and the best records, found by an index that holds all that decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from sqlalchemy import Connection, Integer, Select, bindparam, func, select, union_all
from sqlalchemy.orm import Session

from relaxtune.tuning_db.lookup import (
    PORTABLE_ROUTES,
    PORTABLE_SMEM_BYTES,
    WORKLOAD_ROUTES,
    DeviceRank,
    Question,
    device_rank,
    target_is_lower,
    target_matches,
    versions_match,
)
from relaxtune.tuning_db.records import Route, Status, TuningRecord
from relaxtune.tuning_db.sql.schema import BY_SIGNATURE, EnvironmentRow, RecordRow, SignatureRow, TargetRow, WorkloadRow
from relaxtune.tuning_db.sql.statements import Places, RecordSelect, read_places, read_records, select_records
from relaxtune.tuning_db.sql.writing import chunks

_PLACES = select(
    select(func.count()).select_from(TargetRow).scalar_subquery(),
    select(func.count()).select_from(EnvironmentRow).scalar_subquery(),
)


class PlaceCache:
    """The targets and environments of a database, read again when there are more of them.

    They are few, never changed and never deleted, so their number says whether they are all known.
    """

    def __init__(self) -> None:
        self._places = Places({}, {})

    def get(self, connection: Connection) -> Places:
        """Return all targets and environments that the transaction sees, by id."""
        counts = tuple(connection.execute(_PLACES).one())
        places = self._places
        if counts != (len(places.targets), len(places.environments)):
            # Assigned whole: another thread sees the old or the new one.
            self._places = places = read_places(connection)
        return places


def top_records(session: Session, questions: Sequence[Question], k: int, cache: PlaceCache) -> list[list[TuningRecord]]:
    """Return up to `k` records for each question, the best first; questions of one place and form share a statement.

    Targets and environments are judged here by the pure rules, and records are then selected by their ids.
    """
    best: list[list[TuningRecord]] = [[] for _ in questions]
    if k < 1:
        return best
    places = cache.get(session.connection())
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, one in enumerate(questions):
        alike.setdefault((one.target, one.environment, one.routes), []).append(number)
    for numbers in alike.values():
        for rank in DeviceRank:
            search = _search(questions[numbers[0]], rank, places, many=len(numbers) > 1)
            if search is None:
                continue
            statement, parameters = search
            for part in chunks([number for number in numbers if len(best[number]) < k]):
                keys = _keys([questions[number] for number in part])
                by_key: dict[tuple[bool, str | None], list[TuningRecord]] = {}
                for record in read_records(session, statement, places, {**parameters, **keys, "k": k}):
                    by_workload = record.route in WORKLOAD_ROUTES
                    key = record.workload_hash if by_workload else record.signature_key
                    by_key.setdefault((by_workload, key), []).append(record)
                for number in part:
                    one = questions[number]
                    found = [*by_key.get((True, one.workload_hash), ()), *by_key.get((False, one.signature_key), ())]
                    left = k - len(best[number])
                    best[number] += sorted(found, key=lambda record: (record.latency_us, record.id))[:left]
    return best


def failed_records(
    session: Session, question: Question, status: Status | None, cache: PlaceCache
) -> list[TuningRecord]:
    """Return the failed records that are true here, in the order they were written."""
    places = cache.get(session.connection())
    wanted = question.target
    targets = [
        id_ for id_, one in places.targets.items() if target_matches(wanted, one) or target_is_lower(wanted, one)
    ]
    groups = _groups(question, places, question.routes, None)
    if not targets or not groups:
        return []
    statuses = tuple(one for one in Status if one is not Status.OK) if status is None else (status,)
    statement = _failed(_routes_of(groups), statuses)
    return read_records(session, statement, places, {**_parameters(question, targets, groups), **_keys([question])})


# Routes that the same environments answer share a part of the statement: whether they go by workload, environments.
_Groups = dict[tuple[bool, tuple[int, ...]], list[Route]]
_RoutesOfGroups = tuple[tuple[bool, tuple[Route, ...]], ...]


def _groups(question: Question, places: Places, routes: Iterable[Route], rank: DeviceRank | None) -> _Groups:
    """Return routes by the environments whose records they can use; of one rank, or with None of every device."""
    any_device = rank in (None, DeviceRank.LOWER_ARCH)
    groups: _Groups = {}
    for route in routes:
        environments = tuple(
            id_
            for id_, found in places.environments.items()
            if (any_device or device_rank(question.environment, found) is rank)
            and versions_match(question.environment, found, route)
        )
        if environments:
            groups.setdefault((route in WORKLOAD_ROUTES, environments), []).append(route)
    return groups


def _routes_of(groups: _Groups) -> _RoutesOfGroups:
    return tuple((by_workload, tuple(routes)) for (by_workload, _), routes in groups.items())


def _parameters(question: Question, targets: list[int], groups: _Groups) -> dict[str, object]:
    parameters: dict[str, object] = {f"environments{n}": ids for n, (_, ids) in enumerate(groups)}
    return parameters | {"targets": targets, "tvm_version": question.environment.tvm_version}


def _keys(questions: Sequence[Question]) -> dict[str, object]:
    return {
        "workload_hashes": [one.workload_hash for one in questions],
        "signature_keys": [one.signature_key for one in questions],
    }


def _search(
    question: Question, rank: DeviceRank, places: Places, *, many: bool
) -> tuple[RecordSelect, dict[str, object]] | None:
    """Return the statement that finds the best records of one rank, and its parameters; None when there can be none.

    It finds those of `many` questions alike, or of one; their keys are parameters to be added.
    """
    lower = rank is DeviceRank.LOWER_ARCH
    fits = target_is_lower if lower else target_matches
    targets = [id_ for id_, target in places.targets.items() if fits(question.target, target)]
    routes = [route for route in question.routes if not lower or route in PORTABLE_ROUTES]
    groups = _groups(question, places, routes, rank) if targets else {}
    if not groups:
        return None
    statement = _best(_routes_of(groups), portable_only=lower and question.target.kind == "cuda", many=many)
    return statement, _parameters(question, targets, groups)


@cache
def _best(groups: _RoutesOfGroups, *, portable_only: bool, many: bool) -> RecordSelect:
    """Return the statement for groups of routes, each found by workload or else by signature.

    Made once for each form of question: putting it together takes as long as the database takes to answer it.
    """
    parts: list[Select[int]] = []
    order = (RecordRow.latency_us, RecordRow.id)
    wanted = bindparam("k", type_=Integer())
    for number, (by_workload, routes) in enumerate(groups):
        part = _part(number, (Status.OK,), routes, by_workload=by_workload)
        if portable_only:
            part = part.where(RecordRow.smem_bytes <= PORTABLE_SMEM_BYTES)
        if many:
            key = RecordRow.workload_id if by_workload else RecordRow.signature_id
            place = func.row_number().over(partition_by=key, order_by=order).label("place")
            placed = part.add_columns(place).subquery()
            parts.append(select(placed.c.id).where(placed.c.place <= wanted))
        else:
            parts.append(select(part.order_by(*order).limit(wanted).subquery().c.id))
    ids = union_all(*parts).subquery()
    return select_records().join(ids, ids.c.id == RecordRow.id)


@cache
def _failed(groups: _RoutesOfGroups, statuses: tuple[Status, ...]) -> RecordSelect:
    """Return the statement that finds failed records of groups of routes."""
    parts = [
        _part(number, statuses, routes, by_workload=by_workload) for number, (by_workload, routes) in enumerate(groups)
    ]
    ids = union_all(*parts).subquery()
    return select_records().join(ids, ids.c.id == RecordRow.id).order_by(RecordRow.id)


def _part(number: int, statuses: tuple[Status, ...], routes: tuple[Route, ...], *, by_workload: bool) -> Select[int]:
    status = RecordRow.status == statuses[0] if len(statuses) == 1 else RecordRow.status.in_(statuses)
    part = select(RecordRow.id).where(
        status,
        RecordRow.target_id.in_(bindparam("targets", expanding=True)),
        RecordRow.route.in_(routes),
        RecordRow.environment_id.in_(bindparam(f"environments{number}", expanding=True)),
    )
    if by_workload:
        # A hash belongs to one TVM version, so both name the workload.
        workload = select(WorkloadRow.id).where(
            WorkloadRow.workload_hash.in_(bindparam("workload_hashes", expanding=True)),
            WorkloadRow.tvm_version == bindparam("tvm_version"),
        )
        return part.where(RecordRow.workload_id.in_(workload))
    signature = select(SignatureRow.id).where(SignatureRow.key.in_(bindparam("signature_keys", expanding=True)))
    # In these words, or the index of signatures is not used.
    return part.where(RecordRow.signature_id.in_(signature), BY_SIGNATURE)
