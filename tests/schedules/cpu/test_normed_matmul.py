"""Matmuls that norms were taken into, on a CPU: right on every output, and as quick as the matmul."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

from relaxtune.schedules.fallback import fallback_with_rules
from tests.schedules.kernel_cases import host, loop_kinds, matmul_case
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import OUTPUTS, NormCase, assert_right

PLAIN = MatmulCase((3, 37), 96, 64, ("bias",))
CASES = {
    "statistics kept": NormCase(PLAIN, operand=True, shifted=True, keeps=True),
    "statistics not kept": NormCase(PLAIN, operand=True),
    "RMS": NormCase(replace(PLAIN, epilogue=()), operand=True, centred=False),
    "weights turned": NormCase(replace(PLAIN, transposed=True), operand=True, keeps=True),
    "odd columns": NormCase(replace(PLAIN, n=45), operand=True, keeps=True),
    "sums": NormCase(replace(PLAIN, epilogue=("bias", "residual")), sums=True),
    "odd columns and sums": NormCase(replace(PLAIN, n=45), sums=True, group=9),
    "residual and sums": NormCase(replace(PLAIN, epilogue=("bias", "residual")), residual=True, sums=True),
    "operand and sums": NormCase(PLAIN, operand=True, sums=True, keeps=True),
    "one row": NormCase(replace(PLAIN, rows=(1,)), operand=True, sums=True, keeps=True),
}


def module_of(case: NormCase) -> tvm.IRModule:
    return tvm.IRModule({"main": case.func().with_attr("global_symbol", "main")})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_output_is_right(case: NormCase) -> None:
    mod, inputs, target = module_of(case), case.inputs(np.random.default_rng(0)), host().target
    scheduled, rules = fallback_with_rules(mod, target)
    assert rules == {"main": "cpu-normed-matmul"}
    params = mod["main"].params
    outputs = {
        str(param.name): np.full([int(size) for size in param.ty.shape], np.nan, str(param.ty.dtype))
        for param in params
        if param.name in OUTPUTS
    }
    tensors = {name: tvm.runtime.tensor(array) for name, array in {**inputs, **outputs}.items()}
    tvm.compile(scheduled, target=target)["main"](*(tensors[str(param.name)] for param in params))
    assert_right(case, inputs, {name: tensors[name].numpy() for name in outputs}, 1e-3)
    assert loop_kinds(scheduled) >= {"vectorized", "unrolled"}


def test_other_functions_are_left_to_other_rules() -> None:
    target = host().target
    assert fallback_with_rules(matmul_case(32, 96, 24, epilogue="bias").module, target)[1] == {"main": "cpu-matmul"}
    reads = NormCase(replace(PLAIN, epilogue=("bias", "residual")), residual=True, shifted=True)
    assert fallback_with_rules(module_of(reads), target)[1] == {"main": "cpu-matmul"}
