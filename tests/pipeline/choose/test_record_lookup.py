"""The one look-up of candidates: every layer is asked, and a refuted decision does not count, here or in a twin."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import tvm

from relaxtune.pipeline.choose.record_lookup import RecordLookup
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.pipeline.tasks.packed_module import PackedModule
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.tuning_db.layers import LayeredDatabase
from relaxtune.tuning_db.records import Route, Status, TuningRecord, Workload, utc_now
from relaxtune.tuning_db.store import TuningDatabase

EMPTY = PackedModule.of(tvm.IRModule({}))
MEANING = '{"family":"matmul","m":8}'
TASK = TuningTask("matmul", "1", "matmul", MEANING, 1, 1.0, 1.0, (), {"model": ("matmul",)}, {}, packed=EMPTY)
TWIN = replace(TASK, workload_hash="2")
NOW = utc_now()


def workload_of(task: TuningTask) -> Workload:
    return Workload(task.workload_hash, task.family, task.signature, task.name, 1.0, 1.0, None, tvm.__version__)


@pytest.fixture
def place(llvm_target):
    return llvm_target, detect_environment(llvm_target)


@pytest.fixture
def record(place):
    target, environment = place

    def make(decision, us, *, task=TASK, minutes=0, route=Route.TEMPLATE, status=Status.OK, **changes) -> TuningRecord:
        made = TuningRecord(
            workload_hash=task.workload_hash,
            signature_key=workload_of(task).signature_key,
            target=target_key(target),
            environment=environment,
            route=route,
            decision=decision,
            status=status,
            latencies_us=(us,) if status is Status.OK else (),
            created_at=NOW + timedelta(minutes=minutes),
        )
        return replace(made, **changes)

    return make


def keep(database, *records):
    database.record_all(workloads=[workload_of(TASK), workload_of(TWIN)], records=records)


def decisions(database, place, task=TASK):
    return [record.decision for record in RecordLookup(database, *place).judge(task).standing]


def test_a_refutation_in_a_shared_database_is_seen(tmp_path, place, record):
    with TuningDatabase.open(tmp_path / "shared.db") as shared:
        keep(shared, record("fast", 0, minutes=1, status=Status.WRONG_RESULT))
    with LayeredDatabase.open_layers([tmp_path / "mine.db", tmp_path / "shared.db"]) as layers:
        keep(layers, record("fast", 1.0), record("slow", 2.0))
        assert decisions(layers, place) == ["slow"]


@pytest.mark.parametrize("route", [Route.TEMPLATE, Route.LIBRARY])
def test_a_refutation_measured_in_a_twin_counts_where_records_go_by_signature(place, record, route):
    wrong = record("fast", 0, task=TWIN, minutes=1, status=Status.WRONG_RESULT, route=route)
    with TuningDatabase.open("sqlite://") as database:
        keep(database, record("fast", 1.0, route=route), record("slow", 2.0, route=route), wrong)
        assert decisions(database, place) == decisions(database, place, TWIN) == ["slow"]


def test_a_refuted_trace_of_a_twin_refutes_nothing(place, record):
    trace = {"route": Route.METASCHEDULE}
    with TuningDatabase.open("sqlite://") as database:
        keep(
            database,
            record("a", 1.0, **trace),
            record("a", 0, task=TWIN, minutes=1, status=Status.WRONG_RESULT, **trace),
        )
        assert decisions(database, place) == ["a"]


def test_the_trace_says_what_became_of_each_record(tmp_path, place, record):
    target, environment = place
    elsewhere = {"target": replace(target_key(target), arch="sparc"), "environment": replace(environment, arch="sparc")}
    other_tvm = {"route": Route.METASCHEDULE, "environment": replace(environment, tvm_version="0.1")}
    with TuningDatabase.open(tmp_path / "shared.db") as shared:
        keep(shared, record("below", 3.0))
    with LayeredDatabase.open_layers([tmp_path / "mine.db", tmp_path / "shared.db"]) as database:
        database.record_workload(replace(workload_of(TASK), tvm_version="0.1"))
        keep(
            database,
            record("right", 2.0),
            record("again", 1.5),
            record("again", 2.5, minutes=1),
            record("refuted", 1.0),
            record("refuted", 0, minutes=1, status=Status.WRONG_RESULT),
            record("elsewhere", 1.0, **elsewhere),
            record("old", 1.0, **other_tvm),
            record("twin", 1.0, task=TWIN, route=Route.METASCHEDULE),
            record("failed", 0, status=Status.RUN_ERROR),
            record("impossible", 1e-6),
        )

        names = {(one.layer, one.id): f"{one.decision} {one.latency_us}" for one in database.list_records()}
        found = RecordLookup(database, target, environment, explain=True).judge(TASK)
        reasons = {names[one.database, one.id]: one.reason for one in found.trace}
        unexplained = RecordLookup(database, *place).judge(TASK)
    assert [one.decision for one in found.standing] == ["right", "again", "below"]
    assert found.standing == unexplained.standing
    assert reasons == {
        "again 1.5": "the same decision was measured again later",
        "refuted 1.0": "refuted: its decision gave a wrong result later",
        "refuted None": "the candidate failed: wrong_result",
        "elsewhere 1.0": f"made for llvm sparc, wanted is llvm {target.arch}",
        "old 1.0": f"made by TVM 0.1, this is TVM {tvm.__version__}: a decision of route metaschedule belongs to the "
        "TVM that made it",
        "twin 1.0": "of a similar workload; route metaschedule needs the same workload",
        "failed None": "the candidate failed: run_error",
        "impossible 1e-06": "its latency is 1e-06 us, and no device takes less than 0.002 us",
    }


def test_templates_that_failed_in_a_twin_are_known_and_those_of_another_architecture_are_not(place, record):
    target, environment = place
    elsewhere = {
        "target": replace(target_key(target), arch="znver1"),
        "environment": replace(environment, arch="znver1"),
    }
    with TuningDatabase.open("sqlite://") as database:
        keep(
            database,
            record("built", 0, task=TWIN, status=Status.BUILD_ERROR),
            record("ran", 0, status=Status.TIMEOUT),
            record("elsewhere", 0, status=Status.BUILD_ERROR, **elsewhere),
            record("good", 1.0),
        )
        assert RecordLookup(database, *place).failed_templates(TASK) == {"built", "ran"}


def test_selecting_reads_no_wrong_result_of_other_kernels(lowered, tasks, place, record, monkeypatch):
    target, environment = place
    with TuningDatabase.open("sqlite://") as database:
        keep(database, *(record(f"{number}", 0, status=Status.WRONG_RESULT) for number in range(3)))
        read: list[object] = []
        monkeypatch.setattr("relaxtune.tuning_db.sql.statements.to_record", lambda *row: read.append(row))
        select_kernels(lowered, tasks, database=database, target=target, environment=environment)
    assert read == []
