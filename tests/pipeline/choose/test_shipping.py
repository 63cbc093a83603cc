"""What ships is what the whole model says: real kernels, one form of them made slow on purpose."""

from __future__ import annotations

import functools
from dataclasses import replace
from datetime import UTC, datetime

import onnx
import pytest

from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.bench.paired_gain import PairedGain
from relaxtune.pipeline.choose import shipping as shipping_module
from relaxtune.pipeline.choose.model_records import ModelDecision, measured_model
from relaxtune.pipeline.choose.shipping import decide
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tuned_model import record_shipped, select_as_measured, untuned_kernels
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.tuning_db.store import SqlDatabase

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
        replace(choice, record_id=7, made=mod[choice.function].with_attr(SCHEDULED_ATTR, True))
        if "matmul" in choice.function
        else choice
        for choice in untuned_kernels(prepared)
    ]
    return compile_module(prepared.lowered, choices, prepared.target)


def test_tuned_kernels_ship_when_the_model_is_faster_with_them(prepared, fast, slow, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shipping_module, "_SECONDS", 2.0)
    shipping, loaded = decide(prepared, tuned=fast, untuned=slow, folder=tmp_path)
    assert shipping.tuned
    assert shipping.compiled is loaded.compiled is fast
    assert load_manifest(loaded.directory) == loaded.module.manifest
    assert shipping.report.ratio("untuned") > 1.5
    assert [arm.name for arm in shipping.report.arms] == ["relaxtune", "untuned", "ort"]
    assert "tuned kernels ship" in shipping.verdict


def test_untuned_kernels_ship_when_the_model_is_slower_with_tuned_ones(prepared, fast, slow, tmp_path) -> None:
    shipping, loaded = decide(prepared, tuned=slow, untuned=fast, folder=tmp_path)
    assert not shipping.tuned
    assert shipping.compiled is loaded.compiled is fast
    assert load_manifest(loaded.directory) == loaded.module.manifest
    assert shipping.report.ratio("tuned, not shipped") > 1.5
    assert shipping.report.arm("untuned").latencies_ms == shipping.report.arm("relaxtune").latencies_ms
    assert "untuned kernels ship" in shipping.verdict
    # No turn to come could have made it faster.
    assert shipping.report.runs == len(shipping.report.arm("relaxtune").latencies_ms) < shipping_module._RUNS


def test_why_a_gain_does_not_count_is_told(prepared, fast, tmp_path) -> None:
    shipping = replace(decide(prepared, tuned=fast, untuned=fast, folder=tmp_path)[0], tuned=False)
    places = replace(shipping, gain=PairedGain(median=0.031, least=0.013, most=0.05, bias=0.02))
    assert "gain +3.1% (at least +1.3%), where two runs of the untuned ones differ by 2.0%." in places.verdict
    noise = replace(shipping, gain=PairedGain(median=0.001, least=-0.02, most=0.02, bias=0.001))
    assert "gain +0.1% (at least -2.0%), no sure gain." in noise.verdict


def test_equal_kernels_are_not_compared_and_keep_their_records(prepared, fast, tmp_path) -> None:
    again = compile_module(prepared.lowered, untuned_kernels(prepared), prepared.target, like=fast)
    assert again.executable is fast.executable
    shipping = decide(prepared, tuned=fast, untuned=fast, folder=tmp_path)[0]
    assert shipping.tuned
    assert shipping.gain is None
    assert shipping.report.arm("untuned").latencies_ms == shipping.report.arm("relaxtune").latencies_ms
    assert "found nothing faster" in shipping.verdict
    assert "none of them can be tuned" in replace(shipping, searched=False).verdict


def test_slow_models_run_only_as_often_as_a_decision_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping_module, "_SECONDS", 0.0)
    calls: list[str] = []
    arms = {name: functools.partial(calls.append, name) for name in ("a", "b")}
    report = shipping_module._measure(arms, {})
    assert [len(arm.latencies_ms) for arm in report.arms] == [6, 6]
    # One turn untimed; the one that says how slow they are is the first of six.
    assert calls == ["a", "b"] * (1 + 6)
    monkeypatch.setattr(shipping_module, "_SECONDS", 60.0)
    calls.clear()
    shipping_module._measure(arms, {})
    # Of 30 turns two are left out: they forgive no further turn without a gain.
    assert len(calls) == 2 * (2 + 5 + 2 * 28)


def test_compiling_from_records_ships_what_the_tuning_run_shipped(prepared, fast, tmp_path) -> None:
    with SqlDatabase.open(tmp_path / "tuning.db") as database:

        def ship(*, untuned: bool) -> tuple[str, ...]:
            record_shipped(
                prepared,
                prepared,
                fast.choices,
                database,
                untuned=untuned,
                latencies_ms=(1.0,),
                tuning=TuningOptions(),
                job_id=None,
            )
            return tuple(choice.note for choice in select_as_measured(prepared, database)[1])

        assert all("untuned: the model is no faster" in note for note in ship(untuned=True))
        again = ship(untuned=True)
        assert database.count_records() == 1
        assert again == ship(untuned=True)
        assert not any("untuned" in note for note in ship(untuned=False))
        assert database.count_records() == 2


def test_what_was_decided_last_counts_though_a_clock_was_set_back_since(prepared) -> None:
    model = measured_model(prepared)
    with SqlDatabase.open("sqlite://") as database:
        model.record(database, ModelDecision(7, untuned=True), seed=0, job_id=None, latencies_ms=(1.0,))
        (record,) = database.list_records()
        for year in (2999, 9999):
            moment = datetime(year, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
            database.record_measurement(replace(record, created_at=moment))
            model.record(database, ModelDecision(8), seed=0, job_id=None, latencies_ms=(1.0,))
            found = model.find(database)
            assert found is not None
            assert (found.norm_rows_max, found.untuned) == (8, False)
