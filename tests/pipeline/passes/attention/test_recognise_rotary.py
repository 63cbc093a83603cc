from __future__ import annotations

import numpy as np
import pytest

from relaxtune.models import OnnxModel
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.attention import kernel as attention_kernel, recognise_attention
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import BATCH, HEADS, HIDDEN, LENGTH, SIZE, Form
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, run_lowered, small_model

FP16 = LoweringOptions(precision="fp16")
TOLERANCE = 2e-2


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make for a CPU what is made for Hopper, to run it here."""
    monkeypatch.setattr(LoweringState, "launches_cost", True)
    monkeypatch.setattr(recognise_attention, "has_template", lambda _target: True)
    monkeypatch.setattr(attention_kernel, "template_refusal", lambda _func, _target: None)


def notes_of(lowered: LoweredModule) -> tuple[str, ...]:
    return next(report.notes for report in lowered.reports if report.name == "recognise_rotary")


def kernels_of_layer(lowered: LoweredModule, layer: str) -> list[str]:
    calls = [(name, call) for name, found in lowered.kernels.items() for call in found]
    return [name for name, call in calls if any(node.startswith(layer) for node in call.onnx_nodes)]


@pytest.mark.quick_cases("llama-tiny-fp16-options1")
@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize(
    ("name", "precision", "options"),
    [
        ("llama-tiny", None, FP16),
        ("llama-tiny", "fp16", LoweringOptions()),
        ("llama-tiny-decode", "fp16", LoweringOptions()),
    ],
)
def test_recognise_rotary_agrees_with_onnx_runtime_when_model_is_llama(
    name: str, precision: str | None, options: LoweringOptions
) -> None:
    model = small_model(name, precision=precision)
    lowered = lower(import_model(model), LLVM, options)
    assert notes_of(lowered) == ("2 pairs of rotations as one kernel each",)
    assert sum("rotary" in name for name in lowered.kernels) == 1
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


def test_recognise_rotary_leaves_six_kernels_a_layer_when_model_is_llama() -> None:
    options = LoweringOptions(precision="fp16", disabled_passes=frozenset({"rotate_in_matmul"}))
    lowered = lower(import_model(small_model("llama-tiny")), resolve_target("cuda:sm_90a").target, options)
    assert len(kernels_of_layer(lowered, "/model/layers.1/")) == 6


def rotations(*, share: bool, turn_left: bool = True) -> OnnxModel:
    """Rotate queries and keys of one projection, with one pair of tables or with two."""
    f = Form()
    q, k, v = f.qkv()
    angles = np.arange(LENGTH)[:, None] * np.tile(np.arange(1.0, SIZE // 2 + 1), 2)
    turned = []
    for part in (q, k):
        tables = [
            f.constant((table(angles) + (0.0 if share else 0.5 * len(turned)))[None, None])
            for table in (np.cos, np.sin)
        ]
        low = f.op("Slice", part, [0], [SIZE // 2], [3])
        high = f.op("Slice", part, [SIZE // 2], [SIZE], [3])
        halves = (f.op("Neg", high), low) if turn_left else (high, f.op("Neg", low))
        half = f.op("Concat", *halves, axis=-1)
        turned.append(f.op("Add", f.op("Mul", part, tables[0]), f.op("Mul", half, tables[1])))
    return f.finish(f.divided(f.scores(*turned)), v)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize(("share", "turn_left"), [(False, True), (True, False)])
def test_recognise_rotary_leaves_rotations_alone_when_they_differ(share: bool, turn_left: bool) -> None:
    model = rotations(share=share, turn_left=turn_left)
    lowered = lower(import_model(model), LLVM, FP16)
    assert notes_of(lowered) == ()
    feeds = {"x": np.random.default_rng(0).standard_normal((BATCH, LENGTH, HIDDEN)).astype("float32")}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("llvm", FP16),
        ("cuda:sm_90a", LoweringOptions()),
        ("cuda:sm_90a", LoweringOptions(precision="fp16", disabled_passes=frozenset({"recognise_rotary"}))),
    ],
)
def test_recognise_rotary_leaves_the_graph_alone_when_it_is_not_for_it(target: str, options: LoweringOptions) -> None:
    lowered = lower(import_model(rotations(share=True)), resolve_target(target).target, options)
    assert notes_of(lowered) == ()
    assert not any("rotary" in name for name in lowered.kernels)
    assert HEADS * SIZE == HIDDEN
