"""A SQLite file that is deleted or replaced while it is in use.

SQLite goes on writing to a file that has no name any more, without a word; all of it is gone at the end. So each write
first looks whether the name still belongs to the file that was opened. A connection that is kept for this holds the
content of a deleted file, which is put back under its name.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from relaxtune.tuning_db.errors import DatabaseWriteError

_LOG = logging.getLogger(__name__)


class KeptFile:
    """The file behind a database that is written; safe to share between threads.

    Parameters
    ----------
    path : Path
        Where it is.
    """

    def __init__(self, path: Path) -> None:
        """Hold nothing yet."""
        self._path = path.absolute()
        self._lock = threading.Lock()
        self._identity: tuple[int, int] | None = None
        self._keeper: sqlite3.Connection | None = None

    def follow(self, reopen: Callable[[], None]) -> None:
        """Make the name lead to the file that was opened, or open the file that it leads to now.

        Parameters
        ----------
        reopen : callable
            Drops the connections to the earlier file.

        Raises
        ------
        DatabaseWriteError
            The file was deleted and cannot be written again.
        """
        with self._lock:
            there = _identity(self._path)
            if self._keeper is None or there == self._identity:
                return
            if there is None:
                self._restore(reopen)
                _LOG.warning("the database %s was deleted while in use: it is written again, whole", self._path)
                return
            self._drop(reopen)
            _LOG.warning("the database %s was replaced while in use: what follows goes into the new file", self._path)

    def hold(self) -> None:
        """Keep the file that has the name now, once it is a database of ours."""
        with self._lock:
            if self._keeper is not None:
                return
            self._identity = _identity(self._path)
            if self._identity is not None:
                self._keeper = sqlite3.connect(self._path, check_same_thread=False)
                # A connection opens its file when it first reads.
                self._keeper.execute("SELECT count(*) FROM sqlite_master").fetchone()

    def close(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._drop(lambda: None)

    def forget(self) -> None:
        """Keep nothing any more in a process that was forked: the connection is the parent's."""
        self._identity, self._keeper = None, None

    def _drop(self, reopen: Callable[[], None]) -> None:
        if self._keeper is not None:
            self._keeper.close()
        self._identity, self._keeper = None, None
        reopen()

    def _restore(self, reopen: Callable[[], None]) -> None:
        staged = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        keeper = self._keeper
        assert keeper is not None
        try:
            with closing(sqlite3.connect(staged)) as copy:
                keeper.backup(copy)
            # SQLite leaves the log of a file without a name alone, and would read it as that of the next one.
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            # Another process may have been faster: its copy is the same.
            if not self._path.exists():
                staged.rename(self._path)
        except (OSError, sqlite3.Error) as e:
            raise DatabaseWriteError(
                f"The database {self._path} was deleted while in use, and cannot be written again ({e}). "
                f"Make the folder {self._path.parent} one that can be written, and run the command again."
            ) from e
        finally:
            staged.unlink(missing_ok=True)
        self._drop(reopen)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
