"""A SQLite file that is deleted or replaced while it is in use: nothing is lost without a word."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from relaxtune.tuning_db.errors import DatabaseWriteError
from relaxtune.tuning_db.store import SqlDatabase


def delete(path: Path, suffixes: tuple[str, ...]) -> None:
    for suffix in suffixes:
        path.with_name(path.name + suffix).unlink()


@pytest.mark.parametrize("suffixes", [("",), ("", "-wal", "-shm")])
def test_a_deleted_file_is_written_again_with_all_that_was_in_it(tmp_path, samples, caplog, suffixes) -> None:
    path = tmp_path / "tuning.db"
    with SqlDatabase.open(path) as database, SqlDatabase.open(path) as other:
        database.record_workload(samples.workload())
        other.record_measurement(samples.record(seed=0))
        delete(path, suffixes)
        database.record_measurement(samples.record(seed=1))
        other.record_measurement(samples.record(seed=2))
    assert "was deleted while in use: it is written again, whole" in caplog.text
    with SqlDatabase.open(path, create=False) as again:
        assert sorted(record.seed or 0 for record in again.list_records()) == [0, 1, 2]
    assert [one.name for one in tmp_path.iterdir()] == ["tuning.db"]


def test_a_replaced_file_is_told_and_used(tmp_path, samples, caplog) -> None:
    path, copy = tmp_path / "tuning.db", tmp_path / "copy.db"
    with SqlDatabase.open(copy) as database:
        database.record_workload(samples.workload())
    shutil.copy(copy, path)
    with SqlDatabase.open(path) as database:
        database.record_measurement(samples.record(seed=0))
        delete(path, ("", "-wal", "-shm"))
        copy.rename(path)
        database.record_measurement(samples.record(seed=1))
        assert [record.seed for record in database.list_records()] == [1]
    assert "was replaced while in use" in caplog.text


def test_a_deleted_folder_is_an_error_and_its_return_is_enough(tmp_path, samples) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with SqlDatabase.open(folder / "tuning.db") as database:
        database.record_workload(samples.workload())
        shutil.rmtree(folder)
        with pytest.raises(DatabaseWriteError, match="was deleted while in use, and cannot be written again"):
            database.record_measurement(samples.record(seed=0))
        folder.mkdir()
        database.record_measurement(samples.record(seed=0))
    with SqlDatabase.open(folder / "tuning.db") as again:
        assert again.count_records() == 1
