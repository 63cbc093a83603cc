"""A record whose kernel is wrong is refuted once the model fails validation, and no later compile takes it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import onnx
import pytest
from tvm import s_tir

from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.jobs.refutation import refute_kernels
from relaxtune.pipeline.jobs.values import CompileResult
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.validate.validation import sample_inputs
from relaxtune.schedules.tir.blocks import list_blocks
from relaxtune.tuning_db.metaschedule import trace_to_json
from relaxtune.tuning_db.records import Mode, RecordFilter, Route, Status
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.artifact.test_compile import keep, matmul, parallel_trace, record_of


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [8, 8]) for name in "xy")
    nodes = [onnx.helper.make_node("MatMul", ["x", "x"], ["p"]), onnx.helper.make_node("Softmax", ["p"], ["y"])]
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y]), opset_imports=opset), path)
    return prepare_model(ModelRequest(path, {}, "llvm"))


def wrong_trace(task: TuningTask) -> str:
    """Return a trace that loses what an operand has behind the point."""
    schedule = s_tir.Schedule(task.mod)
    block = schedule.get_sblock(list_blocks(task.mod["main"])[0].name)
    schedule.unsafe_set_dtype(schedule.cache_read(block, 0, "global"), 0, "int8")
    return trace_to_json(schedule.trace)


def compile_with(prepared: PreparedModel, database: Path, out: Path) -> CompileResult:
    return compile_model(prepared.request, out, database=database, samples=1)


@pytest.mark.parametrize("year", [2026, 9999])
def test_a_wrong_kernel_is_refuted_and_the_next_compile_takes_another(prepared, tmp_path, caplog, year) -> None:
    task, path = matmul(list(prepared.tasks)), tmp_path / "records.db"
    moment = (
        datetime(year, 12, 31, 23, 59, 59, 999999, tzinfo=UTC) if year == 9999 else datetime(year, 1, 1, tzinfo=UTC)
    )
    with TuningDatabase.open(path) as database:
        wrong = record_of(task, prepared.target, decision=wrong_trace(task), latencies_us=(1.0,), created_at=moment)
        right = record_of(task, prepared.target, decision=parallel_trace(task), latencies_us=(3.0,))
        numbers = [keep(database, task, record) for record in (wrong, right)]
    first = compile_with(prepared, path, tmp_path / "out")
    assert first.validation is not None
    assert not first.validation.passed
    assert f"record {numbers[0]} (kernel" in caplog.text
    with TuningDatabase.open(path, mode=Mode.READ_ONLY) as database:
        (refuted,) = database.list_records(RecordFilter(status=Status.WRONG_RESULT))
    assert (refuted.route, refuted.decision, refuted.created_at >= moment) == (Route.METASCHEDULE, wrong.decision, True)
    assert "failed validation" in (refuted.error or "")
    again = compile_with(prepared, path, tmp_path / "out")
    assert again.validation is not None
    assert again.validation.passed
    assert [one.record_id for one in again.choices if one.task == task.name] == [numbers[1]]


def test_a_right_kernel_is_not_refuted_by_a_validation_that_fails_for_another_reason(
    prepared, tmp_path, caplog
) -> None:
    task, path = matmul(list(prepared.tasks)), tmp_path / "records.db"
    with TuningDatabase.open(path) as database:
        keep(database, task, record_of(task, prepared.target, decision=parallel_trace(task), latencies_us=(1.0,)))
        choices = compile_with(prepared, path, tmp_path / "out").choices
        inputs = sample_inputs(prepared.model, samples=1, seed=0)[0]
        assert refute_kernels(prepared, choices, inputs, database, [path]) == ()
        assert database.count_records() == 1
    assert "none of the 1 kernels from records differs from its unscheduled form" in caplog.text


def test_a_database_that_cannot_be_written_is_told(prepared, tmp_path, caplog) -> None:
    task, path = matmul(list(prepared.tasks)), tmp_path / "records.db"
    with TuningDatabase.open(path) as database:
        keep(database, task, record_of(task, prepared.target, decision=wrong_trace(task), latencies_us=(1.0,)))
        choices = compile_with(prepared, path, tmp_path / "out").choices
    with TuningDatabase.open(path, mode=Mode.READ_ONLY) as database:
        inputs = sample_inputs(prepared.model, samples=1, seed=0)[0]
        assert refute_kernels(prepared, choices, inputs, database, [tmp_path / "gone.db"]) == ()
    assert "no kernel is refuted" in caplog.text
