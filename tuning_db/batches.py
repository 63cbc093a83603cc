"""Batches in and out of the database; each function is one transaction, and what comes out is a frozen value."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from relaxtune.tuning_db.cell_states import (
    NO_FACTS,
    TRANSITIONS,
    Attempt,
    Batch,
    BatchCell,
    BatchHeldError,
    CellFacts,
    CellSpec,
    CellState,
    Driver,
    TransitionError,
)
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.records import content_key, utc_now
from relaxtune.tuning_db.sql.engine import insert_or_ignore
from relaxtune.tuning_db.sql.rows import to_value
from relaxtune.tuning_db.sql.schema import AttemptRow, BatchRow, CellRow
from relaxtune.tuning_db.sql.writing import require_jobs
from relaxtune.tuning_db.store import TuningDatabase

_FACTS = tuple(field.name for field in fields(CellFacts))
DIED = "its driver died"


def batch_key(name: str, out: Path) -> str:
    """Return the key of a plan: its name and the folder of its artifacts, which two drivers must not write at once."""
    return content_key([name, str(out.absolute())])


def start_batch(
    database: TuningDatabase, *, key: str, name: str, path: str, plan: str, cells: Sequence[CellSpec]
) -> Batch:
    """Keep and return a new batch whose driver is this process; all its cells are queued.

    Raises `BatchHeldError`: another driver works on a batch of this key.
    """
    id_, now = str(uuid.uuid4()), utc_now()
    row = {"id": id_, "key": key, "name": name, "path": path, "plan": plan, "heartbeat_at": now, "started_at": now}
    row |= asdict(Driver.here())

    def work(session: Session) -> Batch:
        for known in session.scalars(select(BatchRow).where(BatchRow.key == key, BatchRow.finished_at.is_(None))):
            if known.id != id_:
                _require_free(_to_batch(known))
                # Its driver died; `resume` opens it again.
                known.finished_at, known.outcome = known.heartbeat_at, DIED
        session.flush()
        session.execute(insert_or_ignore(session.connection(), BatchRow), [row])
        ours = session.scalars(select(BatchRow).where(BatchRow.key == key, BatchRow.finished_at.is_(None))).one()
        if ours.id != id_:
            _require_free(_to_batch(ours), sure=True)
        if session.scalar(select(func.count()).select_from(CellRow).where(CellRow.batch_id == id_)) == 0:
            session.add_all(
                CellRow(batch_id=id_, position=number, state=CellState.QUEUED, updated_at=now, **asdict(cell))
                for number, cell in enumerate(cells)
            )
        return _to_batch(ours)

    return database.write(work)


def take_batch(database: TuningDatabase, batch_id: str) -> Batch:
    """Make this process the driver of a batch that another one left; what was begun is queued again.

    Raises `BatchHeldError`: its driver works on it, or on a newer batch of the same plan.
    """
    driver, now = Driver.here(), utc_now()

    def work(session: Session) -> Batch:
        row = _get_batch(session, batch_id, lock=True)
        others = select(BatchRow).where(BatchRow.key == row.key, BatchRow.finished_at.is_(None))
        for known in session.scalars(others):
            if Driver(known.host, known.pid) != driver:
                _require_free(_to_batch(known))
            if known.id != batch_id:
                known.finished_at, known.outcome = known.heartbeat_at, DIED
        session.flush()
        row.host, row.pid, row.heartbeat_at = driver.host, driver.pid, now
        row.finished_at = row.outcome = None
        begun = [state for state in CellState if state.working]
        for cell in session.scalars(select(CellRow).where(CellRow.batch_id == batch_id, CellRow.state.in_(begun))):
            _close_attempt(session, cell, now, DIED)
            cell.state, cell.updated_at = CellState.QUEUED, now
        session.flush()
        return _to_batch(row)

    return database.write(work)


def beat(database: TuningDatabase, batch_id: str) -> None:
    """Note that this process still works on a batch and on the cells that it began.

    Raises `BatchHeldError`: another driver took the batch, since this one was silent for too long.
    """
    driver, now = Driver.here(), utc_now()

    def work(session: Session) -> None:
        row = _get_batch(session, batch_id, lock=True)
        if Driver(row.host, row.pid) != driver:
            _require_free(_to_batch(row), sure=True)
        row.heartbeat_at = now
        mine = select(CellRow.id).where(CellRow.batch_id == batch_id)
        open_ones = update(AttemptRow).where(AttemptRow.cell_id.in_(mine), AttemptRow.finished_at.is_(None))
        session.execute(open_ones.values(heartbeat_at=now), execution_options={"synchronize_session": False})

    database.write(work)


def move_cell(
    database: TuningDatabase, batch_id: str, name: str, state: CellState, facts: CellFacts = NO_FACTS
) -> None:
    """Let a cell become what comes next, and keep what is known of it; facts that are None stay as they were.

    Raises `TransitionError`: it cannot become that from what it is: for example, it was cancelled meanwhile;
    `NotFoundError`: the batch has no such cell.
    """
    driver, now = Driver.here(), utc_now()

    def work(session: Session) -> None:
        wanted = select(CellRow).where(CellRow.batch_id == batch_id, CellRow.name == name).with_for_update()
        row = session.scalars(wanted).one_or_none()
        if row is None:
            known = session.scalars(select(CellRow.name).where(CellRow.batch_id == batch_id).order_by(CellRow.position))
            raise NotFoundError(f"No cell {name} in batch {batch_id}; it has {', '.join(known) or 'none'}.")
        if row.state is not state and state not in TRANSITIONS[row.state]:
            raise TransitionError(name, row.state, state)
        if state.working and row.state is CellState.QUEUED:
            last = session.scalar(select(func.max(AttemptRow.number)).where(AttemptRow.cell_id == row.id)) or 0
            times = {"started_at": now, "heartbeat_at": now}
            session.add(AttemptRow(cell_id=row.id, number=last + 1, **asdict(driver), **times, state=state))
            for fact in _FACTS:
                setattr(row, fact, None)
            session.flush()
        row.state, row.updated_at = state, now
        if facts.job_id is not None:
            require_jobs(session, {facts.job_id})
        for fact, value in asdict(facts).items():
            if value is not None:
                setattr(row, fact, value)
        if state.over or state is CellState.QUEUED:
            _close_attempt(session, row, now, facts.error)
        else:
            _open_attempts(session, row, {"state": state, "heartbeat_at": now})

    database.write(work)


def cancel_cell(database: TuningDatabase, batch_id: str, name: str) -> None:
    """Cancel a cell that is not over; its driver leaves it at the next opportunity. A cancelled cell stays cancelled.

    Raises `TransitionError`: it is over; `NotFoundError`: the batch has no such cell.
    """
    state = next((one.state for one in list_cells(database, batch_id) if one.spec.name == name), None)
    if state is not CellState.CANCELLED:
        move_cell(database, batch_id, name, CellState.CANCELLED, CellFacts(error="cancelled"))


def finish_batch(database: TuningDatabase, batch_id: str, outcome: str) -> None:
    """Note that a batch ended now, and how."""
    now = utc_now()

    def work(session: Session) -> None:
        row = _get_batch(session, batch_id, lock=True)
        row.finished_at, row.outcome, row.heartbeat_at = now, outcome, now

    database.write(work)


def list_batches(database: TuningDatabase, *, limit: int | None = None) -> list[Batch]:
    """Return the batches, the newest first."""
    statement = select(BatchRow).order_by(BatchRow.started_at.desc(), BatchRow.id).limit(limit)
    return database.read(lambda session: [_to_batch(row) for row in session.scalars(statement)])


def get_batch(database: TuningDatabase, start: str | None = None) -> Batch:
    """Return the newest batch whose id begins with `start`, or whose name is `start`; the newest of all without one.

    Raises `NotFoundError`: there is none, or several ids begin so.
    """
    batches = list_batches(database)
    named = [one for one in batches if start in (None, one.name)]
    begun = [one for one in batches if start and one.id.startswith(start)]
    if named or len(begun) == 1:
        return named[0] if named else begun[0]
    known = ", ".join(dict.fromkeys(one.name for one in batches[:10])) or "none"
    what = f"{len(begun)} batches begin with {start}" if begun else f"No batch {start or 'at all'}"
    raise NotFoundError(f"{what} in {database.url}; it knows {known}. `relaxtune db batches` lists them.")


def list_cells(database: TuningDatabase, batch_id: str) -> list[BatchCell]:
    """Return the cells of a batch, in the plan's order."""

    def work(session: Session) -> list[BatchCell]:
        rows = session.scalars(select(CellRow).where(CellRow.batch_id == batch_id).order_by(CellRow.position)).all()
        attempts: dict[int, list[AttemptRow]] = {}
        of_batch = select(AttemptRow).join(CellRow, CellRow.id == AttemptRow.cell_id)
        for one in session.scalars(of_batch.where(CellRow.batch_id == batch_id).order_by(AttemptRow.number)):
            attempts.setdefault(one.cell_id, []).append(one)
        return [_to_cell(row, attempts.get(row.id, [])) for row in rows]

    return database.read(work)


