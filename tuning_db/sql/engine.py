"""Engines: from a URL to a SQLAlchemy engine, and all that differs between SQLite and PostgreSQL.

No other module holds SQL or error codes of one dialect.

SQLite: WAL, foreign keys, a busy time-out, and transactions begun by us (`BEGIN` to read, `BEGIN IMMEDIATE` to write),
as Python's driver would begin them late and leave schema changes outside
(https://docs.sqlalchemy.org/en/21/dialects/sqlite.html, "Enabling Non-Legacy SQLite Transactional Modes").
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, Table, create_engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import QueuePool, StaticPool
from sqlalchemy.sql import Insert

from relaxtune.tuning_db.errors import (
    DatabaseBusyError,
    DatabaseLostError,
    DatabaseOpenError,
    DatabaseUrlError,
    DatabaseWriteError,
    TuningDatabaseError,
)
from relaxtune.tuning_db.urls import DatabasePlace, DatabaseUrl, hide_secrets

#: SQLite's own wait for a lock, which is short: its pauses grow, so who waits long is served last. See `transactions`.
BUSY_TIMEOUT_S = 0.02
#: Most memory for pages of a SQLite file; taken as it is needed.
CACHE_KIB = 64 * 1024
#: Rows from which on PostgreSQL gets them by COPY.
COPY_ROWS = 100
#: Execution option of a connection whose next transaction writes.
WRITE_OPTION = "relaxtune_write"
#: Names the lock that PostgreSQL writers of the schema take; any constant of 64 bits.
SCHEMA_LOCK_ID = 0x72656C617874756E
POSTGRES_INSTALL = "pip install 'relaxtune[postgres]'"
URL_FORMS = "a path such as tuning.db, sqlite:///tuning.db, sqlite:// (memory), or postgresql://user@host/name"

# Beginnings of a server's URL or of a connection string: it is no path, and its password must not be shown.
_SERVER_WORDS = re.compile(r"postgres(ql)?(\+\w+)?:|.*\b(password|passwd)\s*=", re.IGNORECASE)
_RETRIABLE_SQLSTATES = frozenset({"40001", "40P01", "55P03"})
# The server stops, crashed, is starting, or closed the connection.
_LOST_SQLSTATES = re.compile(r"57P0[1-5]|08\w{3}")
_FULL_SQLSTATES = frozenset({"53100"})
_READ_ONLY_SQLSTATES = frozenset({"25006", "42501"})


@dataclass(frozen=True)
class Location:
    """Where a database is: its URL and, for a SQLite file, the path; None for memory and for a server."""

    url: URL = field(repr=False)
    path: Path | None

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self.url.get_backend_name()

    @property
    def is_memory(self) -> bool:
        """Whether the database lives in this process only."""
        return self.dialect == "sqlite" and self.path is None

    @property
    def shown(self) -> str:
        """The URL for people, without its password."""
        return hide_secrets(self.url.render_as_string(hide_password=True))

    def without_secrets(self, text: str) -> str:
        """Return what a driver said, without this URL's passwords."""
        secrets = [self.url.password] if self.url.password else []
        for name, value in self.url.query.items():
            if isinstance(value, str) and value and hide_secrets(f"{name}={value}") != f"{name}={value}":
                secrets.append(value)
        for secret in secrets:
            text = text.replace(secret, "***")
        return hide_secrets(text)


def parse_location(url: DatabasePlace) -> Location:
    """Return where `url` points.

    Raises `DatabaseUrlError`: not a URL, or a dialect other than SQLite and PostgreSQL.
    """
    text_url, shown = DatabaseUrl.of(url).reveal(), str(DatabaseUrl.of(url))
    if not text_url.strip():
        raise DatabaseUrlError(f"The database URL is empty: expected {URL_FORMS}.")
    if not isinstance(url, Path) and _SERVER_WORDS.match(text_url) and "://" not in text_url:
        raise DatabaseUrlError(f"Cannot read the database URL {shown!r}: expected {URL_FORMS}.")
    if isinstance(url, Path) or "://" not in text_url:
        path = Path(text_url).expanduser()
        return Location(URL.create("sqlite", database=str(path)), path)
    try:
        parsed = make_url(text_url)
    except (ArgumentError, ValueError):
        # Without its cause: a port that is no number is quoted there, and may be the password.
        raise DatabaseUrlError(f"Cannot read the database URL {shown!r}: expected {URL_FORMS}.") from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.query or parsed.host:
            raise DatabaseUrlError(
                f"The database URL {shown!r} has a host or options: expected sqlite:///relative.db or "
                "sqlite:////absolute.db and nothing more. To forbid writes open it in mode read-only."
            )
        in_memory = parsed.database in (None, "", ":memory:")
        return Location(parsed, None if in_memory else Path(str(parsed.database)).expanduser())
    if backend in ("postgresql", "postgres"):
        if "@" in (parsed.host or ""):
            raise DatabaseUrlError(f"The database URL {shown!r} has an @ too many: write one in a password as %40.")
        # psycopg 3 is the one driver tested; a bare URL means it.
        return Location(parsed.set(drivername="postgresql+psycopg"), None)
    raise DatabaseUrlError(f"Unknown database dialect {backend!r} in {shown!r}: expected {URL_FORMS}.")


