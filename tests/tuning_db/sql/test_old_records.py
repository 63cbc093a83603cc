"""Records of every released schema are true after the upgrade."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import MetaData, insert, select

from relaxtune.pipeline.choose.record_lookup import RecordLookup, without_stale
from relaxtune.pipeline.choose.replay import replay_record
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.tuning.task_start import template_candidates
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import RecordFilter, Route
from relaxtune.tuning_db.sql.engine import make_engine, parse_location
from relaxtune.tuning_db.sql.migrate import known_revisions
from relaxtune.tuning_db.store import TuningDatabase, upgrade
from tests.pipeline.artifact.test_compile import fallback_record, keep, parallel_trace, record_of
from tests.pipeline.choose.test_template_route import template_record
from tests.pipeline.tuning.test_gpu import half_matmul
from tests.pipeline.tuning.tuning_cases import task_of
from tests.tuning_db.sql.test_migrate import make_schema

TARGET = resolve_target("cuda:sm_90a")


@pytest.fixture(scope="module")
def task():
    return task_of("half", half_matmul(128))


@pytest.fixture(scope="module")
def today(task, tmp_path_factory):
    """Return a database of this version with a record of each route."""
    database = TuningDatabase.open(tmp_path_factory.mktemp("today") / "tuning.db")
    template = template_record(task, template_candidates(task, TARGET)[0].decision, TARGET)
    trace = record_of(task, TARGET, decision=parallel_trace(task), environment=template.environment)
    for record in (template, replace(fallback_record(task, TARGET), environment=template.environment), trace):
        keep(database, task, record)
    return database


def write_at(revision: str, url: str, source: TuningDatabase) -> None:
    """Make a database of an earlier schema, with what that schema knows of the rows of `source`."""
    engine = make_engine(parse_location(url), read_only=False, create=True)
    tables = MetaData()
    with engine.begin() as connection:
        make_schema(revision, connection)
        tables.reflect(connection)
        with source._engine.connect() as reading:
            newer = MetaData()
            newer.reflect(reading)
            for table in tables.sorted_tables:
                known = newer.tables[table.name].columns
                rows = reading.execute(select(*[known[column.name] for column in table.columns])).mappings().all()
                if rows and "version" not in table.name:
                    connection.execute(insert(table), [dict(row) for row in rows])
    engine.dispose()


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
@pytest.mark.parametrize("revision", sorted(known_revisions()))
def test_an_old_record_is_true(revision, dialect, path, task, today, request) -> None:
    url = f"sqlite:///{path}" if dialect == "sqlite" else request.getfixturevalue("empty_postgres")
    write_at(revision, url, today)
    assert upgrade(url) == revision
    with TuningDatabase.open(url) as database:
        records = database.list_records(RecordFilter(workload_hash=task.workload_hash))
        assert {one.route for one in records} == {Route.TEMPLATE, Route.FALLBACK, Route.METASCHEDULE}
        lookup = RecordLookup(database, TARGET, detect_environment(TARGET))
        kept = {one.route for one in without_stale(lookup, task, records)}
    assert kept == {one.route for one in records}
    for record in records:
        replay_record(task, record, TARGET)


def test_a_record_that_does_not_say_its_kernel_is_measured_again(task, today) -> None:
    lookup = RecordLookup(today, TARGET, detect_environment(TARGET))
    records = today.list_records(RecordFilter(workload_hash=task.workload_hash))
    silent = [replace(record, kernel_hash=None) for record in records]
    assert {one.route for one in without_stale(lookup, task, silent)} == {Route.METASCHEDULE}
    for record in silent:
        if record.route is Route.METASCHEDULE:
            replay_record(task, record, TARGET)
        else:
            with pytest.raises(LoweringError, match="does not say which kernel was measured"):
                replay_record(task, record, TARGET)
