"""The peers' torch modules compute what the zoo's graphs compute, in float32 on the CPU."""

from __future__ import annotations

import pytest

from benchmarks.gpu_arms.cases import Case, checked_model, weights_of
from relaxtune.models.zoo import Precision
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.tolerances import Tolerance

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.export

from benchmarks.gpu_arms import torch_models  # noqa: E402
from benchmarks.gpu_arms.comparison import as_tensors, compare  # noqa: E402

TOLERANCE = Tolerance(1e-5, 1e-5)
CASES = (
    Case("bert-tiny", 2, 16),
    Case("gpt2-tiny", 2, 16),
    Case("llama-tiny", 2, 16),
    Case("llama-tiny-decode", 3, 16),
    Case("vit-tiny", 2),
)


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "padding"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_module_agrees_with_the_zoos_graph(case: Case, masked: bool) -> None:
    proto = case.proto(Precision.FP32)
    inputs = case.inputs(real="float32")
    if masked and "attention_mask" in inputs:
        inputs["attention_mask"][1, 10:15] = 0
    expected = as_tensors(Reference(checked_model(case, proto)).run(inputs))
    module = torch_models.build(case, weights_of(proto), inputs, device="cpu", dtype=torch.float32, masked=masked)
    with torch.no_grad():
        returned = module(*torch_models.device_inputs(case, inputs, "cpu", torch.float32))
    agreement = compare(expected, torch_models.outputs_of(module, returned), TOLERANCE)
    assert agreement.passed, agreement.reason(TOLERANCE)


def test_a_llama_takes_shorter_calls_than_it_was_built_for() -> None:
    case = Case("llama-tiny", 2, 16)
    inputs = case.inputs(real="float32")
    weights = weights_of(case.proto(Precision.FP32))
    own, longer = (
        torch_models.build(built, weights, {}, device="cpu", dtype=torch.float32, masked=True)
        for built in (case, Case("llama-tiny", 1, 100))
    )
    tensors = torch_models.device_inputs(case, inputs, "cpu", torch.float32)
    with torch.no_grad():
        assert torch.equal(own(*tensors)["logits"], longer(*tensors)["logits"])


def test_padding_changes_what_a_masked_module_gives() -> None:
    case = CASES[0]
    inputs = case.inputs(real="float32")
    weights = weights_of(case.proto(Precision.FP32))
    module = torch_models.build(case, weights, inputs, device="cpu", dtype=torch.float32, masked=True)
    ids, mask, types = torch_models.device_inputs(case, inputs, "cpu", torch.float32)
    with torch.no_grad():
        whole = module(ids, mask, types)["last_hidden_state"]
        padded = module(ids, mask * (torch.arange(16) < 10), types)["last_hidden_state"]
    assert not torch.allclose(whole[:, :10], padded[:, :10], atol=1e-3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_module_traces_as_one_graph(case: Case) -> None:
    inputs = case.inputs(real="float32")
    weights = weights_of(case.proto(Precision.FP32))
    module = torch_models.build(case, weights, inputs, device="cpu", dtype=torch.float32, masked=False)
    tensors = torch_models.device_inputs(case, inputs, "cpu", torch.float32)
    with torch.no_grad():
        expected = torch_models.outputs_of(module, module(*tensors))
        got = torch_models.outputs_of(
            module, torch.compile(module, backend="eager", fullgraph=True, dynamic=False)(*tensors)
        )
    assert compare(expected, got, TOLERANCE).passed


def test_comparison_refuses_nan_missing_outputs_and_other_shapes() -> None:
    expected = {"y": torch.tensor([1.0, 2.0])}
    assert compare(expected, {"y": torch.tensor([1.0, 2.00001])}, TOLERANCE).passed
    for got in (
        {},
        {"y": torch.tensor([1.0])},
        {"y": torch.tensor([1.0, float("nan")])},
        {"y": torch.tensor([1.0, 3.0])},
    ):
        agreement = compare(expected, got, TOLERANCE)
        assert not agreement.passed
        assert "output 'y' is off by" in agreement.reason(TOLERANCE)
