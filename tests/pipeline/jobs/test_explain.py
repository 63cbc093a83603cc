"""`db explain`: what became of each record of a model's kernels, by the look-up that `compile` does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from relaxtune.pipeline.choose.model_records import ModelDecision, measured_model
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.jobs.explain import explain_model
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.tuning_db.records import Mode, Route
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.artifact.test_compile import keep, matmul, parallel_trace, record_of, workload_of

SHAPES = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 32))


@pytest.fixture(scope="module")
def place(tasks, llvm_target, tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """A database with five records of one kernel, and their numbers."""
    path, task = tmp_path_factory.mktemp("explain") / "records.db", matmul(tasks)
    good = record_of(task, llvm_target, decision=parallel_trace(task), latencies_us=(3.0,))
    good = replace(good, code_version="0.1.0+gc0ffee")
    old = replace(good, environment=replace(good.environment, tvm_version="0.1"))
    with TuningDatabase.open(path) as database:
        database.record_workload(replace(workload_of(task), tvm_version="0.1"))
        numbers = {
            "good": keep(database, task, good),
            "slower": keep(database, task, replace(good, decision="[[], []]", latencies_us=(9.0,), code_version=None)),
            "stale": keep(database, task, replace(good, kernel_hash="v2:0", latencies_us=(2.0,), decision="[[],[]]")),
            "broken": keep(database, task, replace(good, decision="[[1], [2]]", latencies_us=(1.0,))),
            "old": keep(database, task, old),
        }
    return path, numbers


def test_every_record_of_a_kernel_has_a_reason(place, tasks) -> None:
    path, numbers = place
    found = explain_model(ModelRequest("bert-tiny", SHAPES, "llvm"), path)
    kernel = next(one for one in found.kernels if one.task == matmul(tasks).name)
    reasons = {record.id: record.reason for record in kernel.records}
    made_by = {record.id: record.code_version for record in kernel.records}
    assert (made_by[numbers["good"]], made_by[numbers["slower"]]) == ("0.1.0+gc0ffee", None)
    assert kernel.route is Route.METASCHEDULE
    assert kernel.taken is not None
    assert kernel.taken.id == numbers["good"] == kernel.records[0].id
    assert reasons.keys() == set(numbers.values())
    assert reasons[numbers["slower"]] == "the record taken ranks higher"
    assert "cannot be replayed" in reasons[numbers["broken"]]
    assert reasons[numbers["old"]].startswith("made by TVM 0.1")
    without = [one for one in found.kernels if one.task != matmul(tasks).name]
    assert {one.note for one in without if one.task} == {"no record"}
    assert not any(one.records for one in without)
    assert found.note == ""


def test_the_records_of_a_model_that_ships_untuned_have_reasons(place, tasks, tmp_path) -> None:
    path, numbers = place
    copied = tmp_path / "untuned.db"
    request = ModelRequest("bert-tiny", SHAPES, "llvm")
    with TuningDatabase.open(path, mode=Mode.READ_ONLY) as known, TuningDatabase.open(copied) as database:
        database.record_all(workloads=known.list_workloads(), records=known.list_records())
        prepared = prepare_model(request)
        decision = ModelDecision(untuned=True)
        measured_model(prepared).record(database, decision, seed=0, job_id=None, latencies_ms=(1.0,))
    found = explain_model(request, copied)
    kernel = next(one for one in found.kernels if one.task == matmul(tasks).name)
    assert found.note.startswith("untuned: the model is not surely faster")
    assert kernel.taken is None
    assert len(kernel.records) == len(numbers)
    assert [one.reason for one in kernel.records if "ranks first" in one.reason] == [
        f"{found.note}; alone, it ranks first"
    ]


def test_the_command_says_it_as_a_table_and_as_data(place, capsys) -> None:
    path, numbers = place
    shapes = ",".join(f"{name}=1x32" for name in SHAPES)

    def call(form: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "db",
                    "explain",
                    "bert-tiny",
                    "--target",
                    "llvm",
                    "--shape",
                    shapes,
                    "--db",
                    str(path),
                    "--format",
                    form,
                ]
            )
        assert not ended.value.code
        return capsys.readouterr().out

    table = call("table")
    assert "1 by record" in table
    assert "made by TVM 0.1" in table
    data = json.loads(call("json"))
    records = [record for kernel in data["kernels"] for record in kernel["records"]]
    assert "0.1.0+gc0ffee" in {record["code_version"] for record in records}
    assert [record["id"] for record in records if record["taken"]] == [numbers["good"]]
    assert call("csv").splitlines()[0].startswith("task,functions,kernel_route,id")


def test_a_target_that_is_not_here_says_that_records_are_of_another(place) -> None:
    path, _ = place
    found = explain_model(ModelRequest("bert-tiny", SHAPES, "cuda:sm_90a"), path)
    assert found.device == "unknown"
    assert not any(one.taken for one in found.kernels)
