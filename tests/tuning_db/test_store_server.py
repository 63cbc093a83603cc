"""What only a PostgreSQL server can meet: users who may not write, a server that is read-only, full or gone."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
import pytest

from relaxtune.tuning_db.errors import DatabaseOpenError, DatabaseWriteError
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.sql.engine import make_engine, parse_location
from relaxtune.tuning_db.store import TuningDatabase
from tests.tuning_db.postgres_server import UNPRIVILEGED

ROOT = Path(__file__).parents[2]

FILL = """
import sys
sys.path.insert(0, sys.argv[1])
import psycopg
from tests.tuning_db.conftest import Samples
from tests.tuning_db.postgres_server import running_server
from relaxtune.tuning_db.errors import DatabaseWriteError
from relaxtune.tuning_db.store import TuningDatabase

samples = Samples()
with running_server() as server:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE TABLESPACE small LOCATION '{sys.argv[2]}'")
        connection.execute("CREATE DATABASE small TABLESPACE small")
    url = server.replace("/postgres?", "/small?")
    kept = 0
    with TuningDatabase.open(url) as database:
        database.record_workload(samples.workload())
        try:
            for number in range(1000):
                # Text that does not compress, or a million bytes of it would take none.
                decision = "".join(chr(33 + (number * 7919 + at * at * 31) % 8000) for at in range(40_000))
                records = [samples.record(seed=2 * number + n, decision=decision) for n in range(2)]
                database.record_measurements(records)
                kept += 2
        except DatabaseWriteError as e:
            print(e)
        assert database.count_records() == kept, "part of a batch was kept"
    with TuningDatabase.open(url, create=False) as database:
        seeds = [record.seed for record in database.list_records()]
        assert seeds == list(range(kept)), "an acknowledged record is lost"
        print("kept", kept)
"""


@pytest.fixture
def filled(postgres_url, samples):
    """Return the URL of a database with one record."""
    with TuningDatabase.open(postgres_url) as database:
        database.record_workload(samples.workload())
        database.record_measurement(samples.record())
    return postgres_url


def refused_write(url, samples, match):
    with TuningDatabase.open(url) as database:
        with pytest.raises(DatabaseWriteError, match=match):
            database.record_measurements([samples.record(seed=seed) for seed in range(200)])
        with pytest.raises(DatabaseWriteError, match=match):
            database.record_measurement(samples.record(seed=1))
        assert [record.seed for record in database.list_records()] == [None]


def test_user_who_may_only_read_reads_and_is_told_so_at_the_first_write(filled, samples):
    with psycopg.connect(filled, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS reader")
        connection.execute("CREATE ROLE reader LOGIN")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
    url = filled.replace("postgres@", "reader@")
    try:
        refused_write(url, samples, r"cannot be written \(permission denied .*Name a user who may write")
        with TuningDatabase.open(url, mode=Mode.READ_ONLY) as database:
            assert database.count_records() == 1
    finally:
        with psycopg.connect(filled, autocommit=True) as connection:
            connection.execute("DROP OWNED BY reader")
            connection.execute("DROP ROLE reader")


def test_read_only_server_refuses_writes_and_is_read(filled, samples):
    # As a standby does, or a primary that was set to it.
    url = f"{filled}&options=-c%20default_transaction_read_only%3Don"
    refused_write(url, samples, r"cannot be written \(cannot execute .* in a read-only transaction\).*mode read-only")


def test_mode_read_only_is_kept_by_the_server_too(filled, samples):
    with TuningDatabase.open(filled, mode=Mode.READ_ONLY) as database:
        with pytest.raises(DatabaseWriteError, match="opened in mode read-only"):
            database.record_measurement(samples.record(seed=1))
        with pytest.raises(DatabaseWriteError, match="read-only transaction"):
            database.read(lambda session: session.connection().exec_driver_sql("DELETE FROM records"))
        assert database.count_records() == 1


def test_empty_database_is_refused_when_its_user_may_not_make_tables(empty_postgres):
    with psycopg.connect(empty_postgres, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN")
    url = empty_postgres.replace("postgres@", "guest@")
    with pytest.raises(DatabaseWriteError, match="permission denied for schema public"):
        TuningDatabase.open(url)
    with pytest.raises(DatabaseOpenError, match=r"is empty\. Create its tables with: relaxtune db init"):
        TuningDatabase.open(url, create=False)


def test_server_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("relaxtune.tuning_db.sql.transactions.START_WAIT_S", 0.0)
    with pytest.raises(DatabaseOpenError, match=r"Cannot reach the database .*Check host, port"):
        TuningDatabase.open(f"postgresql://postgres@/nix?host={tmp_path}")


def test_connection_that_the_server_closed_is_made_anew(filled, samples):
    with TuningDatabase.open(filled) as database:
        assert database.count_records() == 1
        with psycopg.connect(filled, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        assert database.count_records() == 1
        database.record_measurement(samples.record(seed=1))
        assert database.count_records() == 2


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the small disk that the server's user writes to")
def test_full_disk_of_the_server_is_told_and_earlier_records_are_whole():
    folder = tempfile.mkdtemp(prefix="disk")
    try:
        options = f"size=24m,uid={pwd.getpwnam(UNPRIVILEGED).pw_uid}"
        command = f'mount -t tmpfs -o {options} none "$1" && exec "$2" -c "$3" "$4" "$1"'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", command, "sh", folder, sys.executable, FILL, str(ROOT)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        os.rmdir(folder)
    assert done.returncode == 0, done.stderr
    message, kept = done.stdout.splitlines()
    assert "The disk of the database postgresql" in message
    assert "No space left on device" in message
    assert "earlier records are whole. Free some space" in message
    assert int(kept.removeprefix("kept ")) > 0


def test_statements_are_planned_for_the_tables_as_they_are(postgres_url):
    engine = make_engine(parse_location(postgres_url), read_only=False, create=False)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW plan_cache_mode").scalar_one() == "force_custom_plan"
    engine.dispose()
