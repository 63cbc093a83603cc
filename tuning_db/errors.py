"""Errors of the tuning database.

::

    TuningDatabaseError
    ├── DatabaseUrlError       a URL that cannot be read, an unknown dialect, a missing driver
    ├── DatabaseOpenError      a missing, unreadable, damaged or foreign database
    │   └── DatabaseLostError  the server went away, and did not come back while it was waited for
    ├── SchemaVersionError     a schema older or newer than this relaxtune
    ├── DatabaseBusyError      still locked by others after every retry
    ├── DatabaseWriteError     read-only mode, file or folder; disk full
    ├── InvalidRecordError     a value that must not be stored, because it would lie
    ├── ExchangeError          an imported file is damaged, hostile or of another version; a file cannot be written
    └── NotFoundError          a `get_*` found nothing

A message says what happened, to which object, expected against got, and how to go on.
"""

from __future__ import annotations


class TuningDatabaseError(Exception):
    """Base of every error that leaves `tuning_db`."""


class DatabaseUrlError(TuningDatabaseError):
    """The database URL cannot be used: its form, its dialect, or its driver."""


class DatabaseOpenError(TuningDatabaseError):
    """There is no usable tuning database behind the URL."""


class DatabaseLostError(DatabaseOpenError):
    """The server went away after it had answered."""


class SchemaVersionError(TuningDatabaseError):
    """The schema of the database is older or newer than this relaxtune expects."""


class DatabaseBusyError(TuningDatabaseError):
    """Other writers held the lock longer than all retries together."""


class DatabaseWriteError(TuningDatabaseError):
    """The database cannot be written: opened read-only, protected, or the disk is full."""


class InvalidRecordError(TuningDatabaseError):
    """The value is refused, because stored as it is it would not be true."""


class NotFoundError(TuningDatabaseError):
    """A `get_*` call found no such object."""


class ExchangeError(TuningDatabaseError):
    """A file to import is refused, with its line; or a file to export cannot be written."""
