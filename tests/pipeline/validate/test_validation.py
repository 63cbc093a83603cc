from __future__ import annotations

import io
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from relaxtune.models import OnnxModel, TensorSpec, load_model
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import ValidationFailedError
from relaxtune.pipeline.validate import array_comparison
from relaxtune.pipeline.validate.array_comparison import Movement, compare_arrays
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.report import ValidationReport, render
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.pipeline.validate.validation import Observation, compare, observe, validate

TIGHT = Tolerance(1e-3, 1e-3)


def report_of(expected: np.ndarray, got: np.ndarray, dtype: str | None = None) -> ValidationReport:
    spec = TensorSpec("y", dtype or str(got.dtype), got.shape)
    seen = [Observation({"y": expected}, {"y": got})]
    return compare(seen, (spec,), TIGHT, model="m", reference="r", seed=0)


def test_bert_agrees_with_the_reference(artifact: Path, bert_tiny: OnnxModel) -> None:
    report = validate(artifact, bert_tiny, samples=2, seed=3)
    assert report.passed
    assert (report.samples, report.seed) == (2, 3)
    assert [output.name for output in report.outputs] == [spec.name for spec in bert_tiny.outputs]
    for output in report.outputs:
        assert 0 < (output.worst("max_abs") or 0) < 1e-4
        assert (output.worst("cosine") or 0) > 0.999999
    report.raise_if_failed()


def test_another_model_fails_with_the_output_and_what_would_have_passed(artifact: Path, bert_tiny: OnnxModel) -> None:
    shapes = {spec.name: spec.shape for spec in bert_tiny.inputs}
    other = load_model("bert-tiny", shapes=shapes, seed=1)
    report = validate(artifact, other, samples=1)
    assert not report.passed
    with pytest.raises(ValidationFailedError, match=r"output 'last_hidden_state': sample 0: largest error .* atol .*"):
        report.raise_if_failed()


def test_tolerances_given_replace_the_defaults(artifact: Path, bert_tiny: OnnxModel) -> None:
    report = validate(Module.load(artifact), bert_tiny, samples=1, rtol=0.0, atol=0.0)
    assert report.tolerance == Tolerance(0.0, 0.0)
    assert not report.passed


def test_what_was_observed_can_be_compared_again(artifact: Path, bert_tiny: OnnxModel) -> None:
    module, reference = Module.load(artifact), Reference(bert_tiny)
    seen = observe(module, bert_tiny, reference, samples=1, seed=0)
    loose = compare(seen, module.outputs, TIGHT, model="m", reference="r", seed=0)
    needed = max(output.worst("required_atol") or 0 for output in loose.outputs)
    for factor, passes in ((1.01, True), (0.99, needed == 0)):
        tolerance = Tolerance(TIGHT.rtol, needed * factor)
        report = compare(seen, module.outputs, tolerance, model="m", reference="r", seed=0)
        assert report.passed is passes


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20), st.integers(0, 2**16), st.floats(1e-6, 1.0))
def test_the_required_tolerances_are_the_smallest_that_pass(values: list[float], seed: int, size: float) -> None:
    expected = np.asarray(values, np.float32)
    got = expected + np.random.default_rng(seed).normal(0, size, expected.shape).astype(np.float32)
    found = compare_arrays(expected, got, TIGHT)
    assert found.passed is (found.required_atol <= TIGHT.atol * (1 + 1e-9))
    assert compare_arrays(expected, got, Tolerance(TIGHT.rtol, max(found.required_atol, 0) * 1.001 + 1e-12)).passed
    if found.required_atol > 1e-9:
        assert not compare_arrays(expected, got, Tolerance(TIGHT.rtol, found.required_atol * 0.99)).passed


def test_equal_arrays_need_no_tolerance() -> None:
    values = np.asarray([[0.0, -1.0], [2.5, 1e30]], np.float32)
    found = compare_arrays(values, values.copy(), Tolerance(0.0, 0.0))
    assert found.passed
    assert (found.max_abs, found.max_rel, found.required_atol, found.required_rtol) == (0.0, 0.0, 0.0, 0.0)
    assert found.argmax_agreement == 1.0


def test_absolute_tolerance_grows_with_the_size_of_the_output() -> None:
    expected = np.asarray([1000.0, -1000.0, 0.0], np.float32)
    got = expected + np.float32(0.5)
    assert compare_arrays(expected, got, TIGHT).passed
    assert not compare_arrays(expected / 1000, got / 1000 + 0.1, TIGHT).passed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_fails_when_the_reference_is_finite(value: float) -> None:
    expected = np.ones((2, 2), np.float32)
    got = expected.copy()
    got[0, 1] = value
    report = report_of(expected, got)
    assert not report.passed
    assert "1 elements are NaN or infinite where the reference is finite" in report.outputs[0].reason


