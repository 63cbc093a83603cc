"""Forgetting records, in one transaction: those that no look-up needs by rules, and any by its id.

A place is a workload, a target and an environment. Under all rules, the best valid record of each route at each
place stays: pruning never changes what a look-up finds first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, case, delete, func, or_, select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.errors import InvalidRecordError, NotFoundError
from relaxtune.tuning_db.records import RecordFilter, Status, normalise
from relaxtune.tuning_db.sql.schema import RecordRow
from relaxtune.tuning_db.sql.statements import conditions
from relaxtune.tuning_db.store import NO_FILTER, TuningDatabase


@dataclass(frozen=True)
class PruneRules:
    """Rules of pruning; a record goes when one of them says so."""

    before: datetime | None = None  # Records older than this.
    # At each place, all but the `keep` best valid records and the `keep` latest failed ones.
    keep: int | None = None
    dominated: bool = False  # Valid records that a newer one of the same route and place beats.

    def __post_init__(self) -> None:
        """Refuse rules that forget nothing or everything."""
        if self.before is None and self.keep is None and not self.dominated:
            raise InvalidRecordError("Nothing says what to prune: give an age, a count for each task, or dominated.")
        if self.keep is not None and self.keep < 1:
            raise InvalidRecordError(f"Pruning keeps at least one record for each task: got keep={self.keep}.")
        normalise(self, utc="before")


@dataclass(frozen=True)
class Pruned:
    """The numbers of records removed, and left in the whole database."""

    removed: int
    left: int


def prune(
    database: TuningDatabase, rules: PruneRules, filters: RecordFilter = NO_FILTER, *, dry_run: bool = False
) -> Pruned:
    """Forget records, all of them or none; with `dry_run` only count them.

    `filters` says which records may go. Records that it leaves out still count as better or newer ones. The space is
    used again by later records; a SQLite file itself does not shrink.
    """
    transaction = database.read if dry_run else database.write
    return transaction(lambda session: _prune(session, rules, filters, dry_run=dry_run))


def delete_records(database: TuningDatabase, ids: Sequence[int]) -> Pruned:
    """Forget records by their ids, all of them or none, whatever they say.

    Raises `NotFoundError`: the database has no record of one of the ids.
    """

    def work(session: Session) -> Pruned:
        wanted = RecordRow.id.in_(set(ids))
        missing = set(ids) - set(session.scalars(select(RecordRow.id).where(wanted)))
        if missing:
            raise NotFoundError(
                f"There is no record {', '.join(map(str, sorted(missing)))} in {database.url}; nothing was deleted. "
                "List the ids with: relaxtune db query"
            )
        session.execute(delete(RecordRow).where(wanted).execution_options(synchronize_session=False))
        return Pruned(len(set(ids)), session.execute(select(func.count()).select_from(RecordRow)).scalar_one())

    return database.write(work)


def _prune(session: Session, rules: PruneRules, filters: RecordFilter, *, dry_run: bool) -> Pruned:
    valid = RecordRow.status == Status.OK
    place = (RecordRow.workload_id, RecordRow.target_id, RecordRow.environment_id)
    # The latest failure first: (false, latency) for valid ones never mixes with them, being another partition.
    best_first = (RecordRow.latency_us, RecordRow.id)
    latest_first = (RecordRow.created_at.desc(), RecordRow.id.desc())
    ranked = select(
        RecordRow.id,
        RecordRow.created_at,
        RecordRow.latency_us,
        valid.label("valid"),
        func.row_number().over(partition_by=(*place, valid, RecordRow.route), order_by=best_first).label("of_route"),
        func.row_number().over(partition_by=(*place, valid), order_by=best_first).label("best"),
        func.row_number().over(partition_by=(*place, valid), order_by=latest_first).label("latest"),
        func.min(RecordRow.latency_us)
        .over(partition_by=(*place, valid, RecordRow.route), order_by=latest_first, rows=(None, -1))
        .label("newer_us"),
    ).subquery()
    said: list[ColumnElement[bool]] = []
    if rules.before is not None:
        said.append(ranked.c.created_at < rules.before)
    if rules.keep is not None:
        said.append(case((ranked.c.valid, ranked.c.best), else_=ranked.c.latest) > rules.keep)
    if rules.dominated:
        said.append(ranked.c.valid & (ranked.c.newer_us < ranked.c.latency_us))
    going = select(ranked.c.id).where(or_(*said), ~(ranked.c.valid & (ranked.c.of_route == 1)))
    chosen = select(RecordRow.id).where(RecordRow.id.in_(going), *conditions(filters))
    removed = session.execute(select(func.count()).select_from(chosen.subquery())).scalar_one()
    if not dry_run and removed:
        session.execute(delete(RecordRow).where(RecordRow.id.in_(chosen)).execution_options(synchronize_session=False))
    left = session.execute(select(func.count()).select_from(RecordRow)).scalar_one()
    return Pruned(removed, left)
