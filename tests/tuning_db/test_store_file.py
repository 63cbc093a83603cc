"""What only a database file can meet: other processes, kills, full disks, protection, damage."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import event

from relaxtune.tuning_db.errors import DatabaseBusyError, DatabaseOpenError, DatabaseWriteError, TuningDatabaseError
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase

COMMIT = """
import sys
from relaxtune.tuning_db.records import *
from relaxtune.tuning_db.store import TuningDatabase
path, start, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.stdin.readline()
workload = Workload("w", "matmul", "{}", "w", 1.0, 1.0, None, "0.27")
environment = Environment("cpu", "EPYC", "znver4", None, None, "0.27", "0.1", 2)
with TuningDatabase.open(path) as database:
    database.record_workload(workload)
    for seed in range(start, start + count):
        record = TuningRecord("w", workload.signature_key, TargetKey("llvm", "znver4"), environment, Route.METASCHEDULE,
                              "[]", Status.OK, (1.0,), seed=seed)
        database.record_measurement(record)
        print(seed, flush=True)
"""

FILL = """
import sys
from relaxtune.tuning_db.records import *
from relaxtune.tuning_db.errors import DatabaseWriteError
from relaxtune.tuning_db.store import TuningDatabase
workload = Workload("w", "matmul", "{}", "w", 1.0, 1.0, None, "0.27")
environment = Environment("cpu", "EPYC", "znver4", None, None, "0.27", "0.1", 2)
target = TargetKey("llvm", "znver4")
kept = 0
with TuningDatabase.open(sys.argv[1]) as database:
    database.record_workload(workload)
    try:
        while True:
            database.record_measurements([
                TuningRecord("w", workload.signature_key, target, environment, Route.METASCHEDULE, "x" * 20_000,
                             Status.OK, (1.0,), seed=kept + n)
                for n in range(2)
            ])
            kept += 2
    except DatabaseWriteError as e:
        print(kept, e, sep="\\n")
with TuningDatabase.open(sys.argv[1], mode=Mode.READ_ONLY) as database:
    assert [record.seed for record in database.list_records()] == list(range(kept))
    print(database.count_records())
"""

PROTECTED = """
import os, sys, tempfile
from relaxtune.tuning_db.records import *
from relaxtune.tuning_db.errors import TuningDatabaseError
from relaxtune.tuning_db.store import TuningDatabase
TuningDatabase.open("sqlite://").close()
if os.geteuid() == 0:
    os.setuid(65534)
try:
    with TuningDatabase.open(sys.argv[1], mode=Mode(sys.argv[2])) as database:
        print(database.info().workloads)
        database.record_workload(Workload("x", "matmul", "{}", "x", 1.0, 1.0, None, "0.27"))
except TuningDatabaseError as e:
    print(f"{type(e).__name__}: {e}")
"""


@pytest.fixture
def open_folder():
    """Return a folder that every user can reach; pytest's own is private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_every_record_is_kept_once_when_four_processes_create_and_write(path, python):
    writers = [python(COMMIT, path, number * 100, 5) for number in range(4)]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        assert writer.wait(60) == 0
    with TuningDatabase.open(path) as database:
        seeds = sorted(record.seed for record in database.list_records())
        assert seeds == [number * 100 + n for number in range(4) for n in range(5)]
        assert len(database.list_workloads()) == 1


def test_write_fails_with_a_clear_error_and_keeps_earlier_records_when_the_disk_is_full(path, samples):
    with TuningDatabase.open(path) as database:
        database.record_workload(samples.workload())
        database.record_measurement(samples.record())

        # SQLite says "full" alike for its own page limit and for the disk.
        @event.listens_for(database._engine, "begin")
        def limit(connection):
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

        batch = [samples.record(seed=seed, decision='"' + "x" * 5000 + '"') for seed in range(20)]
        with pytest.raises(
            DatabaseWriteError, match=r"disk of the database .* is full .*earlier records are whole.*Free"
        ):
            database.record_measurements(batch)
        assert database.count_records() == 1
    with TuningDatabase.open(path) as database:
        assert database.list_records()[0].latency_us == 12.5


