from __future__ import annotations

import pytest

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.attention import append_in_attention, recognise_attention
from relaxtune.pipeline.passes.attention import kernel as attention_kernel
from relaxtune.schedules.functions.attention import spec_of
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, compiled, run_compiled, run_reference

FP16 = LoweringOptions(precision="fp16")
SIZES = ({"batch": 2, "sequence": 5, "past_sequence": 6}, {"batch": 1, "sequence": 12, "past_sequence": 1})


def symbolic_model(name: str) -> OnnxModel:
    return load_model(name, shapes={spec.name: spec.shape for spec in get_preset(name).inputs})


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise_attention, "has_template", lambda _target: True)
    for module in (attention_kernel, append_in_attention):
        monkeypatch.setattr(module, "template_refusal", lambda _func, _target: None)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny-decode", "llama-tiny"])
def test_symbolic_attention_agrees_with_onnx_runtime_at_several_sizes(name: str) -> None:
    model = symbolic_model(name)
    lowered = lower(import_model(model), LLVM, FP16)
    specs = [spec for kernel in lowered.kernels if (spec := spec_of(lowered.mod[kernel])) is not None]
    assert specs
    assert not any(spec.is_static for spec in specs)
    assert {spec.causal for spec in specs} == {name == "llama-tiny"}
    assert not any("softmax" in kernel for kernel in lowered.kernels)
    machine = compiled(lowered)
    for sizes in SIZES:
        feeds = random_inputs(model, seed=1, dims=sizes)
        assert_agrees(run_compiled(machine, lowered, feeds), run_reference(model, feeds), 2e-2)
