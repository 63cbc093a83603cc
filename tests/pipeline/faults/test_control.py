"""The control: without a planted fault nothing fails and nothing is found; and a fault of the import is told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tvm import relax

from relaxtune.pipeline.bisect import Culprit, bisect
from relaxtune.pipeline.bisect.matching import TensorMatcher
from relaxtune.pipeline.bisect.stages import Stages
from relaxtune.pipeline.bisect.tensors import onnx_tensors
from relaxtune.pipeline.importer import frontend, import_model
from relaxtune.pipeline.importer.converters import ConverterInput
from relaxtune.pipeline.passes import LoweringOptions
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.pipeline.validate.validation import default_tolerance, sample_inputs, validate
from relaxtune.schedules.targets import ResolvedTarget
from tests.pipeline.faults.planting import build
from tests.pipeline.faults.small_models import make_model
from tests.pipeline.faults.test_passes import CASES


@pytest.mark.quick_cases("bert-fp16", "llama-decode-None")
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("bert", None),
        ("bert", "fp16"),
        ("llama-decode", None),
        pytest.param("bert-fp16", None, marks=pytest.mark.slow),
        pytest.param("gpt2", None, marks=pytest.mark.slow),
        pytest.param("llama", None, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_found_without_a_fault(
    name: str, precision: str | None, quick_target: ResolvedTarget, tmp_path: Path
) -> None:
    model = make_model(name, tmp_path)
    module = build(model, quick_target, tmp_path, options=LoweringOptions(precision=precision))
    report = validate(module, model, samples=2)
    assert report.passed
    assert report.repeats is not None
    assert report.repeats.identical
    assert bisect(module, model, sample_inputs(model, samples=1, seed=0)[0], default_tolerance(module, model)) is None


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("bert-fp16", None),
        ("llama", None),
        pytest.param("bert", None, marks=pytest.mark.slow),
        pytest.param("gpt2", "fp16", marks=pytest.mark.slow),
    ],
)
def test_no_tensor_of_the_last_stage_is_taken_for_wrong_without_a_fault(
    name: str, precision: str | None, quick_target: ResolvedTarget, tmp_path: Path
) -> None:
    model = make_model(name, tmp_path)
    inputs = sample_inputs(model, samples=1, seed=0)[0]
    stages = Stages(import_model(model), quick_target.target, LoweringOptions(precision=precision), inputs)
    tolerance = Tolerance(2e-2, 2e-2) if precision or name.endswith("fp16") else Tolerance(1e-4, 1e-4)
    matcher = TensorMatcher(onnx_tensors(model, inputs), tolerance)
    imported, last = stages.run([]), stages.run(stages.steps)
    known = matcher.learn(imported.trace)
    assert len(known) > 0.8 * len(imported.trace)
    assert matcher.find_divergence(last.trace, last.outputs, known, frozenset()) is None
    assert matcher.find_divergence(imported.trace, imported.outputs, matcher.guess(imported.trace), frozenset()) is None


def test_a_wrong_converter_is_told_from_a_wrong_pass(
    quick_target: ResolvedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tanh_for_erf(given: ConverterInput) -> relax.Expr:
        return relax.op.tanh(given.inputs[0])

    monkeypatch.setitem(frontend.CONVERTERS, ("", "Erf"), tanh_for_erf)
    model = make_model("bert", tmp_path)
    module = build(model, quick_target, tmp_path)
    assert not validate(module, model, samples=1).passed
    inputs = sample_inputs(model, samples=1, seed=0)[0]
    found = bisect(module, model, inputs, default_tolerance(module, model))
    assert found is not None
    assert found.culprit is Culprit.IMPORT
    assert found.node == "/encoder/layer.0/intermediate/Erf"


@pytest.mark.slow
def test_symbolic_axes_take_the_sizes_of_the_sample(
    quick_target: ResolvedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CASES["a bias is dropped"].fault.plant(monkeypatch)
    model = make_model("bert-symbolic", tmp_path)
    module = build(model, quick_target, tmp_path)
    (inputs,) = sample_inputs(model, samples=1, seed=0, dims={"batch": 1, "sequence": 7})
    found = bisect(module, model, inputs, default_tolerance(module, model))
    assert found is not None
    assert found.lowering_pass is not None
    assert found.lowering_pass.name == "merge_common_subexpressions"
    assert found.node == "/encoder/layer.0/attention/output/dense/Add"


@pytest.mark.slow
def test_quantised_weights_are_no_fault_of_the_import(
    quick_target: ResolvedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CASES["a bias is dropped"].fault.plant(monkeypatch)
    model = make_model("bert", tmp_path)
    module = build(model, quick_target, tmp_path, options=LoweringOptions(precision="w4a16", group_size=32))
    found = bisect(module, model, sample_inputs(model, samples=1, seed=0)[0], default_tolerance(module, model))
    assert found is not None
    assert found.lowering_pass is not None
    assert found.lowering_pass.name == "merge_common_subexpressions"
    assert found.node == "/encoder/layer.0/attention/output/dense/Add"
