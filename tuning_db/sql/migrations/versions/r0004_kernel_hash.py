"""Say of each record which kernel was measured.

A decision names the parameters or the trace of a kernel, not the code that makes the kernel of them. Records of earlier
schemas do not know it (NULL): traces count as before, records of templates and fallbacks no more; nothing is deleted.

There is no way back: undoing it would delete what was recorded since.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("records", sa.Column("kernel_hash", sa.String(16)))
