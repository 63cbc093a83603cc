"""Alembic's entry point: migrate the connection handed over by `tuning_db.sql.migrate`.

Alembic executes this file; it has no use by itself. The caller owns the transaction, so a migration and the stamp of
its revision are committed together or not at all.
"""

from __future__ import annotations

from alembic import context

from relaxtune.tuning_db.sql.schema import VERSION_TABLE, Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    # SQLite has no ALTER for most changes; Alembic copies the table instead.
    render_as_batch=True,
    transactional_ddl=True,
)
context.run_migrations()
