"""The schema of relaxtune 0.1.0, from which later revisions upgrade. New databases are made whole, by the models."""

from __future__ import annotations

revision = "0004"
down_revision = None


def upgrade() -> None:
    """Refuse a database without tables: `tuning_db.sql.migrate` makes those."""
    raise NotImplementedError("new databases are made by the models, not by migrations")
