"""Failed records, and databases as layers of others; `test_store` asks every form the same."""

from __future__ import annotations

import pytest

from relaxtune.tuning_db.layers import LayeredDatabase
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import Mode, RecordFilter, Route, Status
from relaxtune.tuning_db.store import NO_FILTER, TuningDatabase


def question(samples, number=1, **changes):
    workload = samples.workload(number)
    keys = {"workload_hash": workload.workload_hash, "signature_key": workload.signature_key}
    return Question(**{**keys, "target": samples.target(), "environment": samples.environment(), **changes})


class TestFailed:
    def test_failures_are_listed_in_order_by_status_and_route(self, database, samples):
        given = [samples.failure(seed=n, status=status) for n, status in enumerate(Status) if status is not Status.OK]
        template = samples.failure(route=Route.TEMPLATE)
        database.record_all(workloads=[samples.workload()], records=[*given, samples.record(), template])
        assert database.list_failed(question(samples)) == [*given, template]
        wrong = [record for record in given if record.status is Status.WRONG_RESULT]
        assert database.list_failed(question(samples), status=Status.WRONG_RESULT) == wrong
        assert database.list_failed(question(samples, route=Route.TEMPLATE)) == [template]

    def test_failures_are_found_by_the_key_of_their_route_and_where_they_are_true(self, database, samples):
        twin = samples.workload(1, workload_hash="twin")
        lower, other = samples.target("llvm", "znver3"), samples.target("llvm", "znver5")
        trace, template = samples.failure(twin), samples.failure(twin, route=Route.TEMPLATE)
        below = samples.failure(route=Route.TEMPLATE, target=lower, environment=samples.environment(arch="znver3"))
        above = samples.failure(route=Route.TEMPLATE, target=other, environment=samples.environment(arch="znver5"))
        workloads = [samples.workload(), twin, samples.workload(tvm_version="0.28")]
        newer = samples.failure(environment=samples.environment(tvm_version="0.28"))
        database.record_all(workloads=workloads, records=[trace, template, below, above, newer])
        assert database.list_failed(question(samples)) == [template, below]
        assert database.list_failed(question(samples, workload_hash="twin")) == [trace, template, below]
        assert database.list_failed(question(samples, signature_key=None)) == []

    @pytest.mark.parametrize("status", [None, Status.WRONG_RESULT])
    def test_failures_are_found_by_an_index(self, path, samples, status):
        with TuningDatabase.open(path) as database:
            database.record_all(workloads=[samples.workload()], records=[samples.failure(status=Status.WRONG_RESULT)])
            asked = []
            connection = database._engine.raw_connection()
            connection.dbapi_connection.set_trace_callback(asked.append)
            connection.close()
            database.list_failed(question(samples), status=status)
            (statement,) = [text for text in asked if "FROM records" in text]
            plan = database.read(
                lambda session: session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}").all()
            )
        steps = [row[3] for row in plan if " records" in row[3]]
        assert any("ix_records_by_workload" in step for step in steps)
        assert any("ix_records_by_signature" in step for step in steps)
        assert all("SEARCH" in step for step in steps)


def test_what_a_lower_layer_knows_is_found_as_there(tmp_path, samples):
    """Questions about records and workloads; each method of the contract that is one is named here."""
    twin = samples.workload(2, family="reduction")
    asked = {
        "list_top": lambda database: database.list_top(question(samples)),
        "find_best": lambda database: database.find_best(question(samples)),
        "list_failed": lambda database: database.list_failed(question(samples)),
        "list_records": lambda database: database.list_records(limit=2, offset=1),
        "list_known": lambda database: database.list_known(NO_FILTER, workload_hashes=["hash1"]),
        "count_records": lambda database: database.count_records(RecordFilter(status=Status.OK)),
        "find_workload": lambda database: database.find_workload("hash2"),
        "has_workload": lambda database: database.has_workload("hash2"),
        "get_workload": lambda database: database.get_workload("hash1"),
        "list_workloads": lambda database: database.list_workloads(family="reduction"),
    }
    with TuningDatabase.open(tmp_path / "shared.db") as shared:
        records = [samples.record(seed=1), samples.record(seed=2, latencies_us=(3.0,)), samples.failure()]
        shared.record_all(workloads=[samples.workload(), twin], records=records)
        expected = {name: ask(shared) for name, ask in asked.items()}
    with LayeredDatabase.open_layers([tmp_path / "mine.db", tmp_path / "shared.db"], mode=Mode.TUNE) as layers:
        assert {name: ask(layers) for name, ask in asked.items()} == expected
    assert all(expected.values())
