from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import pytest

from relaxtune.tuning_db.errors import (
    DatabaseBusyError,
    DatabaseOpenError,
    DatabaseUrlError,
    DatabaseWriteError,
    TuningDatabaseError,
)
from relaxtune.tuning_db.sql.engine import parse_location, translate_error
from relaxtune.tuning_db.store import TuningDatabase


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("tuning.db", Path("tuning.db")),
        (Path("/tmp/tuning.db"), Path("/tmp/tuning.db")),
        ("sqlite:///relative.db", Path("relative.db")),
        ("sqlite:////tmp/absolute.db", Path("/tmp/absolute.db")),
        ("~/tuning.db", Path.home() / "tuning.db"),
    ],
)
def test_location_has_the_path_when_the_url_means_a_file(url, path):
    location = parse_location(url)
    assert location.path == path
    assert location.dialect == "sqlite"
    assert not location.is_memory


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_location_is_memory_when_the_url_names_no_file(url):
    assert parse_location(url).is_memory


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2"])
def test_location_uses_psycopg_3_and_hides_the_password_when_the_url_means_postgresql(scheme):
    location = parse_location(f"{scheme}://user:secret@host:5433/name")
    assert location.dialect == "postgresql"
    assert location.shown == "postgresql+psycopg://user:***@host:5433/name"
    assert location.path is None
    assert not location.is_memory


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "The database URL is empty: expected a path such as tuning.db"),
        ("mysql://host/name", "Unknown database dialect 'mysql' in 'mysql://host/name': expected"),
        ("http://example.org/x.db", "Unknown database dialect 'http'"),
        ("://nothing", "Cannot read the database URL '://nothing': expected"),
        ("sqlite:///x.db?mode=ro", "has a host or options: expected sqlite:///relative.db"),
        ("sqlite://host/x.db", "has a host or options"),
    ],
)
def test_url_is_refused_when_it_cannot_mean_a_database(url, message):
    with pytest.raises(DatabaseUrlError, match=message.replace("?", r"\?")):
        TuningDatabase.open(url)


def test_missing_driver_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DatabaseUrlError, match=r"psycopg 3 is not installed, .*'relaxtune\[postgres\]'"):
        TuningDatabase.open("postgresql://user:secret@localhost/name")


def test_folder_is_refused_when_a_file_is_expected(tmp_path):
    with pytest.raises(DatabaseOpenError, match=r"is a folder: expected a database file, for instance .*tuning\.db"):
        TuningDatabase.open(tmp_path)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(DatabaseOpenError, match=r"The folder .*missing of the database x\.db does not exist"):
        TuningDatabase.open(tmp_path / "missing" / "x.db")


def test_path_may_hold_characters_that_urls_reserve(tmp_path):
    path = tmp_path / "a b?c#d%20.db"
    TuningDatabase.open(path).close()
    assert path.exists()


class DriverError(Exception):
    """Stands for an error of a server that cannot be provoked here."""

    def __init__(self, sqlstate: str | None) -> None:
        super().__init__("text of the driver")
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("sqlstate", "expected", "message"),
    [
        ("40001", DatabaseBusyError, "stayed locked"),
        ("40P01", DatabaseBusyError, "stayed locked"),
        ("55P03", DatabaseBusyError, "stayed locked"),
        ("53100", DatabaseWriteError, "is full"),
        ("25006", DatabaseWriteError, "cannot be written"),
        ("42501", DatabaseWriteError, "cannot be written"),
        (None, DatabaseOpenError, "Check host, port, user and database name"),
        ("22003", TuningDatabaseError, "refused a statement"),
    ],
)
def test_postgresql_error_gets_the_error_that_says_what_to_do(sqlstate, expected, message):
    location = parse_location("postgresql://user:secret@host/name")
    error = translate_error(DriverError(sqlstate), location)
    assert type(error) is expected
    assert message in str(error)
    assert "secret" not in str(error)


def test_sqlite_error_without_a_rule_still_becomes_ours():
    connection = sqlite3.connect(":memory:")
    with pytest.raises(sqlite3.OperationalError) as raised:
        connection.execute("SELECT missing")
    connection.close()
    error = translate_error(raised.value, parse_location("x.db"))
    assert type(error) is TuningDatabaseError
    assert "refused a statement (no such column: missing)" in str(error)
