"""Keep batches: the cells of a plan, how far each is, and every attempt at one.

There is no way back: undoing it would delete what was recorded since.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_KEY = sa.String(64)
_TIME = sa.DateTime(timezone=True)
_WORD = sa.String(16)
_OPEN = sa.text("finished_at IS NULL")


def upgrade() -> None:
    """Add the tables."""
    _create_batches()
    _create_cells()
    _create_attempts()


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("key", _KEY, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_at", _TIME, nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.Column("outcome", sa.Text()),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    for column in ("key", "started_at"):
        op.create_index(op.f(f"ix_batches_{column}"), "batches", [column])
    op.create_index("uq_batches_open", "batches", ["key"], unique=True, sqlite_where=_OPEN, postgresql_where=_OPEN)


def _create_cells() -> None:
    op.create_table(
        "cells",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key", _KEY, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("buckets", sa.Text(), nullable=False),
        sa.Column("precision", _WORD, nullable=False),
        sa.Column("effort", _WORD, nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("importance", sa.Integer(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("max_latency_ms", sa.Double()),
        sa.Column("rtol", sa.Double()),
        sa.Column("atol", sa.Double()),
        sa.Column("state", _WORD, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("model", sa.Text()),
        sa.Column("artifact", sa.Text()),
        sa.Column("artifact_key", _KEY),
        sa.Column("size_bytes", sa.BigInteger()),
        sa.Column("validated", sa.Boolean()),
        sa.Column("untuned_ms", sa.Double()),
        sa.Column("shipped_ms", sa.Double()),
        sa.Column("peer", sa.String(64)),
        sa.Column("peer_ms", sa.Double()),
        sa.Column("seconds", sa.Double()),
        sa.Column("job_id", sa.String(64)),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_cells_batch_id_batches")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_cells_job_id_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cells")),
        sa.UniqueConstraint("batch_id", "name", name=op.f("uq_cells_batch_id_name")),
    )
    op.create_index(op.f("ix_cells_key_state"), "cells", ["key", "state"])
    op.create_index(op.f("ix_cells_job_id"), "cells", ["job_id"])


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("cell_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("heartbeat_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.Column("state", _WORD, nullable=False),
        sa.Column("error", sa.Text()),
        sa.ForeignKeyConstraint(["cell_id"], ["cells.id"], name=op.f("fk_attempts_cell_id_cells")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("cell_id", "number", name=op.f("uq_attempts_cell_id_number")),
    )
