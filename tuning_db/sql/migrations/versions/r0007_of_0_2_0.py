"""The schema of relaxtune 0.2.0: batches, tags, gates, and the version of relaxtune in records and jobs.

Columns that earlier rows do not know are NULL. There is no way back: undoing it would delete what was recorded since.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from relaxtune.tuning_db.sql.schema import NAMING_CONVENTION

revision = "0007"
down_revision = "0004"

_KEY = sa.String(64)
_TIME = sa.DateTime(timezone=True)
_WORD = sa.String(16)
_OPEN = sa.text("finished_at IS NULL")


def upgrade() -> None:
    """Add the columns, then the tables as they were in this revision."""
    op.add_column("jobs", sa.Column("code_version", sa.Text()))
    op.add_column("records", sa.Column("code_version", sa.Text()))
    metadata = sa.MetaData(naming_convention=NAMING_CONVENTION)
    there = [
        sa.Table("jobs", metadata, sa.Column("id", sa.String(64), primary_key=True)),
        sa.Table("artifacts", metadata, sa.Column("id", sa.Integer(), primary_key=True)),
    ]
    _add_batches(metadata)
    _add_gates(metadata)
    metadata.create_all(op.get_bind(), [table for table in metadata.sorted_tables if table not in there])


def _add_batches(metadata: sa.MetaData) -> None:
    batches = sa.Table(
        "batches",
        metadata,
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("key", _KEY, nullable=False, index=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_at", _TIME, nullable=False),
        sa.Column("started_at", _TIME, nullable=False, index=True),
        sa.Column("finished_at", _TIME),
        sa.Column("outcome", sa.Text()),
        sa.Column("plan", sa.Text(), nullable=False),
    )
    sa.Index("uq_batches_open", batches.c.key, unique=True, sqlite_where=_OPEN, postgresql_where=_OPEN)
    sa.Table(
        "cells",
        metadata,
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("batch_id", sa.ForeignKey("batches.id"), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key", _KEY, nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("source", "shape", "buckets")),
        sa.Column("precision", _WORD, nullable=False),
        sa.Column("effort", _WORD, nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("importance", sa.Integer(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        *(sa.Column(name, sa.Double()) for name in ("max_latency_ms", "rtol", "atol")),
        sa.Column("state", _WORD, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        *(sa.Column(name, sa.Text()) for name in ("error", "model", "artifact")),
        sa.Column("artifact_key", _KEY),
        sa.Column("size_bytes", sa.BigInteger()),
        sa.Column("validated", sa.Boolean()),
        *(sa.Column(name, sa.Double()) for name in ("untuned_ms", "shipped_ms")),
        sa.Column("peer", sa.String(64)),
        *(sa.Column(name, sa.Double()) for name in ("peer_ms", "seconds")),
        sa.Column("job_id", sa.ForeignKey("jobs.id"), index=True),
        sa.UniqueConstraint("batch_id", "name"),
        sa.Index(None, "key", "state"),
    )
    sa.Table(
        "attempts",
        metadata,
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("cell_id", sa.ForeignKey("cells.id"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("heartbeat_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.Column("state", _WORD, nullable=False),
        sa.Column("error", sa.Text()),
        sa.UniqueConstraint("cell_id", "number"),
    )


def _add_gates(metadata: sa.MetaData) -> None:
    sa.Table(
        "tag_moves",
        metadata,
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tag", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", _WORD, nullable=False),
        sa.Column("artifact_id", sa.ForeignKey("artifacts.id"), index=True),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("by", "why")),
        sa.Column("gate", sa.Text()),
        sa.Column("created_at", _TIME, nullable=False),
        sa.UniqueConstraint("tag", "number"),
    )
    sa.Table(
        "gates",
        metadata,
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("artifact_id", sa.ForeignKey("artifacts.id"), nullable=False, index=True),
        sa.Column("baseline_id", sa.ForeignKey("artifacts.id"), index=True),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False, index=True),
        sa.Column("report", sa.Text(), nullable=False),
    )
