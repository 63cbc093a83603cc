from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.attention import append_in_attention, kernel as attention_kernel, recognise_attention
from relaxtune.schedules.functions.attention import spec_of
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, compiled, run_compiled

FP16 = LoweringOptions(precision="fp16")
SIZES = ({"batch": 2, "sequence": 5, "past_sequence": 6}, {"batch": 1, "sequence": 12, "past_sequence": 1})


def symbolic_model(name: str) -> OnnxModel:
    return load_model(name, shapes={spec.name: spec.shape for spec in get_preset(name).inputs})


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise_attention, "has_template", lambda _target: True)
    for module in (attention_kernel, append_in_attention):
        monkeypatch.setattr(module, "template_refusal", lambda _func, _target: None)


@pytest.mark.quick_cases("gpt2-tiny-decode")
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


@pytest.mark.usefixtures("any_target")
def test_mask_of_ones_in_the_size_of_the_input_is_not_read_when_sizes_are_symbolic(tmp_path: Path) -> None:
    """Exporters write such a mask where a model is called without one."""
    proto = onnx.ModelProto()
    proto.CopyFrom(symbolic_model("bert-tiny").inline_proto())
    (mask,) = (one for one in proto.graph.input if one.name == "attention_mask")
    proto.graph.input.remove(mask)
    ones = helper.make_tensor("ones", TensorProto.INT64, [1], [1])
    proto.graph.node.insert(0, helper.make_node("ConstantOfShape", ["sizes_of_ids"], ["attention_mask"], value=ones))
    proto.graph.node.insert(0, helper.make_node("Shape", ["input_ids"], ["sizes_of_ids"]))
    onnx.save(proto, tmp_path / "unmasked.onnx")
    model = load_model(tmp_path / "unmasked.onnx")
    lowered = lower(import_model(model), LLVM, FP16)
    specs = [spec for kernel in lowered.kernels if (spec := spec_of(lowered.mod[kernel])) is not None]
    assert specs
    assert {(spec.is_static, spec.bias) for spec in specs} == {(False, None)}
    machine = compiled(lowered)
    feeds = random_inputs(model, seed=1, dims={"batch": 2, "sequence": 5})
    assert_agrees(run_compiled(machine, lowered, feeds), run_reference(model, feeds), 2e-2)