def make_engine(location: Location, *, read_only: bool, create: bool) -> Engine:
    """Return an engine for `location`; nothing is connected yet.

    Raises `DatabaseUrlError`: the driver is not installed; `DatabaseOpenError`: a SQLite file is missing and may not be
    created.
    """
    if location.dialect == "sqlite":
        return _sqlite_engine(location, read_only=read_only, create=create)
    try:
        engine = create_engine(location.url, pool_pre_ping=True)
    except (ModuleNotFoundError, NoSuchModuleError) as e:
        raise DatabaseUrlError(
            f"The PostgreSQL driver psycopg 3 is not installed, which {location.shown} needs. Run: {POSTGRES_INSTALL}"
        ) from e
    event.listen(engine, "connect", _configure_postgresql)
    if read_only:
        engine = engine.execution_options(postgresql_readonly=True)
    return engine


def is_away(engine: Engine) -> bool:
    """Return whether no PostgreSQL server answers, or one that is starting or stopping: it may soon be there."""
    from psycopg import ProgrammingError
    from psycopg.conninfo import make_conninfo
    from psycopg.pq import PGconn, Ping

    _, named = engine.dialect.create_connect_args(engine.url)
    # Values that are no text or number are for the driver, not for the server.
    options = {name: value for name, value in named.items() if isinstance(value, str | int)}
    try:
        place = make_conninfo("", **options)
    except ProgrammingError:  # an option that the driver does not know
        return False
    # Messages of the driver depend on the language of the system.
    return PGconn.ping(place.encode()) in (Ping.REJECT, Ping.NO_RESPONSE)


def _configure_postgresql(connection: DBAPIConnection, _record: object) -> None:
    # The driver prepares what it sends often. A plan kept from when the tables were small reads all of them later.
    cursor = connection.cursor()
    cursor.execute("SET plan_cache_mode = force_custom_plan")
    cursor.close()
    connection.commit()


