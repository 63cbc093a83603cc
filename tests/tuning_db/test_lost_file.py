"""A SQLite file that is deleted or replaced while it is in use: nothing is written where nobody would find it."""

from __future__ import annotations

import shutil

import pytest

from relaxtune.tuning_db.errors import DatabaseWriteError
from relaxtune.tuning_db.store import TuningDatabase


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_lost_its_name_is_not_written(tmp_path, samples, replaced) -> None:
    path, copy = tmp_path / "tuning.db", tmp_path / "copy.db"
    with TuningDatabase.open(copy):
        pass
    shutil.copy(copy, path)
    with TuningDatabase.open(path) as database:
        database.record_workload(samples.workload())
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        if replaced:
            copy.rename(path)
        with pytest.raises(DatabaseWriteError, match=r"tuning\.db was deleted or replaced while in use"):
            database.record_measurement(samples.record(seed=0))
    with TuningDatabase.open(path) as again:
        again.record_workload(samples.workload())
        again.record_measurement(samples.record(seed=1))
        assert again.count_records() == 1
