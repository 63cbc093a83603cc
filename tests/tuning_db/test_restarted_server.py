"""A server that is restarted while it is in use: nothing is lost, and the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from relaxtune.tuning_db.errors import DatabaseLostError, DatabaseOpenError
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.sql.column_types import DamagedValueError
from relaxtune.tuning_db.sql.engine import make_engine, parse_location
from relaxtune.tuning_db.store import TuningDatabase
from tests.tuning_db.postgres_server import Server, restartable_server


@pytest.fixture
def server() -> Iterator[Server]:
    with restartable_server() as started:
        yield started


def test_reads_and_writes_wait_for_a_server_that_is_restarted(server, samples):
    with TuningDatabase.open(server.url) as database:
        database.record_workload(samples.workload())
        database.record_measurement(samples.record(seed=0))
        server.stop()
        back = threading.Timer(1.0, server.start)
        back.start()
        began = time.monotonic()
        database.record_measurements([samples.record(seed=seed) for seed in range(1, 300)])
        assert time.monotonic() - began > 0.9
        back.join()
        assert database.count_records() == 300


def test_a_connection_that_the_server_ends_in_its_first_transaction_is_made_again(server):
    location = parse_location(server.url)
    ended = []

    def work(session: Session) -> int:
        if not ended:
            ended.append(session.execute(text("SELECT pg_backend_pid()")).scalar_one())
            with psycopg.connect(server.url) as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", ended)
        return session.execute(text("SELECT 7")).scalar_one()

    with TuningDatabase(location, make_engine(location, read_only=False, create=False), Mode.TUNE) as database:
        assert database.read(work) == 7


@pytest.mark.slow
def test_a_server_that_is_away_as_a_run_starts_is_waited_for(server, samples, caplog):
    server.stop()
    back = threading.Timer(1.0, server.start)
    back.start()
    began = time.monotonic()
    with TuningDatabase.open(server.url) as database:
        assert time.monotonic() - began > 0.9
        database.record_workload(samples.workload())
        database.record_measurement(samples.record(seed=0))
        assert database.count_records() == 1
    back.join()
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "does not answer: waiting for up to 10 s" in told


def test_a_server_that_refuses_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr("relaxtune.tuning_db.sql.transactions.START_WAIT_S", 1e9)
    with pytest.raises(DatabaseOpenError, match="not exist"):
        TuningDatabase.open(server.url.replace("/postgres?", "/misspelt?"))


def test_a_damaged_row_is_no_server_that_went_away(server, monkeypatch):
    monkeypatch.setattr("relaxtune.tuning_db.sql.transactions.RECONNECT_WAIT_S", 1e9)

    def damaged(_: Session) -> None:
        raise DamagedValueError("no such status")

    with TuningDatabase.open(server.url) as database:
        with pytest.raises(DatabaseOpenError, match="is damaged") as raised:
            database.read(damaged)
        assert not isinstance(raised.value, DatabaseLostError)


@pytest.mark.slow
def test_a_server_that_stays_away_is_told_and_its_return_is_enough(server, samples, monkeypatch):
    for name in ("RECONNECT_WAIT_S", "START_WAIT_S"):
        monkeypatch.setattr(f"relaxtune.tuning_db.sql.transactions.{name}", 0.5)
    with TuningDatabase.open(server.url) as database:
        database.record_workload(samples.workload())
        server.stop()
        with pytest.raises(DatabaseLostError):
            database.record_measurement(samples.record(seed=0))
        with pytest.raises(DatabaseOpenError) as raised:
            TuningDatabase.open(server.url)
        assert not isinstance(raised.value, DatabaseLostError)
        server.start()
        database.record_measurement(samples.record(seed=0))
        assert database.count_records() == 1
