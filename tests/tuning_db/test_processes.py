"""Many processes on one database: nothing lost, nothing doubled, nothing half; over SQLite and PostgreSQL."""

from __future__ import annotations

import random
import sqlite3
import time
from pathlib import Path

import pytest

from relaxtune.tuning_db.records import RecordFilter, Status
from relaxtune.tuning_db.sql.statements import select_records
from relaxtune.tuning_db.store import TuningDatabase

WRITER = """
import os, sys
from relaxtune.tuning_db.records import *
from relaxtune.tuning_db.store import TuningDatabase
url, log, writer, count, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
workload = Workload("w", "matmul", "{}", "w", 1.0, 1.0, None, "0.27")
environment = Environment("cpu", "EPYC", "znver4", None, None, "0.27", "0.1", 2)
journal = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with TuningDatabase.open(url) as database:
    database.record_workload(workload)
    print("ready", flush=True)
    sys.stdin.readline()
    for start in range(0, count, batch):
        seeds = range(writer * 10**6 + start, writer * 10**6 + min(start + batch, count))
        database.record_measurements([
            TuningRecord("w", workload.signature_key, TargetKey("llvm", "znver4"), environment, Route.METASCHEDULE,
                         "[]", Status.OK, (1.0 + seed,), seed=seed)
            for seed in seeds
        ])
        # The commit log: a batch is in it only after its commit was acknowledged.
        os.write(journal, "".join(f"{seed}\\n" for seed in seeds).encode())
print("done", flush=True)
"""

READER = """
import sys
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import *
from relaxtune.tuning_db.store import TuningDatabase
url = sys.argv[1]
environment = Environment("cpu", "EPYC", "znver4", None, None, "0.27", "0.1", 2)
target = TargetKey("llvm", "znver4")
with TuningDatabase.open(url, mode=Mode.READ_ONLY) as database:
    print("ready", flush=True)
    sys.stdin.readline()
    seen = reads = 0
    while True:
        count = database.count_records()
        assert count >= seen, (count, seen)
        assert count % int(sys.argv[2]) == 0, f"part of a batch: {count}"
        seen = count
        best = database.find_best(Question("w", None, target, environment))
        assert best is not None or count == 0
        reads += 1
        if count >= int(sys.argv[3]):
            break
print(f"done {reads}", flush=True)
"""


@pytest.fixture(params=["sqlite-file", "postgresql"])
def shared_url(request, path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_url")
    TuningDatabase.open(path).close()
    return f"sqlite:///{path}"


def run_together(python, url, folder: Path, *, writers: int, records: int, batch: int, readers: int) -> None:
    """Let writers and readers loose at once, and check what is there in the end."""
    processes = [python(WRITER, url, folder / f"log{n}", n, records, batch) for n in range(writers)]
    processes += [python(READER, url, batch, writers * records) for _ in range(readers)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        # A caller that saw "database is locked" would have ended with an error.
        assert process.stdout.readline().startswith("done"), process.wait()
        assert process.wait() == 0
    expected = sorted(n * 10**6 + seed for n in range(writers) for seed in range(records))
    with TuningDatabase.open(url) as database:
        assert sorted(record.seed for record in database.list_records()) == expected
        assert database.count_records(RecordFilter(status=Status.OK)) == len(expected)
        assert len(database.list_workloads()) == 1
        assert database.info().environments == database.info().targets == 1


def test_nothing_is_lost_or_doubled_when_processes_write_and_read_at_once(shared_url, tmp_path, python):
    run_together(python, shared_url, tmp_path, writers=3, records=60, batch=4, readers=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_is_lost_or_doubled_when_16_processes_commit_2000_records_each(shared_url, tmp_path, python):
    run_together(python, shared_url, tmp_path, writers=16, records=2000, batch=10, readers=4)


@pytest.fixture(params=["sqlite-file", "postgresql"])
def empty_url(request, path):
    return request.getfixturevalue("empty_postgres") if request.param == "postgresql" else f"sqlite:///{path}"


def test_first_creation_by_many_processes_at_once_is_safe(empty_url, tmp_path, python):
    run_together(python, empty_url, tmp_path, writers=4, records=8, batch=4, readers=0)


def test_reader_that_asks_twice_sees_one_state(shared_url, samples):
    with TuningDatabase.open(shared_url) as writer, TuningDatabase.open(shared_url) as reader:
        writer.record_workload(samples.workload())

        def ask_twice(session):
            first = len(session.execute(select_records()).all())
            writer.record_measurement(samples.record(seed=first))
            return first, len(session.execute(select_records()).all())

        assert reader.read(ask_twice) == (0, 0)
        assert reader.read(ask_twice) == (1, 1)
        assert reader.count_records() == 2


def kill_writers(python, url, folder: Path, *, kills: int, seed: int) -> tuple[set[int], set[int], int]:
    """Kill writers one after another at random moments; return what was acknowledged, what is there, and the kills.

    More than asked for, where none lived long enough to commit: on a busy machine its moment may come too soon.
    """
    moments = random.Random(seed)
    log = folder / "log"
    number = 0
    while number < kills or (not log.stat().st_size and number < 20 * kills):
        writer = python(WRITER, url, log, number, 100_000, 3)
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n")
        writer.stdin.flush()
        time.sleep(moments.uniform(0.0, 0.05))
        writer.kill()
        writer.wait()
        number += 1
        # Opens clean, at once, each time.
        with TuningDatabase.open(url) as database:
            database.count_records()
    # A log line may be cut by the kill itself; it was acknowledged whole or its number is not yet written.
    text = log.read_text() if log.exists() else ""
    acknowledged = {int(line) for line in text.splitlines()}
    with TuningDatabase.open(url) as database:
        return acknowledged, {record.seed for record in database.list_records()}, number


def check_kills(acknowledged: set[int], kept: set[int], kills: int) -> None:
    assert acknowledged, "no writer lived long enough to commit"
    assert acknowledged <= kept
    # A batch of three may be committed and its writer killed before it could say so: one batch a writer at most.
    assert len(kept - acknowledged) <= 3 * kills
    for writer in {seed // 10**6 for seed in kept}:
        own = sorted(seed % 10**6 for seed in kept if seed // 10**6 == writer)
        assert own == list(range(len(own)))
        assert len(own) % 3 == 0, "part of a batch was kept"


def test_acknowledged_batches_are_whole_when_writers_are_killed(shared_url, tmp_path, python):
    check_kills(*kill_writers(python, shared_url, tmp_path, kills=3, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_acknowledged_batches_are_whole_when_writers_are_killed_at_100_moments(shared_url, tmp_path, python):
    check_kills(*kill_writers(python, shared_url, tmp_path, kills=100, seed=2))
    if shared_url.startswith("sqlite"):
        connection = sqlite3.connect(shared_url.removeprefix("sqlite:///"))
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
