"""The peers' torch modules compute what the zoo's graphs compute, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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
# T5 is long enough for distances that share its last bucket, from 128 on.
CASES = (
    Case("bert-tiny", 2, 16),
    Case("gpt2-tiny", 2, 16),
    Case("llama-tiny", 2, 16),
    Case("llama-tiny-decode", 3, 16),
    Case("vit-tiny", 2),
    Case("t5-tiny", 2, 150),
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


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "padding"])
def test_a_step_without_caches_of_its_own_returns_them_grown(masked: bool) -> None:
    case = Case("llama-tiny-decode", 3, 16)
    proto = case.proto(Precision.FP32)
    inputs = case.inputs(real="float32")
    if masked:
        inputs["attention_mask"][1, 10:15] = 0
    expected = as_tensors(Reference(checked_model(case, proto)).run(inputs))
    module = torch_models.build(case, weights_of(proto), {}, device="cpu", dtype=torch.float32, masked=masked)
    with torch.no_grad():
        returned = module(*_tensors(case, inputs))
    assert set(returned) == set(expected)
    agreement = compare(expected, returned, TOLERANCE)
    assert agreement.passed, agreement.reason(TOLERANCE)


@pytest.mark.parametrize("model", ["bert-tiny", "gpt2-tiny", "llama-tiny", "llama-tiny-decode", "t5-tiny", "vit-tiny"])
def test_one_dynamic_graph_serves_all_sizes(model: str) -> None:
    torch._dynamo.reset()
    # Torch takes sizes that are equal in the first call for one size: these differ, from the model's own too.
    cases = [
        Case(model, batch, None if model == "vit-tiny" else length) for batch, length in ((5, 12), (3, 9), (2, 17))
    ]
    weights = weights_of(cases[0].proto(Precision.FP32))
    module = torch_models.build(cases[0], weights, {}, device="cpu", dtype=torch.float32, masked=True)
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for case in cases:
        tensors = _tensors(case, case.inputs(real="float32"))
        with torch.no_grad():
            assert compare(module(*tensors), compiled(*tensors), TOLERANCE).passed
    assert len(graphs) == 1


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


def _tensors(case: Case, inputs: dict[str, np.ndarray]) -> list[Any]:
    return [torch.from_numpy(inputs[spec.name]) for spec in case.preset.inputs]


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