def find_done(database: TuningDatabase, key: str) -> tuple[BatchCell, datetime] | None:
    """Return the newest cell of some key that was accepted, with the moment; None without one."""
    statement = select(CellRow).where(CellRow.key == key, CellRow.state == CellState.DONE)
    statement = statement.order_by(CellRow.updated_at.desc(), CellRow.id.desc()).limit(1)

    def work(session: Session) -> tuple[BatchCell, datetime] | None:
        row = session.scalars(statement).one_or_none()
        return None if row is None else (_to_cell(row, []), row.updated_at)

    return database.read(work)


def list_attempts(database: TuningDatabase, batch_id: str) -> list[Attempt]:
    """Return all attempts at the cells of a batch, in the plan's order, the first attempt first."""
    statement = (
        select(AttemptRow, CellRow.name)
        .join(CellRow, CellRow.id == AttemptRow.cell_id)
        .where(CellRow.batch_id == batch_id)
        .order_by(CellRow.position, AttemptRow.number)
    )
    return database.read(
        lambda session: [
            to_value(Attempt, row, cell=name, driver=Driver(row.host, row.pid))
            for row, name in session.execute(statement)
        ]
    )


def _require_free(batch: Batch, *, sure: bool = False) -> None:
    if sure or batch.held:
        raise BatchHeldError(
            f"The batch {batch.name} ({batch.id[:8]}) is being worked on by process {batch.driver.pid} on "
            f"{batch.driver.host}, last seen at {batch.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC. "
            "`relaxtune batch watch` shows it; end that process first, or wait for it."
        )


