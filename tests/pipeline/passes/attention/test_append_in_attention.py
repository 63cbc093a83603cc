from __future__ import annotations

import pytest

from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.attention import append_in_attention, kernel as attention_kernel, recognise_attention
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.functions.attention import spec_of
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import cached
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, run_lowered, small_model

HOPPER = resolve_target("cuda:sm_90a").target
FP16 = LoweringOptions(precision="fp16")
OFF = LoweringOptions(disabled_passes=frozenset({"append_in_attention"}))
TOLERANCE = 2e-2


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make for a CPU what is made for Hopper, to run it here."""
    monkeypatch.setattr(LoweringState, "launches_cost", True)
    monkeypatch.setattr(recognise_attention, "has_template", lambda _target: True)
    for module in (attention_kernel, append_in_attention):
        monkeypatch.setattr(module, "template_refusal", lambda _func, _target: None)


def notes_of(lowered: LoweredModule) -> tuple[str, ...]:
    return next(report.notes for report in lowered.reports if report.name == "append_in_attention")


def growing(lowered: LoweredModule) -> int:
    """Return how many calls are of attentions that append."""
    specs = {name: spec_of(lowered.mod[name]) for name in lowered.kernels}
    return sum(len(lowered.kernels[name]) for name, spec in specs.items() if spec is not None and spec.growth)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("name", ["gpt2-tiny-decode", "llama-tiny-decode"])
def test_append_in_attention_agrees_with_onnx_runtime(name: str) -> None:
    model = small_model(name, precision="fp16")
    lowered = lower(import_model(model), LLVM)
    assert notes_of(lowered) == ("2 attentions append to their caches",)
    assert growing(lowered) == 2
    assert not any(kernel.startswith("append") for kernel in lowered.kernels)
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
def test_append_in_attention_leaves_a_decode_step_five_kernels_a_layer(target: str) -> None:
    lowered = lower(import_model(small_model("llama-tiny-decode", precision="fp16")), resolve_target(target).target)
    assert growing(lowered) == 2
    a_layer = [
        name
        for name, calls in lowered.kernels.items()
        for call in calls
        if any(node.startswith("/model/layers.1/") for node in call.onnx_nodes)
    ]
    assert len(a_layer) == 5
    (attention,) = [name for name in lowered.kernels if name.startswith("attention")]
    assert all(any("Concat" in node for node in call.onnx_nodes) for call in lowered.kernels[attention])


@pytest.mark.usefixtures("any_target")
def test_append_in_attention_leaves_caches_with_rounded_copies_to_append_caches() -> None:
    lowered = lower(import_model(cached()), LLVM, FP16)
    assert growing(lowered) == 0
    assert any(name.startswith("append") for name in lowered.kernels)


def test_append_in_attention_leaves_a_cpu_alone() -> None:
    lowered = lower(import_model(small_model("llama-tiny-decode", precision="fp16")), LLVM)
    assert notes_of(lowered) == ()
    assert growing(lowered) == 0


def test_append_in_attention_can_be_switched_off() -> None:
    lowered = lower(import_model(small_model("llama-tiny-decode", precision="fp16")), HOPPER, OFF)
    assert growing(lowered) == 0
    assert sum(len(calls) for name, calls in lowered.kernels.items() if name.startswith("append")) == 2
