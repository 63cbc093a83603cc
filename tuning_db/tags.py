"""Tags of artifacts in and out of the database: each move is kept, with who made it, when and why.

A tag stands where its last move put it. `rollback` moves go back through the artifacts that the tag stood at before,
one for each; a later `tag` or `promote` goes on from there.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.errors import NotFoundError, TuningDatabaseError
from relaxtune.tuning_db.records import normalise, utc_now
from relaxtune.tuning_db.sql.engine import insert_or_ignore
from relaxtune.tuning_db.sql.schema import ArtifactRow, TagMoveRow
from relaxtune.tuning_db.store import TuningDatabase


class MoveKind(StrEnum):
    """The command that moved a tag."""

    TAG = "tag"
    PROMOTE = "promote"
    ROLLBACK = "rollback"
    REMOVE = "remove"


class TagMovedError(TuningDatabaseError):
    """Another process moved the tag since it was looked at; nothing was changed."""


@dataclass(frozen=True)
class TagMove:
    """One move of a tag."""

    tag: str
    number: int  # Counts the moves of this tag from 1.
    kind: MoveKind
    artifact_key: str | None  # Where it went; None where it was removed.
    # Who moved it, as user@host, and what they said.
    by: str
    why: str
    gate: str | None = None  # Result of the gate, as JSON; None where none was run.
    created_at: datetime = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        """Bring the texts to what databases hold, and the time to UTC."""
        normalise(self, text="by why", utc="created_at")


def record_move(database: TuningDatabase, move: TagMove) -> None:
    """Keep a move; its number must be the next one of its tag.

    Raises `TagMovedError`: another move came first; `NotFoundError`: the artifact is not in the database.
    """
    id_ = str(uuid.uuid4())

    def work(session: Session) -> None:
        if session.get(TagMoveRow, id_) is not None:
            return  # kept, and the answer was lost
        artifact_id = None
        if move.artifact_key is not None:
            artifact_id = session.scalar(select(ArtifactRow.id).where(ArtifactRow.key == move.artifact_key))
            if artifact_id is None:
                raise NotFoundError(f"No artifact {move.artifact_key} in the database. Call record_artifact first.")
        row = {name: value for name, value in vars(move).items() if name != "artifact_key"}
        row |= {"id": id_, "kind": move.kind.value, "artifact_id": artifact_id}
        last = session.scalar(select(func.max(TagMoveRow.number)).where(TagMoveRow.tag == move.tag)) or 0
        if last == move.number - 1:
            # Of two at once, the unique number lets one pass.
            session.execute(insert_or_ignore(session.connection(), TagMoveRow), [row])
        if session.get(TagMoveRow, id_) is None:
            raise TagMovedError(
                f"Tag {move.tag} was moved by another process meanwhile: it is at move "
                f"{max(last, move.number)}, expected {move.number - 1}. Nothing was changed; look again with "
                f"`relaxtune artifact show {move.tag}`"
            )

    database.write(work)


def list_moves(database: TuningDatabase, tag: str | None = None) -> list[TagMove]:
    """Return the moves of a tag, or of all tags by name, the oldest first."""

    def work(session: Session) -> list[TagMove]:
        statement = (
            select(TagMoveRow, ArtifactRow.key)
            .outerjoin(ArtifactRow, ArtifactRow.id == TagMoveRow.artifact_id)
            .order_by(TagMoveRow.tag, TagMoveRow.number)
        )
        if tag is not None:
            statement = statement.where(TagMoveRow.tag == tag)
        return [
            TagMove(row.tag, row.number, MoveKind(row.kind), key, row.by, row.why, row.gate, row.created_at)
            for row, key in session.execute(statement)
        ]

    return database.read(work)


def stood_at(moves: Sequence[TagMove]) -> list[str]:
    """Return the artifacts that a tag can go back through, the one it stands at last; empty where it was removed.

    `moves` are all of one tag, the oldest first.
    """
    stack: list[str] = []
    for move in moves:
        if move.kind is MoveKind.ROLLBACK:
            stack = stack[:-1]
        elif move.artifact_key is None:
            stack = []
        else:
            stack.append(move.artifact_key)
    return stack
