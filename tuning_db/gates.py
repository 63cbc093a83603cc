"""Gates in and out of the database: their findings on an artifact and its baseline, passed or refused."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session, aliased

from relaxtune.tuning_db.artifacts import Artifact
from relaxtune.tuning_db.records import normalise, utc_now
from relaxtune.tuning_db.sql import artifact_rows
from relaxtune.tuning_db.sql.schema import ArtifactRow, GateRow
from relaxtune.tuning_db.sql.writing import chunks
from relaxtune.tuning_db.store import TuningDatabase, question


@dataclass(frozen=True)
class GateRun:
    """The findings of a gate."""

    id: str
    # The new artifact and the one it would replace; the baseline is None where it was not kept.
    artifact_key: str
    baseline_key: str | None
    model: str  # Of the artifact.
    passed: bool
    by: str  # Who ran it, as user@host.
    report: str  # Checks, conditions and verdict, as canonical JSON.
    created_at: datetime = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        """Bring the texts to what databases hold, and the time to UTC."""
        normalise(self, text="by", json="report", utc="created_at")


def record_gate(
    database: TuningDatabase, artifact: Artifact, baseline: Artifact, *, passed: bool, by: str, report: str
) -> GateRun:
    """Keep what a gate found, and both artifacts if they are not known yet."""
    gate = GateRun(str(uuid.uuid4()), artifact.key, baseline.key, artifact.model, passed, by, report)

    def work(session: Session) -> None:
        if session.get(GateRow, gate.id) is not None:
            return  # kept, and the answer was lost
        for one in (artifact, baseline):
            artifact_rows.put_artifact(session, one)
        keys = (artifact.key, baseline.key)
        ids = dict(session.execute(select(ArtifactRow.key, ArtifactRow.id).where(ArtifactRow.key.in_(keys))).all())
        columns = {name: getattr(gate, name) for name in ("id", "passed", "by", "created_at", "report")}
        session.add(GateRow(**columns, artifact_id=ids[artifact.key], baseline_id=ids[baseline.key]))

    database.write(work)
    return gate


@question
def newest_gates(session: Session, keys: Sequence[str]) -> Mapping[str, GateRun]:
    """Return the last gate of each of these artifacts that has one, by the artifact's key."""
    found: dict[str, GateRun] = {}
    for part in chunks(list(keys)):
        for one in _gates(session, ArtifactRow.key.in_(part)):
            found.setdefault(one.artifact_key, one)
    return found


@question
def list_gates(
    session: Session, *, artifact_key: str | None = None, gate_id: str | None = None, limit: int | None = None
) -> tuple[GateRun, ...]:
    """Return gates, the newest first: all, those of an artifact, or one."""
    conditions = []
    if artifact_key is not None:
        conditions.append(ArtifactRow.key == artifact_key)
    if gate_id is not None:
        conditions.append(GateRow.id == gate_id)
    return tuple(_gates(session, *conditions, limit=limit))


def _gates(session: Session, *conditions: ColumnElement[bool], limit: int | None = None) -> Iterator[GateRun]:
    """Yield gates, the newest first."""
    baseline = aliased(ArtifactRow)
    statement = (
        select(GateRow, ArtifactRow.key, ArtifactRow.model, baseline.key)
        .join(ArtifactRow, ArtifactRow.id == GateRow.artifact_id)
        .outerjoin(baseline, baseline.id == GateRow.baseline_id)
        .where(*conditions)
        .order_by(GateRow.created_at.desc(), GateRow.id)
        .limit(limit)
    )
    for row, key, model, baseline_key in session.execute(statement):
        yield GateRun(row.id, key, baseline_key, model, row.passed, row.by, row.report, row.created_at)
