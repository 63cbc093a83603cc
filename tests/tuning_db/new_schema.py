"""New SQLite databases get their tables by the statements that migrating the first one left.

A migration from scratch takes 45 ms of a processor, and the tests make some thousand databases. The tests of migrating
(`tests/tuning_db/sql`) migrate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from relaxtune.tuning_db.sql.schema import VERSION_TABLE

_MIGRATE = command.upgrade


@contextlib.contextmanager
def schema_is_copied() -> Iterator[None]:
    """Let Alembic migrate the first new SQLite database of this process, and copy its schema into the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "upgrade", partial(_upgrade, []))
        yield


@contextlib.contextmanager
def schema_is_migrated() -> Iterator[None]:
    """Let Alembic migrate every database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "upgrade", _MIGRATE)
        yield


def _upgrade(known: list[str], config: Config, revision: str) -> None:
    connection: Connection = config.attributes["connection"]
    new = connection.dialect.name == "sqlite" and not _rows(connection, "SELECT name FROM sqlite_master")
    if not (new and known):
        _MIGRATE(config, revision)
    if not new:
        return
    if known:
        for statement in known:
            connection.exec_driver_sql(statement)
        return
    made = _rows(connection, "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'")
    ((version,),) = _rows(connection, f"SELECT version_num FROM {VERSION_TABLE}")
    known += [*(sql for (sql,) in made), f"INSERT INTO {VERSION_TABLE} VALUES ('{version}')"]


def _rows(connection: Connection, query: str) -> list[tuple[str, ...]]:
    return [tuple(row) for row in connection.exec_driver_sql(query)]
