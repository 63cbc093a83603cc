"""Keep where the tags of the registry were set to, when, by whom and why.

There is no way back: undoing it would delete what was recorded since.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "tag_moves",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tag", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("artifact_id", sa.Integer()),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("gate", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["artifact_id"], ["artifacts.id"], name=op.f("fk_tag_moves_artifact_id_artifacts")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tag_moves")),
        sa.UniqueConstraint("tag", "number", name=op.f("uq_tag_moves_tag_number")),
    )
    op.create_index(op.f("ix_tag_moves_artifact_id"), "tag_moves", ["artifact_id"])
