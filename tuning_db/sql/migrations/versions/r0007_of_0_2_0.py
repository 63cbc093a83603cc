"""The schema of relaxtune 0.2.0: batches, tags, gates, and the version of relaxtune in records and jobs.

Columns that earlier rows do not know are NULL. There is no way back: undoing it would delete what was recorded since.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from relaxtune.tuning_db.sql.schema import Base

revision = "0007"
down_revision = "0004"


def upgrade() -> None:
    """Add the columns, then the tables, which are those of the models as long as no later revision changes them.

    One that does writes down here first how they were: until then, the tests cannot upgrade the database of 0.1.0.
    """
    for table in ("jobs", "records"):
        op.add_column(table, sa.Column("code_version", sa.Text()))
    Base.metadata.create_all(op.get_bind())