def test_the_same_infinities_pass_and_others_fail() -> None:
    expected = np.asarray([np.inf, -np.inf, np.nan, 1.0], np.float32)
    assert report_of(expected, expected.copy()).passed
    got = np.asarray([-np.inf, -np.inf, 0.0, 1.0], np.float32)
    assert "2 elements differ where the reference is NaN or infinite" in report_of(expected, got).outputs[0].reason


def test_arg_max_agreement_counts_rows() -> None:
    expected = np.asarray([[0.0, 1.0], [1.0, 0.0]], np.float32)
    found = compare_arrays(expected, np.asarray([[0.0, 1.0], [0.0, 1.0]], np.float32), TIGHT)
    assert found.argmax_agreement == 0.5
    assert compare_arrays(expected[:, :1], expected[:, :1], TIGHT).argmax_agreement is None
    assert compare_arrays(np.float32(1.0).reshape(()), np.float32(1.0).reshape(()), TIGHT).argmax_agreement is None


def test_integers_must_be_equal() -> None:
    expected = np.asarray([1, 2, 3], np.int64)
    assert report_of(expected, expected.copy()).passed
    report = report_of(expected, np.asarray([1, 2, 5], np.int64))
    assert report.outputs[0].reason == "sample 0: 1 of 3 elements differ; int64 must be equal"
    assert report.outputs[0].worst("max_abs") == 2.0
    assert report.outputs[0].worst("cosine") is None


def test_shape_and_dtype_mismatches_fail() -> None:
    values = np.ones((2, 3), np.float32)
    assert "expected shape 2x3, got 3x2" in report_of(values, values.T.copy()).outputs[0].reason
    assert "expected dtype float16, got float32" in report_of(values, values, dtype="float16").outputs[0].reason
    assert "expected dtype int64, got float32" in report_of(values.astype(np.int64), values).outputs[0].reason


def test_bfloat16_is_compared_with_a_float32_reference() -> None:
    expected = np.linspace(-1, 1, 8, dtype=np.float32)
    got = expected.astype(ml_dtypes.bfloat16)
    assert not compare_arrays(expected, got, Tolerance(1e-5, 1e-5)).passed
    assert compare_arrays(expected, got, Tolerance(1e-2, 1e-2)).passed


def test_outputs_of_one_side_only_fail_and_none_in_common_is_an_error() -> None:
    one = np.ones(2, np.float32)
    specs = (TensorSpec("y", "float32", (2,)), TensorSpec("z", "float32", (2,)))
    seen = [Observation({"x": one, "y": one}, {"y": one, "z": one})]
    report = compare(seen, specs, TIGHT, model="m", reference="r", seed=0)
    assert {output.name: output.reason for output in report.outputs} == {
        "y": "",
        "z": "sample 0: the model does not have this output",
        "x": "sample 0: the module does not have this output",
    }
    with pytest.raises(ValidationFailedError, match="no output in common: the model has x, the module has y, z"):
        compare([Observation({"x": one}, {"y": one})], specs, TIGHT, model="m", reference="r", seed=0)
    with pytest.raises(ValidationFailedError, match="samples must be at least 1"):
        compare([], specs, TIGHT, model="m", reference="r", seed=0)


def test_report_is_json_and_a_table(artifact: Path, bert_tiny: OnnxModel) -> None:
    report = validate(artifact, bert_tiny, samples=1)
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["passed"] is True
    assert data["outputs"][0]["worst"]["required_atol"] >= 0
    assert len(data["outputs"][0]["samples"]) == 1
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(report))
    text = console.export_text()
    assert "validation of bert-tiny: passed" in text
    assert "last_hidden_state" in text


def test_a_wrong_output_fails_however_small_it_is() -> None:
    expected = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    wrong = expected + np.float32(0.3) * np.roll(expected, 1, axis=0)
    assert not report_of(expected, wrong).passed
    assert not report_of(np.float32(1e-5) * expected, np.float32(1e-5) * wrong).passed
    assert report_of(np.float32(1e-5) * expected, np.float32(1e-5) * expected * np.float32(1.0005)).passed


