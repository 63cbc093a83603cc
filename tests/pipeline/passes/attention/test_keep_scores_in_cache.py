from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.schedules.fallback import schedule_by_rules
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, compiled, run_compiled, small_model

# With 130 rows, several jobs share a head, of which two or three copy V; the last one may have fewer rows, or none.
SIZES = (
    {"batch": 2, "sequence": 5, "past_sequence": 6},
    {"batch": 1, "sequence": 40, "past_sequence": 1},
    {"batch": 1, "sequence": 130, "past_sequence": 1},
    {"batch": 3, "sequence": 130, "past_sequence": 1},
)


def symbolic_model(name: str) -> OnnxModel:
    return load_model(name, shapes={spec.name: spec.shape for spec in get_preset(name).inputs})


def attentions(lowered: LoweredModule) -> int:
    return sum(len(calls) for name, calls in lowered.kernels.items() if name.startswith("attention"))


def softmaxes(lowered: LoweredModule) -> int:
    return sum(len(calls) for name, calls in lowered.kernels.items() if "softmax" in name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny"])
def test_attention_of_symbolic_lengths_is_one_kernel_with_the_same_results(name: str) -> None:
    model = symbolic_model(name)
    lowered = lower(import_model(model), LLVM)
    assert (attentions(lowered), softmaxes(lowered)) == (2, 0)
    # Of Q, K and V, which one matmul makes, Q and V are read where they lie.
    assert sum(len(calls) for kernel, calls in lowered.kernels.items() if "transpose" in kernel) == 2
    (func,) = (lowered.mod[kernel] for kernel in lowered.kernels if kernel.startswith("attention"))
    assert schedule_by_rules("attention", func, LLVM)[0] == "cpu-any-size-attention"
    machine = compiled(lowered)
    for sizes in SIZES:
        feeds = random_inputs(model, seed=1, dims=sizes)
        assert_agrees(run_compiled(machine, lowered, feeds), run_reference(model, feeds), 1e-4)


def test_attention_stays_three_kernels_when_lengths_are_known_or_the_pass_is_off() -> None:
    assert attentions(lower(import_model(small_model("bert-tiny")), LLVM)) == 0
    off = LoweringOptions(disabled_passes=frozenset({"keep_scores_in_cache"}))
    lowered = lower(import_model(symbolic_model("bert-tiny")), LLVM, off)
    assert (attentions(lowered), softmaxes(lowered)) == (0, 2)


def test_attention_stays_three_kernels_where_its_weights_are_a_result(tmp_path: Path) -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(symbolic_model("bert-tiny").inline_proto())
    weights = next(node.output[0] for node in proto.graph.node if node.op_type == "Softmax")
    proto.graph.output.append(
        helper.make_tensor_value_info(weights, TensorProto.FLOAT, ["batch", 2, "sequence", "sequence"])
    )
    onnx.save(proto, tmp_path / "weights.onnx")
    lowered = lower(import_model(load_model(tmp_path / "weights.onnx")), LLVM)
    assert (attentions(lowered), softmaxes(lowered)) == (1, 1)