def test_earlier_records_are_whole_after_a_real_disk_is_full(tmp_path):
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    command = 'mount -t tmpfs -o size=3m none "$1" && exec "$2" -c "$3" "$1/tuning.db"'
    done = subprocess.run(
        [*unshare, "sh", "-c", command, "sh", str(tmp_path), sys.executable, FILL],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    acknowledged, message, kept = done.stdout.splitlines()
    assert 0 < int(acknowledged) == int(kept)
    assert "The disk of the database sqlite:///" in message
    assert "Free some space" in message


def test_writer_waits_and_reader_does_not_when_another_holds_the_lock(path, samples):
    with TuningDatabase.open(path) as database:
        holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        holder.execute("BEGIN IMMEDIATE")
        assert database.list_workloads() == []
        release = threading.Timer(0.3, holder.execute, ["ROLLBACK"])
        start = time.monotonic()
        release.start()
        database.record_workload(samples.workload())
        assert time.monotonic() - start >= 0.25
        release.join()
        holder.close()
        assert database.has_workload("hash1")


def test_a_writer_that_met_the_lock_thirty_times_still_gets_its_turn(path, samples, monkeypatch):
    with TuningDatabase.open(path) as database:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        pauses = []

        def sleep(seconds):
            pauses.append(seconds)
            if len(pauses) == 30:
                holder.execute("ROLLBACK")

        monkeypatch.setattr("relaxtune.tuning_db.sql.transactions.sleep", sleep)
        database.record_workload(samples.workload())
        holder.close()
        assert len(pauses) == 30
        # The pauses of those who wait long are no longer than those of newcomers.
        assert max(pauses) <= 0.05


def test_busy_error_is_raised_when_the_lock_is_never_free(path, samples, monkeypatch):
    monkeypatch.setattr("relaxtune.tuning_db.sql.engine.BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr("relaxtune.tuning_db.sql.transactions.LOCK_WAIT_S", 0.1)
    with TuningDatabase.open(path) as database:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseBusyError, match=r"stayed locked by other writers .*Run the command again"):
            database.record_workload(samples.workload())
        holder.close()


def test_read_only_mode_reads_and_refuses_writes(path, samples):
    with TuningDatabase.open(path) as database:
        database.record_workload(samples.workload())
    content = path.read_bytes()
    with TuningDatabase.open(path, mode=Mode.READ_ONLY) as database:
        assert database.mode is Mode.READ_ONLY
        assert database.has_workload("hash1")
        with pytest.raises(DatabaseWriteError, match=r"opened in mode read-only\. Open it in mode tune to write"):
            database.record_workload(samples.workload(2))
    assert path.read_bytes() == content


def test_read_only_mode_sees_what_a_writer_commits_meanwhile(path, samples):
    with TuningDatabase.open(path) as writer, TuningDatabase.open(path, mode=Mode.READ_ONLY) as reader:
        assert not reader.has_workload("hash1")
        writer.record_workload(samples.workload())
        assert reader.has_workload("hash1")


def test_read_only_mode_creates_nothing_when_there_is_no_database(path):
    with pytest.raises(
        DatabaseOpenError,
        match=r"There is no database at .*tuning\.db\. `relaxtune tune MODEL --db .* made by: relaxtune db init",
    ):
        TuningDatabase.open(path, mode=Mode.READ_ONLY)
    with pytest.raises(DatabaseOpenError, match="There is no database"):
        TuningDatabase.open(path, create=False)
    assert not path.exists()


@pytest.mark.parametrize("options", [{"mode": Mode.READ_ONLY}, {"create": False}])
def test_empty_file_is_refused_when_it_may_not_be_filled(path, options):
    path.touch()
    with pytest.raises(
        DatabaseOpenError, match=r"is empty\. Create its tables with: relaxtune db init --db sqlite:///"
    ):
        TuningDatabase.open(path, **options)


def test_protected_folder_is_refused_when_the_database_has_to_be_made(open_folder, python):
    answer = python(PROTECTED, open_folder / "new.db", "tune").communicate()[0]
    assert answer.startswith("DatabaseOpenError: Cannot open the database sqlite:///")
    assert "Check that the file and its folder can be read and written" in answer
    assert list(open_folder.iterdir()) == []


def test_protected_file_is_read_but_not_written(open_folder, python, samples):
    path = open_folder / "tuning.db"
    with TuningDatabase.open(path) as database:
        database.record_workload(samples.workload())
    path.chmod(0o444)
    open_folder.chmod(0o555)
    count, refusal = python(PROTECTED, path, "read-only").communicate()[0].splitlines()
    assert count == "1"
    assert refusal.startswith("DatabaseWriteError: The database")
    assert "opened in mode read-only" in refusal
    refusal = python(PROTECTED, path, "tune").communicate()[0].splitlines()[-1]
    assert refusal.startswith(("DatabaseWriteError", "DatabaseOpenError")), refusal


def test_unreadable_file_is_refused(open_folder, python):
    path = open_folder / "tuning.db"
    TuningDatabase.open(path).close()
    path.chmod(0o000)
    assert (
        python(PROTECTED, path, "read-only").communicate()[0].startswith("DatabaseOpenError: Cannot open the database")
    )


def test_file_that_is_no_database_is_refused_and_left_alone(path):
    path.write_text("not a database, but long enough to have a header " * 20)
    before = path.read_bytes()
    with pytest.raises(
        DatabaseOpenError, match=r"is not a database or is damaged \(file is not a database\)\. Restore it"
    ):
        TuningDatabase.open(path)
    assert path.read_bytes() == before


def test_damaged_page_is_reported_when_it_is_read(path, samples):
    with TuningDatabase.open(path) as database:
        database.record_workload(samples.workload())
        database.record_measurements([samples.record(seed=seed, decision='"' + "x" * 3000 + '"') for seed in range(50)])
    with path.open("r+b") as stream:
        stream.seek(4096 * 2)
        stream.write(os.urandom(4096 * 60))
    with pytest.raises(DatabaseOpenError, match="is damaged"), TuningDatabase.open(path) as database:
        database.list_records()


def test_file_of_another_application_is_refused_and_left_alone(path):
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE songs (name TEXT)")
    other.close()
    with pytest.raises(DatabaseOpenError, match=r"holds 1 tables of another application .*'songs'.*of its own"):
        TuningDatabase.open(path)


def test_sqlite_file_has_wal_and_checks_foreign_keys(path):
    with TuningDatabase.open(path) as database, database._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2


@pytest.mark.parametrize(
    "damage",
    ["status = 'nix'", "created_at = '2026-11k22'", "latencies = '[1'", "decision = CAST(x'ff' AS TEXT)"],
)
def test_a_row_that_cannot_be_read_is_one_error(path, samples, damage):
    with TuningDatabase.open(path) as database:
        database.record_workload(samples.workload())
        database.record_measurement(samples.record())
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute(f"UPDATE records SET {damage}")
    connection.commit()
    connection.close()
    with TuningDatabase.open(path) as database, pytest.raises(TuningDatabaseError):
        database.list_records()


@pytest.mark.parametrize("fault", [ValueError("a defect"), KeyError("defect")])
def test_a_defect_inside_a_transaction_is_not_called_a_damaged_file(path, fault):
    def work(_):
        raise fault

    with TuningDatabase.open(path) as database, pytest.raises(type(fault), match="defect"):
        database.write(work)