def test_a_graph_that_cancels_passes_and_a_wrong_one_of_that_kind_says_how_wrong(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    first = draw.standard_normal((64, 64)).astype(np.float32)
    second = first + np.float32(1e-5) * draw.standard_normal((64, 64)).astype(np.float32)
    nodes = "{a = MatMul(x, w) b = MatMul(x, v) y = Sub(a, b)}"
    graph = onnx.parser.parse_graph(f"cancels (float[4,64] x) => (float[4,64] y) {nodes}")
    graph.initializer.extend(onnx.numpy_helper.from_array(one, name) for one, name in ((first, "w"), (second, "v")))
    opsets = [onnx.helper.make_opsetid("", 20)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets), tmp_path / "cancels.onnx")
    reference = Reference(load_model(tmp_path / "cancels.onnx"))
    x = draw.standard_normal((4, 64)).astype(np.float32)
    expected = reference.run({"x": x})["y"]
    moved = reference.moves({"x": x}, 2.0**-24, Tolerance(1e-4, 1e-4))
    honest = (x.astype(np.float64) @ (first.astype(np.float64) - second)).astype(np.float32)
    spec = TensorSpec("y", "float32", honest.shape)

    def judged(got: np.ndarray, moves: dict[str, Movement]) -> ValidationReport:
        seen = [Observation({"y": expected}, {"y": got}, {"x": x}, moves)]
        return compare(seen, (spec,), Tolerance(1e-4, 1e-4), model="m", reference="r", seed=0)

    assert not judged(honest, {}).passed
    assert judged(honest, moved).passed
    assert judged(honest, moved).outputs[0].ill_conditioned
    wrong = judged(np.roll(honest, 1, axis=0), moved)
    assert not wrong.passed
    assert "times as far" in wrong.outputs[0].reason


def quantiser(folder: Path, zero_point: int = 3) -> Reference:
    nodes = "{q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, zero)}"
    graph = onnx.parser.parse_graph(f"rounds (float[32,64] x) => (float[32,64] y) {nodes}")
    for name, value in (("s", np.float32(0.1)), ("z", np.int8(zero_point)), ("zero", np.int8(3))):
        graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    path = folder / f"rounds{zero_point}.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)]), path)
    return Reference(load_model(path))


def test_ties_of_a_quantiser_pass_with_their_counts_and_a_step_everywhere_is_wrong(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(0, 2, (32, 64)).astype(np.float32)
    beside = draw.random(x.shape) < 1 / 16
    x[beside] = np.float32(0.1) * (np.round(x[beside] / np.float32(0.1)) + np.float32(0.5))
    tight, reference = Tolerance(1e-4, 1e-4), quantiser(tmp_path)
    expected, moves = reference.run({"x": x}), reference.moves({"x": x}, 2.0**-24, tight)

    def judged(got: np.ndarray) -> ValidationReport:
        seen = [Observation(expected, {"y": got}, {"x": x}, moves)]
        return compare(seen, (TensorSpec("y", "float32", got.shape),), tight, model="m", reference="r", seed=0)

    exact = (np.round(x.astype(np.float64) / np.float64(np.float32(0.1))) * np.float32(0.1)).astype(np.float32)
    honest = judged(exact)
    assert honest.passed
    share = 100 * float(np.mean(np.abs(exact - expected["y"]) > 0.05))
    assert 0 < share < 5
    assert honest.outputs[0].verdict.startswith(f"ok, ties of quantisers: {share:.2f}% of the values differ, ")
    assert honest.to_json()["outputs"][0]["verdict"] == honest.outputs[0].verdict  # type: ignore[index]
    # No element is off by more than a tie is: only their number tells.
    wrong = judged(quantiser(tmp_path, zero_point=4).run({"x": x})["y"])
    assert not wrong.passed
    assert "mean error 0.1. ONNX Runtime moves by 0.1 at most" in wrong.outputs[0].reason
    assert "which ties of quantisers do not explain" in wrong.outputs[0].reason


def test_half_precision_numbers_below_the_normal_ones_may_be_a_step_of_their_grid_off() -> None:
    step = np.float16(6e-8)
    expected = np.float32(step) * np.asarray([[1.0, -2.0, 7.0, 3.0]], np.float32)
    assert report_of(expected, (expected + np.float32(step)).astype(np.float16)).passed
    assert not report_of(expected, (expected + 4 * np.float32(step)).astype(np.float16)).passed


@pytest.mark.parametrize("broken", [False, True], ids=["finite", "not finite"])
def test_a_comparison_by_blocks_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    draw = np.random.default_rng(0)
    expected = draw.standard_normal((3, 50)).astype(np.float32)
    got = (expected * (1 + 1e-3 * draw.standard_normal((3, 50)))).astype(np.float16)
    if broken:
        expected[0, 1], expected[1, 7], got[1, 7], got[2, 9] = np.nan, np.inf, np.inf, np.nan
    whole = compare_arrays(expected, got, Tolerance(1e-4, 1e-4))
    monkeypatch.setattr(array_comparison, "_BLOCK", 7)
    parts = compare_arrays(expected, got, Tolerance(1e-4, 1e-4))
    assert (whole.reason, whole.histogram, whole.required_factor) == (
        parts.reason,
        parts.histogram,
        parts.required_factor,
    )
    for name in ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "required_atol", "required_rtol"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12), name
    assert not whole.passed
    assert sum(whole.histogram) == expected.size - broken  # the infinity that both have
