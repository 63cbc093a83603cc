"""What ships is what the whole model says: real kernels, one form of them made slow on purpose."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import onnx
import pytest

from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.bench.measure import OWN_ARM, ArmResult, BenchmarkReport
from relaxtune.pipeline.choose import shipping as shipping_module
from relaxtune.pipeline.choose.model_records import ModelDecision, measured_model, read_decision
from relaxtune.pipeline.choose.shipping import Shipping, decide
from relaxtune.pipeline.experiment.experiment import LEAST_GAIN, Contrast, Question, Side
from relaxtune.pipeline.jobs.tuned_model import record_shipped, select_as_measured, untuned_kernels
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.tuning_db.errors import DatabaseOpenError
from relaxtune.tuning_db.store import TuningDatabase

NODES = """
    <ir_version: 10, opset_import: ["" : 20]>
    two (float[384,384] a, float[384,384] b) => (float[384,384] y) { c = MatMul(a, b)  y = Softmax(c) }
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> PreparedModel:
    path = tmp_path_factory.mktemp("shipping") / "two.onnx"
    onnx.save(onnx.parser.parse_model(NODES), path)
    return prepare_model(ModelRequest(path, target="llvm"))


@pytest.fixture(scope="module")
def fast(prepared: PreparedModel) -> CompiledModule:
    return compile_module(prepared.lowered, untuned_kernels(prepared), prepared.target)


@pytest.fixture(scope="module")
def slow(prepared: PreparedModel) -> CompiledModule:
    """The same model with a matmul of plain loops, which takes many times as long."""
    mod = prepared.lowered.mod
    choices = [
        replace(choice, record_id=7, scheduled=mod[choice.function].with_attr(SCHEDULED_ATTR, True))
        if "matmul" in choice.function
        else choice
        for choice in untuned_kernels(prepared)
    ]
    return compile_module(prepared.lowered, choices, prepared.target)


@pytest.mark.slow
def test_tuned_kernels_ship_when_the_model_is_faster_with_them(prepared, fast, slow, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shipping_module, "_QUESTION", Question(-LEAST_GAIN, 0.02, seconds=2.0))
    shipping, loaded = decide(prepared, tuned=fast, untuned=slow, folder=tmp_path)
    assert shipping.tuned
    assert shipping.compiled is loaded.compiled is fast
    assert load_manifest(loaded.directory) == loaded.module.manifest
    assert shipping.report.ratio("untuned") > 1.5
    assert [arm.name for arm in shipping.report.arms] == ["relaxtune", "untuned", "ort"]
    assert shipping.verdict.startswith("Ships tuned: ")


@pytest.mark.slow
def test_untuned_kernels_ship_when_the_model_is_slower_with_tuned_ones(prepared, fast, slow, tmp_path) -> None:
    shipping, loaded = decide(prepared, tuned=slow, untuned=fast, folder=tmp_path)
    assert not shipping.tuned
    assert shipping.compiled is loaded.compiled is fast
    assert load_manifest(loaded.directory) == loaded.module.manifest
    assert shipping.report.ratio("tuned, not shipped") > 1.5
    assert shipping.report.arm("untuned").latencies_ms == shipping.report.arm("relaxtune").latencies_ms
    assert shipping.verdict.startswith("Ships untuned: in the model, the tuned kernels are ")
    assert shipping.report.runs == len(shipping.report.arm("relaxtune").latencies_ms)


@pytest.mark.slow
def test_why_a_gain_does_not_count_is_told(prepared, fast, tmp_path) -> None:
    shipping = replace(decide(prepared, tuned=fast, untuned=fast, folder=tmp_path)[0], tuned=False)
    slower = replace(shipping, contrast=Contrast(0.031, 0.013, 0.05, Side.ABOVE))
    assert "the tuned kernels are 3.1% slower (" in slower.verdict
    unsure = replace(shipping, contrast=Contrast(-0.001, -0.02, 0.02, Side.UNSURE))
    assert "the search found +0.1%, and the noise of this machine is 2.0% (" in unsure.verdict
    assert unsure.verdict.endswith("; --compare-seconds 64 looks longer.")
    no_bounds = replace(shipping, contrast=Contrast(-0.001, -math.inf, math.inf, Side.UNSURE))
    assert "the runs were too few to know" in no_bounds.verdict
    assert no_bounds.to_json()["gain"] == {"median": 0.001, "least": None}


def test_equal_kernels_are_not_compared_and_keep_their_records(prepared, fast, tmp_path) -> None:
    again = compile_module(prepared.lowered, untuned_kernels(prepared), prepared.target, like=fast)
    assert again.executable is fast.executable
    shipping = decide(prepared, tuned=fast, untuned=fast, folder=tmp_path)[0]
    assert shipping.tuned
    assert shipping.contrast is None
    assert shipping.report.arm("untuned").latencies_ms == shipping.report.arm("relaxtune").latencies_ms
    assert "found nothing faster" in shipping.verdict
    nothing = decide(replace(prepared, tasks=()), tuned=fast, untuned=fast, folder=tmp_path / "nothing")[0]
    assert "none of them can be tuned" in nothing.verdict


def test_compiling_from_records_ships_what_the_tuning_run_shipped(prepared, fast, tmp_path) -> None:
    report = BenchmarkReport((ArmResult(OWN_ARM, (1.0,)),), 1, 0, {})
    with TuningDatabase.open(tmp_path / "tuning.db") as database:

        def ship(*, untuned: bool) -> tuple[str, ...]:
            record_shipped(
                prepared,
                prepared,
                Shipping(fast, not untuned, report, None),
                database,
                tuning=TuningOptions(),
                job_id=None,
            )
            return tuple(choice.note for choice in select_as_measured(prepared, database)[1])

        assert all("untuned: the model is not surely faster" in note for note in ship(untuned=True))
        again = ship(untuned=True)
        assert database.count_records() == 1
        assert again == ship(untuned=True)
        assert not any("untuned" in note for note in ship(untuned=False))
        assert database.count_records() == 2


def test_what_was_decided_last_counts_though_a_clock_was_set_back_since(prepared) -> None:
    model = measured_model(prepared)
    with TuningDatabase.open("sqlite://") as database:
        model.record(database, ModelDecision(untuned=True), seed=0, job_id=None, latencies_ms=(1.0,))
        (record,) = database.list_records()
        for year in (2999, 9999):
            moment = datetime(year, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
            database.record_measurement(replace(record, created_at=moment))
            model.record(database, ModelDecision({"norms apart": "measured"}), seed=0, job_id=None, latencies_ms=(1.0,))
            found = model.find(database)
            assert found is not None
            assert (found.graph, found.untuned) == ({"norms apart": "measured"}, False)


@pytest.mark.parametrize("text", ["x", "{}", '{"kernels": 7, "norm_rows_max": 1}', '{"kernels": {}, "graph": []}'])
def test_a_decision_that_says_nothing_is_called_damage(text: str) -> None:
    record = SimpleNamespace(id=7, decision=text, created_at=datetime.now(UTC))
    with pytest.raises(DatabaseOpenError, match=r"record 7 does not say .*relaxtune db delete 7"):
        read_decision(record)
