"""A damaged file ends in one kind of error, whatever was damaged."""

from __future__ import annotations

import io
import random
import sqlite3
from pathlib import Path

import pytest

from relaxtune.tuning_db.errors import DatabaseOpenError, TuningDatabaseError
from relaxtune.tuning_db.exchange.archive import export_archive
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.sql.migrate import VERSION_TABLE
from relaxtune.tuning_db.store import TuningDatabase
from tests.tuning_db.exchange.filled import fill


@pytest.fixture
def path(samples, tmp_path: Path) -> Path:
    path = tmp_path / "tuning.db"
    with TuningDatabase.open(path) as database:
        fill(database, samples)
    return path


def _read_all(path: Path) -> None:
    with TuningDatabase.open(path, mode=Mode.READ_ONLY, create=False) as database:
        database.list_records()
        database.list_jobs()
        database.list_artifacts()
        database.list_benchmarks()
        export_archive(database, io.BytesIO())


def test_flipped_bytes_are_an_error_of_the_database_or_change_nothing(path: Path) -> None:
    content, drawn = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(25):
        damaged = bytearray(content)
        for _ in range(30):
            damaged[drawn.randrange(len(damaged))] ^= 1 << drawn.randrange(8)
        path.write_bytes(damaged)
        try:
            _read_all(path)
        except TuningDatabaseError:
            refused += 1
    assert refused > 5


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("records", "environment_id", 77),
        ("records", "created_at", "2020-13-99"),
        ("records", "latencies", "[1,null]"),
        ("jobs", "model", b"\xff\xfe"),
        ("jobs", "options", "[" * 100_000),
        ("targets", "attributes", "[[[["),
        ("environments", "device_name", b"\xff"),
    ],
)
def test_a_value_that_no_column_has_is_called_damage(path: Path, table: str, column: str, value: object) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA foreign_keys = off")
        connection.execute("PRAGMA ignore_check_constraints = on")
        connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
    with pytest.raises(DatabaseOpenError, match=r"is damaged: a row cannot be read .*Restore it from a copy"):
        _read_all(path)


def test_two_versions_are_called_damage(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"INSERT INTO {VERSION_TABLE} VALUES ('other')")
    with pytest.raises(DatabaseOpenError, match="is damaged"):
        _read_all(path)