def _get_batch(session: Session, batch_id: str, *, lock: bool = False) -> BatchRow:
    statement = select(BatchRow).where(BatchRow.id == batch_id)
    row = session.scalars(statement.with_for_update() if lock else statement).one_or_none()
    if row is None:
        raise NotFoundError(f"No batch {batch_id} in the database. `relaxtune db batches` lists them.")
    return row


def _close_attempt(session: Session, row: CellRow, now: datetime, error: str | None) -> None:
    _open_attempts(session, row, {"state": row.state, "finished_at": now, "error": error})


def _open_attempts(session: Session, row: CellRow, values: Mapping[str, object]) -> None:
    open_ones = update(AttemptRow).where(AttemptRow.cell_id == row.id, AttemptRow.finished_at.is_(None))
    session.execute(open_ones.values(**values), execution_options={"synchronize_session": False})


def _to_batch(row: BatchRow) -> Batch:
    return to_value(Batch, row, driver=Driver(row.host, row.pid))


def _to_cell(row: CellRow, attempts: Sequence[AttemptRow]) -> BatchCell:
    going = next((one for one in attempts if one.finished_at is None), None)
    return BatchCell(
        row.batch_id,
        row.position,
        to_value(CellSpec, row),
        row.state,
        to_value(CellFacts, row),
        row.updated_at,
        len(attempts),
        None if going is None else Driver(going.host, going.pid),
        None if going is None else going.heartbeat_at,
    )
