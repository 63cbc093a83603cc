from __future__ import annotations

import numpy as np
import pytest

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.layout import interleave_gates
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import Form
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, run_lowered

FP16 = LoweringOptions(precision="fp16")
HOPPER = resolve_target("cuda:sm_90a").target
ROWS, HIDDEN, WIDE = (2, 3), 128, 64


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make for a CPU what is made for Hopper, to run it here."""
    monkeypatch.setattr(LoweringState, "launches_cost", True)
    monkeypatch.setattr(interleave_gates, "template_refusal", lambda _func, _target: None)


def gated(*, activation: str = "silu", swapped: bool = False, wide: int = WIDE, shared: bool = True) -> OnnxModel:
    f = Form()
    x = f.x(*ROWS, HIDDEN)
    gate, up = (f.op("MatMul", x, f.weight(HIDDEN, wide)) for _ in range(2))
    if activation == "silu":
        active = f.op("Mul", gate, f.op("Sigmoid", gate))
    elif activation == "gelu":
        inner = f.op("Mul", f.op("Add", gate, f.op("Mul", f.op("Pow", gate, 3.0), 0.044715)), np.sqrt(2 / np.pi))
        active = f.op("Mul", f.op("Mul", gate, 0.5), f.op("Add", f.op("Tanh", inner), 1.0))
    else:
        active = f.op("Relu", gate)
    product = f.op("Mul", *((up, active) if swapped else (active, up)))
    result = f.op("MatMul", product, f.weight(wide, HIDDEN))
    if not shared:
        return f.model(result, (*ROWS, HIDDEN), **{product: (*ROWS, wide)})
    return f.model(result, (*ROWS, HIDDEN))


def notes_of(lowered: LoweredModule) -> tuple[str, ...]:
    return next(report.notes for report in lowered.reports if report.name == "interleave_gates")


def agrees(model: OnnxModel, lowered: LoweredModule) -> None:
    feeds = {"x": np.random.default_rng(0).standard_normal((*ROWS, HIDDEN)).astype("float32")}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 2e-2)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("swapped", [False, True])
def test_interleave_gates_agrees_with_onnx_runtime(activation: str, swapped: bool) -> None:
    model = gated(activation=activation, swapped=swapped)
    lowered = lower(import_model(model), LLVM, FP16)
    assert notes_of(lowered) == ("1 gates in the epilogues of their matmuls",)
    # The input's rounding, the gated matmul, the last one.
    assert sum(map(len, lowered.kernels.values())) == 3
    assert {array.shape for array in lowered.weights.values()} >= {(HIDDEN, 2 * WIDE)}
    agrees(model, lowered)


def test_interleave_gates_makes_what_the_gemm_template_recognises() -> None:
    lowered = lower(import_model(gated()), HOPPER, FP16)
    assert notes_of(lowered) == ("1 gates in the epilogues of their matmuls",)
    matmul = recognise_matmul(lowered.mod["matmul_gated"])
    assert not isinstance(matmul, Refusal)
    assert (matmul.m, matmul.n, matmul.k, matmul.columns) == (6, 2 * WIDE, HIDDEN, WIDE)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("case", [{"activation": "relu"}, {"wide": 60}, {"shared": False}])
def test_interleave_gates_leaves_other_products_alone(case: dict[str, object]) -> None:
    model = gated(**case)  # type: ignore[arg-type]
    lowered = lower(import_model(model), LLVM, FP16)
    assert notes_of(lowered) == ()
    agrees(model, lowered)


@pytest.mark.parametrize(
    ("target", "options"),
    [("llvm", FP16), ("cuda:sm_75", FP16), ("cuda:sm_90a", LoweringOptions("fp16", frozenset({"interleave_gates"})))],
)
def test_interleave_gates_leaves_the_graph_alone_when_no_template_makes_it(
    target: str, options: LoweringOptions
) -> None:
    assert notes_of(lower(import_model(gated()), resolve_target(target).target, options)) == ()
