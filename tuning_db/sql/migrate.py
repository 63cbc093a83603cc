"""The schema of a database: which revision it has, and how it gets the one this package needs.

Alembic is loaded only when something is to change: reading the revision is one SELECT.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from relaxtune.tuning_db.errors import DatabaseOpenError, SchemaVersionError
from relaxtune.tuning_db.sql.engine import Location, lock_schema
from relaxtune.tuning_db.sql.schema import HEAD_REVISION, VERSION_TABLE, Base

if TYPE_CHECKING:
    from alembic.config import Config

# Alembic keeps the migration in progress in module globals, so two threads must not migrate at once.
_ALEMBIC_LOCK = threading.Lock()


def alembic_config() -> Config:
    """Return Alembic's configuration; the migrations are found in this package, wherever it is installed."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "relaxtune.tuning_db.sql:migrations")
    config.set_main_option("path_separator", "os")
    return config


def current_revision(connection: Connection, location: Location) -> str | None:
    """Return the schema revision of the database; None when it is empty.

    Raises `DatabaseOpenError`: the database holds tables, but not ours.
    """
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE not in tables:
        if tables:
            raise DatabaseOpenError(
                f"The database {location.shown} holds {len(tables)} tables of another application (for instance "
                f"{sorted(tables)[0]!r}) and none of relaxtune. Give relaxtune a database of its own."
            )
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()


def check_revision(revision: str, location: Location) -> None:
    """Accept the revision this package needs.

    Raises `SchemaVersionError`: the database is older (the message has the command that upgrades it) or newer (upgrade
    the package).
    """
    if revision == HEAD_REVISION:
        return
    found = f"The database {location.shown} has schema revision {revision}"
    if revision in known_revisions():
        raise SchemaVersionError(
            f"{found}, this relaxtune needs {HEAD_REVISION}. Run: relaxtune db upgrade --db {location.shown}"
        )
    if revision < HEAD_REVISION:
        raise SchemaVersionError(
            f"{found}, which no released relaxtune wrote. Write an archive with the version that made it "
            "(relaxtune db export), and read that into a new database (relaxtune db import)"
        )
    raise SchemaVersionError(
        f"{found}, newer than {HEAD_REVISION}, the newest this relaxtune knows. Run: pip install --upgrade relaxtune"
    )


def known_revisions() -> frozenset[str]:
    """Return the revisions of the released versions, which this package can upgrade from."""
    from alembic.script import ScriptDirectory

    script = ScriptDirectory.from_config(alembic_config())
    return frozenset(step.revision for step in script.walk_revisions())


def migrate(connection: Connection, location: Location) -> str | None:
    """Bring the schema to `HEAD_REVISION` inside the writing transaction of `connection`; return the one it had.

    A new database gets the tables of the models, an older one the migrations. Safe when many processes do it at once:
    the lock is taken first, then the revision is read again.
    """
    lock_schema(connection)
    before = current_revision(connection, location)
    if before == HEAD_REVISION:
        return before
    if before is not None and before not in known_revisions():
        check_revision(before, location)
    from alembic import command

    with _ALEMBIC_LOCK:
        config = alembic_config()
        config.attributes["connection"] = connection
        if before is None:
            Base.metadata.create_all(connection)
            command.stamp(config, "head")
        else:
            command.upgrade(config, "head")
    return before
