from __future__ import annotations

import math
import re
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, create_engine, text
from sqlalchemy.pool import StaticPool

from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.batches import (
    get_batch,
    list_attempts,
    list_batches,
    list_cells,
    move_cell,
    start_batch,
    take_batch,
)
from relaxtune.tuning_db.cell_states import CellSpec, CellState, Driver
from relaxtune.tuning_db.errors import DatabaseOpenError, SchemaVersionError
from relaxtune.tuning_db.features import list_features, record_features
from relaxtune.tuning_db.gates import list_gates, record_gate
from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import Mode, Route, Status
from relaxtune.tuning_db.sql.engine import make_engine, parse_location
from relaxtune.tuning_db.sql.migrate import alembic_config, known_revisions
from relaxtune.tuning_db.sql.schema import HEAD_REVISION, NAMING_CONVENTION, VERSION_TABLE, Base
from relaxtune.tuning_db.store import TuningDatabase, upgrade
from relaxtune.tuning_db.tags import MoveKind, TagMove, list_moves, record_move, stood_at

MADE = datetime(2026, 11, 20, 13, tzinfo=UTC)
ASSETS = Path(__file__).parent / "assets"


def restore(revision: str, path: Path) -> Path:
    """Write the stored database of a released schema to `path`."""
    connection = sqlite3.connect(path)
    connection.executescript((ASSETS / f"schema_{revision}.sql").read_text())
    connection.close()
    return path


