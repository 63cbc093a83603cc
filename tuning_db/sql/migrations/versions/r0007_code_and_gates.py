"""Say of records and jobs which relaxtune made them, and keep what every gate found.

Earlier records and jobs do not know it (NULL). What gates found was kept with the move of a tag alone: it is a gate of
its own now, without the baseline, which the move does not name.

There is no way back: undoing it would delete what was recorded since.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns and the table, and fill the table."""
    op.add_column("jobs", sa.Column("code_version", sa.Text()))
    op.add_column("records", sa.Column("code_version", sa.Text()))
    gates = op.create_table(
        "gates",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("artifact_id", sa.Integer(), nullable=False),
        sa.Column("baseline_id", sa.Integer()),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["artifact_id"], ["artifacts.id"], name=op.f("fk_gates_artifact_id_artifacts")),
        sa.ForeignKeyConstraint(["baseline_id"], ["artifacts.id"], name=op.f("fk_gates_baseline_id_artifacts")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gates")),
    )
    for column in ("artifact_id", "baseline_id", "created_at"):
        op.create_index(op.f(f"ix_gates_{column}"), "gates", [column])
    moves = sa.table(
        "tag_moves",
        *(sa.column(name) for name in ("id", "artifact_id", "by", "gate")),
        sa.column("created_at", sa.DateTime(timezone=True)),
    )
    connection = op.get_bind()
    told = sa.select(moves).where(moves.c.gate.is_not(None), moves.c.artifact_id.is_not(None))
    rows = [
        {
            "id": move.id,
            "artifact_id": move.artifact_id,
            "baseline_id": None,
            "passed": json.loads(move.gate).get("passed") is True,
            "by": move.by,
            "created_at": move.created_at,
            "report": move.gate,
        }
        for move in connection.execute(told)
    ]
    if rows:
        op.bulk_insert(gates, rows)
