"""Operations between two casts: float16 is rounded at each; bfloat16 where a kernel stores it, as the report says."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, lower
from relaxtune.pipeline.passes.precision.accumulate_in_float32 import BFLOAT16_NOTE
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.passes.pass_cases import make_onnx, run_lowered

X = np.array([300, 1.0123, 0.333, 2.7], np.float32)
CHAINS = (["Mul"], ["Mul", "Mul"], ["Mul", "Sqrt"], ["Exp"], ["Mul", "Add", "Mul"], ["Mul", "Neg", "Mul"])
STEPS = {
    "Mul": lambda x: x * x,
    "Add": lambda x: x + x,
    "Neg": lambda x: -x,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
}


def chain(operators: list[str], dtype: int) -> OnnxModel:
    nodes, last = [helper.make_node("Cast", ["x"], ["t"], name="in", to=dtype)], "t"
    for place, operator in enumerate(operators):
        inputs = [last, last] if operator in ("Mul", "Add") else [last]
        last = f"t{place}"
        nodes.append(helper.make_node(operator, inputs, [last], name=last))
    nodes.append(helper.make_node("Cast", [last], ["y"], name="out", to=TensorProto.FLOAT))
    return make_onnx(nodes, {"x": ("float", X.shape)}, {"y": ("float", X.shape)}, {})


def run(model: OnnxModel) -> tuple[LoweredModule, np.ndarray]:
    target = resolve_target("llvm").target
    lowered = lower(import_model(model), target)
    scheduled = replace(lowered, mod=apply_fallback(lowered.mod, target))
    return lowered, run_lowered(scheduled, {"x": X}, target)[0]


def rounded(operators: list[str], dtype: type) -> np.ndarray:
    x = X.astype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for operator in operators:
            x = np.asarray(STEPS[operator](x.astype(np.float32))).astype(dtype)
    return x.astype(np.float32)


@pytest.mark.parametrize("operators", CHAINS, ids="-".join)
def test_float16_is_rounded_at_each_operation(operators: list[str]) -> None:
    _, got = run(chain(operators, TensorProto.FLOAT16))
    np.testing.assert_array_equal(got, rounded(operators, np.float16))


@pytest.mark.parametrize("operators", CHAINS, ids="-".join)
def test_bfloat16_stays_near_and_the_report_says_where_it_is_rounded(operators: list[str]) -> None:
    lowered, got = run(chain(operators, TensorProto.BFLOAT16))
    np.testing.assert_allclose(got, rounded(operators, ml_dtypes.bfloat16), rtol=2**-6)
    (notes,) = [report.notes for report in lowered.reports if report.name == "accumulate_in_float32"]
    assert notes == (f"{len(operators)} {BFLOAT16_NOTE}",)
