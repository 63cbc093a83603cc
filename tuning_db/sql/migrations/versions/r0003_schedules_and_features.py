"""Keep the version of the default schedules with a measurement, and the features of candidates.

A fallback's record has no decision: it is true for the code of the default schedules alone. Environments of earlier
schemas do not know it (NULL), so their fallback records answer no look-up any more; nothing is deleted.

There is no way back: undoing it would delete what was recorded since.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, then the table."""
    op.add_column("environments", sa.Column("schedules_version", sa.String(64)))
    op.create_table(
        "features",
        sa.Column("record_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("version", sa.String(128), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("columns", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["record_id"], ["records.id"], name=op.f("fk_features_record_id_records"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("record_id", "version", name=op.f("pk_features")),
    )