def _sqlite_engine(location: Location, *, read_only: bool, create: bool) -> Engine:
    if location.path is None:
        # One connection shared by all threads; the store serialises its transactions.
        engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    else:
        path = location.path
        if path.is_dir():
            raise DatabaseOpenError(f"{path} is a folder: expected a database file, for instance {path / 'tuning.db'}.")
        if not path.exists() and (read_only or not create):
            raise DatabaseOpenError(
                f"There is no database at {path}. `relaxtune tune MODEL --db {path}` makes one and fills it; an empty "
                f"one is made by: relaxtune db init --db {path}"
            )
        if not path.parent.is_dir():
            raise DatabaseOpenError(
                f"The folder {path.parent} of the database {path.name} does not exist. Create it first."
            )
        options = "mode=ro" if read_only else "mode=rwc" if create else "mode=rw"
        # A reader of a WAL database makes a `-shm` file beside it. Where it cannot, and no writer has left a `-wal`,
        # SQLite reads the file as it stands.
        if read_only and not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists():
            options = "mode=ro&immutable=1"
        uri = f"file:{quote(str(path.absolute()))}?{options}"

        def connect() -> sqlite3.Connection:
            return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False)

        engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    event.listen(engine, "connect", _configure_sqlite_read if read_only else _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite_read(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")
    # SQLite's own default of 2 MB holds a small part of the indices of a million records.
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")


def _configure_sqlite(connection: sqlite3.Connection, record: object) -> None:
    _configure_sqlite_read(connection, record)
    # The journal mode is a property of the file. Changing it needs the file alone and does not wait for others, so it
    # is asked for first, and a refusal is retried by the store like every lock.
    (journal_mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if journal_mode not in ("wal", "memory"):
        connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(WRITE_OPTION, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def transaction_options(location: Location, *, write: bool, single: bool) -> dict[str, object]:
    """Return the execution options of a connection for its next transaction.

    SQLite's transactions see one state of the database anyhow. PostgreSQL's do from `REPEATABLE READ` on, which a
    reader needs that asks more than once; a single question is its own transaction, without the two round trips.
    """
    if location.dialect == "sqlite" or write:
        return {WRITE_OPTION: write}
    return {WRITE_OPTION: False, "isolation_level": "AUTOCOMMIT" if single else "REPEATABLE READ"}


def insert_or_ignore(connection: Connection, table: type | Table) -> Insert:
    """Return an INSERT into `table` that leaves a row with the same natural key as it is."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


def insert_new_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert rows, leaving those with a natural key that is there as they are; fast for thousands."""
    if connection.dialect.name == "postgresql" and len(rows) >= COPY_ROWS:
        _copy_new_rows(connection, table, rows)
    else:
        connection.execute(insert_or_ignore(connection, table), list(rows))


def _copy_new_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert by COPY into a table of this transaction, four times as fast as INSERT; COPY alone knows no conflicts."""
    columns = ", ".join(f'"{name}"' for name in rows[0])
    incoming = f"incoming_{table.name}"
    connection.exec_driver_sql(
        f"CREATE TEMPORARY TABLE {incoming} ON COMMIT DROP AS SELECT {columns} FROM {table.name} WITH NO DATA"
    )
    driver = connection.connection.driver_connection
    assert driver is not None
    with driver.cursor() as cursor, cursor.copy(f"COPY {incoming} ({columns}) FROM STDIN") as copy:
        for row in rows:
            # The driver would write the name of an enum's member.
            copy.write_row([value.value if isinstance(value, Enum) else value for value in row.values()])
    connection.exec_driver_sql(
        f"INSERT INTO {table.name} ({columns}) SELECT {columns} FROM {incoming} ON CONFLICT DO NOTHING"
    )
    connection.exec_driver_sql(f"DROP TABLE {incoming}")


def lock_schema(connection: Connection) -> None:
    """Wait until no other process changes the schema; held to the end of the transaction.

    In SQLite the `BEGIN IMMEDIATE` of the transaction is that lock already.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": SCHEMA_LOCK_ID})


def database_size(connection: Connection) -> int:
    """Return the bytes the database takes."""
    if connection.dialect.name == "postgresql":
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    pages = int(connection.exec_driver_sql("PRAGMA page_count").scalar_one())
    return pages * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())


def translate_error(error: BaseException | None, location: Location) -> TuningDatabaseError:
    """Return the error of ours that says what a driver's error means for the caller."""
    where = location.shown
    # PostgreSQL adds hints and contexts in lines of their own.
    said = location.without_secrets(str(error).strip().split("\n", 1)[0])
    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    state = getattr(error, "sqlstate", None)
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or state in _RETRIABLE_SQLSTATES:
        return DatabaseBusyError(
            f"The database {where} stayed locked by other writers ({said}). Run the command again."
        )
    if primary == sqlite3.SQLITE_FULL or state in _FULL_SQLSTATES:
        return DatabaseWriteError(
            f"The disk of the database {where} is full ({said}). Nothing of this write was kept, earlier records are "
            "whole. Free some space and run the command again."
        )
    if primary == sqlite3.SQLITE_READONLY or state in _READ_ONLY_SQLSTATES:
        file = location.dialect == "sqlite"
        cure = "Make the file and its folder writable" if file else "Name a user who may write, or another server"
        return DatabaseWriteError(
            f"The database {where} cannot be written ({said}). {cure}, or open it in mode read-only."
        )
    if primary in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return DatabaseOpenError(
            f"{where} is not a database or is damaged ({said}). Restore it from a copy, or name another file."
        )
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
        return DatabaseOpenError(
            f"Cannot open the database {where} ({said}). Check that the file and its folder can be read and written."
        )
    if state is not None and _LOST_SQLSTATES.fullmatch(state):
        return DatabaseLostError(f"The server of the database {where} went away ({said}). Run the command again.")
    if state is None and primary is None and location.dialect == "postgresql":
        return DatabaseOpenError(
            f"Cannot reach the database {where} ({said}). Check host, port, user and database name."
        )
    return TuningDatabaseError(f"The database {where} refused a statement ({said}).")