def set_revision(path: Path, revision: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = ?", [revision])
    connection.commit()
    connection.close()


def test_head_revision_is_the_head_of_the_migrations():
    assert ScriptDirectory.from_config(alembic_config()).get_current_head() == HEAD_REVISION


def test_every_released_schema_has_a_stored_database():
    assert {f"schema_{revision}.sql" for revision in known_revisions()} == {p.name for p in ASSETS.glob("*.sql")}


def test_a_new_database_has_the_schema_of_the_models(database_url):
    with TuningDatabase.open(database_url) as database, database._engine.connect() as connection:
        options = {"target_metadata": Base.metadata, "version_table": VERSION_TABLE}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
        assert context.get_current_revision() == HEAD_REVISION


def words_of_schema(path):
    """Return the statements that make each table and index of a SQLite file, without the order of columns."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    connection.close()
    return {name: sorted(re.sub(r'[\s"]+', " ", part).strip(" ()") for part in sql.split(",")) for name, sql in rows}


def test_an_upgraded_database_has_the_schema_of_a_new_one(tmp_path):
    restore("0004", tmp_path / "old.db")
    upgrade(tmp_path / "old.db")
    TuningDatabase.open(tmp_path / "new.db").close()
    assert words_of_schema(tmp_path / "old.db") == words_of_schema(tmp_path / "new.db")


@pytest.mark.parametrize("revision", sorted(known_revisions()))
def test_stored_database_is_upgraded_and_used(path, samples, revision):
    restore(revision, path)
    assert upgrade(path) == revision
    assert upgrade(path) == HEAD_REVISION
    with TuningDatabase.open(path) as database:
        check_stored(database, samples, revision)


def make_schema(revision, connection):
    """Make the empty tables of a released schema: those of the models, less what came later."""
    old = MetaData()
    memory = sqlite3.connect(":memory:")
    memory.executescript((ASSETS / f"schema_{revision}.sql").read_text())
    engine = create_engine("sqlite://", creator=lambda: memory, poolclass=StaticPool)
    old.reflect(engine)
    made = MetaData(naming_convention=NAMING_CONVENTION)
    for table in Base.metadata.sorted_tables:
        if table.name in old.tables:
            copied = table.to_metadata(made)
            for column in set(copied.columns.keys()) - set(old.tables[table.name].columns.keys()):
                copied._columns.remove(copied.columns[column])
    made.create_all(connection)
    config = alembic_config()
    config.attributes["connection"] = connection
    command.stamp(config, revision)
    engine.dispose()


@pytest.mark.parametrize("revision", sorted(known_revisions()))
def test_stored_database_is_upgraded_and_used_in_postgresql_too(empty_postgres, path, samples, revision):
    location = parse_location(empty_postgres)
    engine = make_engine(location, read_only=False, create=False)
    with engine.begin() as connection:
        make_schema(revision, connection)
        copy_rows(restore(revision, path), connection)
    engine.dispose()
    if revision != HEAD_REVISION:
        with pytest.raises(SchemaVersionError, match=rf"has schema revision {revision}, .*relaxtune db upgrade --db"):
            TuningDatabase.open(empty_postgres)
    assert upgrade(empty_postgres) == revision
    with TuningDatabase.open(empty_postgres) as database:
        check_stored(database, samples, revision)
        with database._engine.connect() as connection:
            options = {"target_metadata": Base.metadata, "version_table": VERSION_TABLE}
            assert compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata) == []


def copy_rows(path, connection):
    """Copy the rows of a SQLite database into the same tables of PostgreSQL, and let its sequences follow."""
    source = create_engine(f"sqlite:///{path}")
    stored = MetaData()
    stored.reflect(source)
    there = MetaData()
    there.reflect(connection)
    with source.connect() as opened:
        for table in there.sorted_tables:
            if table.name == VERSION_TABLE:
                continue
            rows = [dict(row._mapping) for row in opened.execute(stored.tables[table.name].select())]
            if rows:
                # SQLite's times have no zone, and they are UTC.
                utc = [{k: v.replace(tzinfo=UTC) if isinstance(v, datetime) else v for k, v in r.items()} for r in rows]
                connection.execute(table.insert(), utc)
            if "id" in table.c and table.c.id.type.python_type is int and rows:
                connection.execute(
                    text(f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), max(id)) FROM {table.name}")
                )
    source.dispose()


def check_stored(database, samples, revision):
    workload = database.get_workload("hash1")
    assert workload == samples.workload()
    best = database.find_best(
        Question(workload_hash="hash1", signature_key=None, target=samples.target(), environment=samples.environment())
    )
    assert best.latencies_us == (12.5, 11.5, 13.5)
    assert best.created_at.isoformat() == "2026-11-20T12:00:00.000001+00:00"
    failure = next(r for r in database.list_records() if r.status is Status.RUN_ERROR)
    assert [repr(value) for value in failure.latencies_us] == ["nan", "inf", "-inf"]
    assert failure.error == "CUDA_ERROR_ILLEGAL_ADDRESS"
    (job,) = database.list_jobs()
    assert (job.model, job.outcome) == ("bert-base", "ok")
    assert database.list_job_tasks(job.id) == [JobTask("hash1", workload.tvm_version, 12, ("/layer.0/MatMul",), 1.5)]
    database.record_measurement(samples.record(route=Route.TEMPLATE, latencies_us=(1.0,)))
    assert database.count_records() == 3
    artifact = Artifact("bert-base", "0" * 64, samples.target(), '{"kernels":[]}', "out/bert", job.id, MADE)
    database.record_artifact(artifact)
    validation = Validation(artifact.key, samples.environment(), False, 3, math.inf, "{}", MADE)
    database.record_validation(validation)
    database.record_benchmark(Benchmark(artifact.key, samples.environment(), "ort", (9.0, 8.0), "{}", MADE))
    # The stored databases have them already, so they are kept once.
    assert database.list_artifacts() == [artifact]
    assert database.list_validations() == [validation]
    assert [benchmark.latency_us for benchmark in database.list_benchmarks()] == [8.5]
    record_features(database, "per-store/2", {1: np.array([[1.5, 0.0], [2.0, 3.0]])})
    (features,) = list_features(database, "per-store/2", samples.target())
    assert features.values.tolist() == [[1.5, 0.0], [2.0, 3.0]]
    later = revision == HEAD_REVISION
    check_batches(database, job.id, there=later)
    check_gates(database, artifact, kept=later)
    check_code_versions(database, job, known=later)
    check_tags(database, artifact.key, there=later)


def check_batches(database, job_id, *, there):
    """What a driver left of a batch is there to be taken up; an older database begins with none."""
    assert len(list_batches(database)) == there
    if not there:
        specs = [CellSpec("bert", "bert.onnx", "", "", "graph", "quick", "llvm", 1, "", "b" * 64)]
        batch = start_batch(database, key="b" * 64, name="night", path="night.toml", plan="", cells=specs)
        assert [cell.state for cell in list_cells(database, batch.id)] == [CellState.QUEUED]
        return
    batch = get_batch(database, "night")
    bert, gpt = list_cells(database, batch.id)
    assert (bert.state, bert.facts.shipped_ms, bert.facts.job_id, bert.dead) == (CellState.DONE, 1.25, job_id, False)
    assert (gpt.state, gpt.dead, gpt.driver, gpt.spec.max_latency_ms) == (
        CellState.TUNING,
        True,
        Driver("far-host", 7),
        2.5,
    )
    take_batch(database, batch.id)
    move_cell(database, batch.id, "gpt", CellState.IMPORTING)
    assert [one.number for one in list_attempts(database, batch.id)] == [1, 1, 2]


def check_tags(database, key, *, there):
    """The moves of a tag are there, and it can be moved on; an older database begins with none."""
    moves = list_moves(database)
    assert len(moves) == (3 if there else 0)
    record_move(database, TagMove("prod", len(moves) + 1, MoveKind.TAG, key, "ann@here", "again"))
    assert [move.kind.value for move in list_moves(database, "prod")][: len(moves)] == (
        ["tag", "promote", "rollback"] if there else []
    )
    assert stood_at(list_moves(database, "prod")) == [key] * (2 if there else 1)


def check_gates(database, artifact, *, kept):
    """What gates found is there."""
    gates = list_gates(database)
    expected = [(artifact.key, artifact.key, True, "ben@far-host", '{"passed":true}')] if kept else []
    assert [(one.artifact_key, one.baseline_key, one.passed, one.by, one.report) for one in gates] == expected
    made = record_gate(database, artifact, artifact, passed=False, by="ann@here", report="{}")
    assert list_gates(database)[0] == made


def check_code_versions(database, job, *, known):
    """Nothing is said of who made older records and jobs; a new record may say it."""
    told = "0.1.0+g0123456789ab" if known else None
    assert job.code_version == told
    assert {one.code_version for one in database.list_records() if one.route is Route.METASCHEDULE} == {told}


def test_older_schema_is_refused_with_the_command_that_upgrades_it(path):
    restore("0004", path)
    command = rf"Run: relaxtune db upgrade --db sqlite:///{path}$"
    with pytest.raises(SchemaVersionError, match=r"has schema revision 0004, this relaxtune needs 0007\. " + command):
        TuningDatabase.open(path)


def test_a_schema_between_two_releases_is_refused_with_the_way_by_an_archive(path):
    restore("0004", path)
    set_revision(path, "0005")
    message = r"has schema revision 0005, which no released relaxtune wrote\. .*db export.*db import"
    for open_ in (TuningDatabase.open, upgrade):
        with pytest.raises(SchemaVersionError, match=message):
            open_(path)


@pytest.mark.parametrize("mode", Mode)
def test_newer_schema_is_refused_with_the_command_that_upgrades_relaxtune(path, mode):
    restore("0004", path)
    set_revision(path, "9999")
    message = rf"has schema revision 9999, newer than {HEAD_REVISION}, .*pip install --upgrade relaxtune"
    with pytest.raises(SchemaVersionError, match=message):
        TuningDatabase.open(path, mode=mode)
    with pytest.raises(SchemaVersionError, match=message):
        upgrade(path)


def test_upgrade_makes_the_tables_of_an_empty_file_and_refuses_a_missing_one(path):
    with pytest.raises(DatabaseOpenError, match="There is no database"):
        upgrade(path)
    path.touch()
    assert upgrade(path) is None
    with TuningDatabase.open(path, create=False) as database:
        assert database.info().schema_revision == HEAD_REVISION


def test_nothing_is_left_when_making_the_tables_fails_midway(path, monkeypatch):
    monkeypatch.setattr(command, "stamp", None)
    with pytest.raises(TypeError):
        TuningDatabase.open(path)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    connection.close()
    monkeypatch.undo()
    with TuningDatabase.open(path) as database:
        assert database.count_records() == 0


def test_nothing_is_changed_when_a_migration_fails_midway(path, monkeypatch):
    restore("0004", path)
    before = words_of_schema(path)
    monkeypatch.setattr(MetaData, "create_all", None)
    with pytest.raises(TypeError):
        upgrade(path)
    assert words_of_schema(path) == before
    monkeypatch.undo()
    assert upgrade(path) == "0004"


def test_package_imports_without_tvm():
    modules = ", ".join(
        f"relaxtune.tuning_db.{name}" for name in ("store", "questions.queries", "lookup", "sql.migrate")
    )
    script = f"import sys, {modules}\nprint(sorted(m for m in sys.modules if m.split('.')[0] in ('tvm', 'tvm_ffi')))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
