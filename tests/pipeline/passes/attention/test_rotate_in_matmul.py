from __future__ import annotations

import numpy as np
import pytest
import tvm

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.attention import kernel as attention_kernel, recognise_attention, rotate_in_matmul
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import BATCH, HIDDEN, LENGTH, Form
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, run_lowered, small_model

FP16 = LoweringOptions(precision="fp16")
HOPPER = resolve_target("cuda:sm_90a").target
TOLERANCE = 2e-2


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make for a CPU what is made for Hopper, to run it here."""
    monkeypatch.setattr(LoweringState, "launches_cost", True)
    monkeypatch.setattr(recognise_attention, "has_template", lambda _target: True)
    for module in (attention_kernel, rotate_in_matmul):
        monkeypatch.setattr(module, "template_refusal", lambda _func, _target: None)


def notes_of(lowered: LoweredModule) -> tuple[str, ...]:
    return next(report.notes for report in lowered.reports if report.name == "rotate_in_matmul")


def count(lowered: LoweredModule, word: str) -> int:
    return sum(len(calls) for name, calls in lowered.kernels.items() if word in name)


@pytest.mark.quick_cases("llama-tiny-decode-fp16-options2")
@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize(
    ("name", "precision", "options"),
    [
        ("llama-tiny", None, FP16),
        ("llama-tiny", "fp16", LoweringOptions()),
        ("llama-tiny-decode", "fp16", LoweringOptions()),
    ],
)
def test_rotate_in_matmul_agrees_with_onnx_runtime_when_model_is_llama(
    name: str, precision: str | None, options: LoweringOptions
) -> None:
    model = small_model(name, precision=precision)
    lowered = lower(import_model(model), LLVM, options)
    assert notes_of(lowered) == ("2 rotations in the epilogues of the matmuls before them",)
    assert count(lowered, "rotary") == 0
    assert count(lowered, "matmul_rotated") == 2
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.quick_cases("llama-tiny-decode-maxima0-calls0", "llama-tiny-maxima2-calls2")
@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize(
    ("name", "maxima", "calls"),
    [
        ("llama-tiny-decode", {"batch": 8}, [{"batch": 1, "past_sequence": 5}, {"batch": 3, "past_sequence": 5}]),
        ("llama-tiny", {"batch": 4, "sequence": 128}, [{"batch": 1, "sequence": 7}, {"batch": 3, "sequence": 4}]),
        ("llama-tiny", {"batch": 4, "sequence": 129}, []),
        ("llama-tiny", {}, []),
    ],
)
def test_rotate_in_matmul_takes_few_rows_of_symbolic_size(
    name: str, maxima: dict[str, int], calls: list[dict[str, int]]
) -> None:
    name = f"{name}-1-layers"
    model = load_model(name, shapes={spec.name: spec.shape for spec in get_preset(name).inputs}, precision="fp16")
    lowered = lower(import_model(model), LLVM, LoweringOptions(maxima=maxima))
    assert (count(lowered, "matmul_rotated"), count(lowered, "rotary")) == ((1, 0) if calls else (0, 1))
    for dims in calls:
        feeds = random_inputs(model, seed=0, dims=dims)
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.parametrize("name", ["llama-tiny", "llama-tiny-decode"])
def test_rotate_in_matmul_leaves_five_kernels_a_layer_on_hopper(name: str) -> None:
    lowered = lower(import_model(small_model(name, precision="fp16")), HOPPER, LoweringOptions())
    calls = [call for found in lowered.kernels.values() for call in found]
    assert sum(any(node.startswith("/model/layers.1/") for node in call.onnx_nodes) for call in calls) == 5
    # The norm before the second layer's projection is in its matmul, with the rotation.
    assert count(lowered, "matmul_rotated_norms") == 1


def rotated(form: str = "plain") -> OnnxModel:
    """Rotate queries and keys, two heads of 16, in one of some forms."""
    f, heads, size = Form(), 2, 16
    x = f.x()

    def project() -> str:
        flat = f.linear(x, HIDDEN, HIDDEN) if form == "bias" else f.op("MatMul", x, f.weight(HIDDEN, HIDDEN))
        return f.op("Transpose", f.op("Reshape", flat, [BATCH, LENGTH, heads, size]), perm=[0, 2, 1, 3])

    q, k, v = project(), project(), project()
    angles = np.arange(LENGTH)[:, None] * np.tile(np.arange(1.0, size // 2 + 1), 2)
    cos, sin = (f.constant(table(angles)[None, None]) for table in (np.cos, np.sin))
    if form == "tables of the projection":
        cos = f.op("Slice", f.op("Cos", v), [0], [1], [1])
    turned = []
    for part in (q, k):
        low = f.op("Slice", part, [0], [size // 2], [3])
        high = f.op("Slice", part, [size // 2], [size], [3])
        half = f.op("Concat", f.op("Neg", high), low, axis=-1)
        turned.append(f.op("Add", f.op("Mul", part, cos), f.op("Mul", half, sin)))
    scores = f.op("Mul", f.scores(*turned), size**-0.5)
    return f.finish(scores, f.op("Add", v, k) if form == "plain keys are read" else v)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize(
    ("form", "rotations"), [("plain", 1), ("bias", 0), ("plain keys are read", 0), ("tables of the projection", 0)]
)
def test_rotate_in_matmul_takes_what_it_knows(form: str, rotations: int) -> None:
    model = rotated(form)
    lowered = lower(import_model(model), LLVM, FP16)
    assert count(lowered, "matmul_rotated") == rotations
    assert count(lowered, "rotary") == 1 - rotations
    if form != "tables of the projection":
        feeds = {"x": np.random.default_rng(0).standard_normal((BATCH, LENGTH, HIDDEN)).astype("float32")}
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.parametrize(
    ("target", "options", "kernels"),
    [
        (LLVM, FP16, 0),
        (HOPPER, LoweringOptions(precision="fp16", disabled_passes=frozenset({"rotate_in_matmul"})), 2),
        (HOPPER, LoweringOptions(precision="w8a16"), 2),
    ],
    ids=["for a CPU", "switched off", "quantised"],
)
def test_rotate_in_matmul_leaves_the_graph_alone_when_it_is_not_for_it(
    target: tvm.target.Target, options: LoweringOptions, kernels: int
) -> None:
    lowered = lower(import_model(small_model("llama-tiny")), target, options)
    assert notes_of(lowered) == ()
    assert count(lowered, "rotary") == kernels
