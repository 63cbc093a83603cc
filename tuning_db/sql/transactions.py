"""Transactions on one database: begin, commit or roll back, retry around locks, and errors of ours."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic, sleep
from typing import Self, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, MultipleResultsFound, TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from relaxtune.tuning_db.errors import (
    DatabaseBusyError,
    DatabaseLostError,
    DatabaseOpenError,
    DatabaseWriteError,
    InvalidRecordError,
    TuningDatabaseError,
)
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.sql.column_types import DamagedValueError
from relaxtune.tuning_db.sql.engine import Location, is_away, transaction_options, translate_error

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

#: How long a transaction waits for other writers.
LOCK_WAIT_S = 120.0
#: Longest pause between attempts. It does not grow: all who wait have the same chance whenever the lock is free.
LOCK_PAUSE_S = 0.05
#: How long a server that had answered, and went away, is waited for, and how long one that has not answered yet.
RECONNECT_WAIT_S, START_WAIT_S = 30.0, 10.0
RECONNECT_PAUSE_S = 0.5


class Transactions:
    """The base of `TuningDatabase`: an engine, and the one place that commits."""

    def __init__(self, location: Location, engine: Engine, mode: Mode) -> None:
        """Hold an engine; use `TuningDatabase.open`."""
        self._location = location
        self._engine = engine
        self._mode = mode
        self._pid = os.getpid()
        # A memory database has one connection, which one transaction uses at a time.
        self._memory_lock = threading.RLock() if location.is_memory else nullcontext()
        self._answered = self._waited = False
        # Device and number of the SQLite file that was written first.
        self._written: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Close all connections; a memory database is gone."""
        self._engine.dispose(close=self._pid == os.getpid())

    @property
    def mode(self) -> Mode:
        """How it was opened."""
        return self._mode

    @property
    def url(self) -> str:
        """Where it is, without a password."""
        return self._location.shown

    @contextmanager
    def _transaction(self, *, write: bool, single: bool) -> Iterator[Session]:
        """Begin, then commit or roll back, and turn driver errors into ours. Nothing else commits."""
        self._follow_fork()
        # SQLite would write to a file that lost its name, and all of it is gone at the end.
        if write and self._written is not None and self._find_file() != self._written:
            raise DatabaseWriteError(
                f"The database {self._location.shown} was deleted or replaced while in use, and its new "
                "records are lost. Run the command again, and do not move the file meanwhile."
            )
        try:
            with self._memory_lock, self._engine.connect() as connection:
                options = transaction_options(self._location, write=write, single=single)
                connection = connection.execution_options(**options)
                with connection.begin(), Session(connection, autoflush=False) as session:
                    yield session
                    session.flush()
        except DBAPIError as e:
            raise translate_error(e.orig, self._location) from e
        except self._engine.dialect.loaded_dbapi.Error as e:
            # Of what is done past SQLAlchemy, which is COPY.
            raise translate_error(e, self._location) from e
        except UnicodeEncodeError as e:
            raise InvalidRecordError(f"A text is not Unicode and cannot be stored ({e}).") from e
        except (ValueError, MultipleResultsFound) as e:
            # No row of ours gives a reader such an error.
            if write and not isinstance(e, DamagedValueError | UnicodeDecodeError | MultipleResultsFound):
                raise
            raise DatabaseOpenError(
                f"{self._location.shown} is damaged: a row cannot be read ({e}). Restore it from a copy, or name "
                "another file."
            ) from e
        except PoolTimeoutError as e:
            raise DatabaseBusyError(f"All connections to {self._location.shown} are in use ({e}).") from e

    def read(self, work: Callable[[Session], T], *, single: bool = False) -> T:
        """Return `work(session)` on one consistent state. For modules of `tuning_db` only: rows must not leave it.

        `single` promises that one statement of `work` at most reads what others write. It then needs no transaction.
        """
        return self._retrying(work, write=False, single=single)

    def write(self, work: Callable[[Session], T]) -> T:
        """Return `work(session)`, committed whole; it may be run again after a lock. For `tuning_db` only."""
        if self._mode is Mode.READ_ONLY:
            raise DatabaseWriteError(
                f"The database {self._location.shown} was opened in mode read-only. Open it in mode tune to write."
            )
        return self._retrying(work, write=True, single=False)

    def _retrying(self, work: Callable[[Session], T], *, write: bool, single: bool) -> T:
        """Run `work` again after a lock, and after a server went away: what it wrote is keyed."""
        began = monotonic()
        refusals = 0
        while True:
            try:
                with self._transaction(write=write, single=single) as session:
                    result = work(session)
            except DatabaseBusyError as e:
                self._pause(e, began, LOCK_WAIT_S, LOCK_PAUSE_S)
            except DatabaseOpenError as e:
                if self._location.dialect == "sqlite" or isinstance(e.__cause__, ValueError | MultipleResultsFound):
                    raise
                # A server that says itself that it stops or starts has answered.
                self._answered |= isinstance(e, DatabaseLostError)
                if self._answered:
                    lost = DatabaseLostError(str(e))
                    lost.__cause__ = e
                    self._pause(lost, began, RECONNECT_WAIT_S, RECONNECT_PAUSE_S)
                    continue
                # One refusal proves nothing: the server may have come between the attempt and the question.
                away = is_away(self._engine)
                if away and not self._waited:
                    self._waited = True
                    _LOG.warning("the server of %s does not answer: waiting for up to %g s", self.url, START_WAIT_S)
                refusals = 0 if away else refusals + 1
                if refusals > 1:
                    raise
                self._pause(e, began, START_WAIT_S, RECONNECT_PAUSE_S)
            else:
                self._answered = True
                if write and self._written is None:
                    self._written = self._find_file()
                return result

    def _pause(self, error: TuningDatabaseError, began: float, wait_s: float, pause_s: float) -> None:
        """Wait a moment before the next attempt, or raise `error` when all waiting was in vain."""
        if monotonic() - began > wait_s:
            raise error
        _LOG.debug("again: %s", error)
        sleep(random.uniform(0.02, 1.0) * pause_s)

    def _find_file(self) -> tuple[int, int] | None:
        try:
            found = None if self._location.path is None else self._location.path.stat()
        except FileNotFoundError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)

    def _follow_fork(self) -> None:
        if self._pid == os.getpid():
            return
        if self._location.is_memory:
            raise TuningDatabaseError(
                f"The memory database was opened by process {self._pid}, this is process {os.getpid()}: a write here "
                "would be lost. Use a file (for instance --db tuning.db) to share records between processes."
            )
        self._engine.dispose(close=False)
        self._pid = os.getpid()
