"""The records that a search starts with: the best ones that are true here and that this TVM reads."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import tvm_ffi

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.layers import LayeredDatabase
from relaxtune.tuning_db.metaschedule import describe_unknown, ir_to_json, replay_decision, top_records, trace_to_json
from relaxtune.tuning_db.store import TuningDatabase
from tests.tuning_db.metaschedule.matmul_case import TARGET, matmul, split
from tests.tuning_db.metaschedule.test_traces import BAD_DECISIONS


@pytest.fixture
def put(samples, environment):
    """Return what keeps a split of the matmul by some factor, measured to take some microseconds."""

    def kept(database, factor, latency_us, **changes):
        decision = trace_to_json(split(matmul(), factor).trace)
        fields = {"environment": environment, "decision": decision, "latencies_us": (latency_us,), **changes}
        database.record_all(
            workloads=[describe_unknown(matmul())], records=[samples.record(describe_unknown(matmul()), **fields)]
        )

    return kept


@pytest.fixture
def top(samples, environment):
    """Return what asks a database for the seconds of the best records of the matmul."""

    def seconds(database, k, mod=None, target=None, where=None):
        found = top_records(
            database, mod or matmul(), target or samples.target(), where or environment, k, tvm_target=TARGET
        )
        return [float(value) for record in found for value in record.run_secs]

    return seconds


def test_records_are_ordered_and_limited(database, put, top):
    for factor, latency_us in ((8, 3.0), (4, 2.0), (2, 5.0)):
        put(database, factor, latency_us)
    assert top(database, 10) == pytest.approx([2e-6, 3e-6, 5e-6])
    assert top(database, 2) == pytest.approx([2e-6, 3e-6])


def test_trace_of_a_record_replays(database, put, samples, environment):
    put(database, 4, 2.0)
    (record,) = top_records(database, matmul(), samples.target(), environment, 1)
    scheduled = replay_decision(matmul(), trace_to_json(record.trace))
    assert tvm_ffi.structural_equal(scheduled.mod, split(matmul(), 4).mod)


def test_nothing_is_found_of_another_module_target_or_tvm(database, put, top, samples, environment):
    put(database, 8, 3.0)
    assert top(database, 1, mod=matmul(32)) == []
    assert top(database, 1, target=samples.target("llvm", "znver3")) == []
    assert top(database, 1, where=dataclasses.replace(environment, tvm_version="0.28")) == []
    assert top(database, 1) == pytest.approx([3e-6])


def test_module_is_not_taken_for_another_when_their_hashes_collide(database, put, top):
    put(database, 8, 3.0)
    database.record_workload(dataclasses.replace(describe_unknown(matmul()), ir_json=ir_to_json(matmul(32))))
    assert top(database, 1) == []


def test_damaged_ir_is_refused(database, put, top):
    put(database, 8, 3.0)
    database.record_workload(dataclasses.replace(describe_unknown(matmul()), ir_json="broken"))
    with pytest.raises(InvalidRecordError, match="cannot read the IR of a workload"):
        top(database, 1)


def test_trace_that_cannot_be_read_is_skipped_and_logged(database, put, top, caplog):
    for decision in BAD_DECISIONS:
        put(database, 8, 1.0, decision=decision)
    for factor, latency_us in ((8, 3.0), (4, 2.0)):
        put(database, factor, latency_us)
    with caplog.at_level(logging.WARNING):
        assert top(database, 1) == pytest.approx([2e-6])
    assert "is skipped: TVM" in caplog.text


def test_records_of_several_layers_are_told_apart(tmp_path, put, samples, environment):
    paths = tmp_path / "mine.db", tmp_path / "shared.db"
    for path, factor, latency_us in zip(paths, (8, 4), (3.0, 2.0), strict=True):
        with TuningDatabase.open(path) as database:
            put(database, factor, latency_us)
    with LayeredDatabase.open_layers(paths) as layers:
        best, second = top_records(layers, matmul(), samples.target(), environment, 2)
    # Both have the id 1 in their own database.
    assert [float(value) for value in (*best.run_secs, *second.run_secs)] == pytest.approx([2e-6, 3e-6])
    assert str(best.trace) != str(second.trace)
