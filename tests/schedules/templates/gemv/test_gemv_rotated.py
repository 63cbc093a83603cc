"""Matmuls of few rows that rotate heads: whole kernels on the CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.gemv.plan import GemvParameters, GemvPlan, make_plan
from relaxtune.schedules.templates.gemv.template import Gemv
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.matmul_by_rows import recognise_matmul_by_rows
from tests.schedules.templates.block_on_cpu import run_on_cpu
from tests.schedules.templates.rotated_cases import RotatedCase

TARGET = resolve_target("cuda:sm_80")
ONE = RotatedCase(1, 1, 200, 192, 128, 32, turned=True)
# Two tiles of W are of one head, or of two; the last block may have one tile alone.
CASES = {
    "one row": (ONE, GemvParameters(1, 2, 2, staged=False)),
    "two heads, and a tile behind the last": (
        replace(ONE, n=208, columns=192, head=16), GemvParameters(2, 2, 1, staged=False),
    ),
    "tables of each row": (replace(ONE, batch=5, positions=3, tables=5), GemvParameters(2, 4, 1, staged=False)),
    "all rotated": (
        replace(ONE, batch=2, columns=192, head=64, dtype="bfloat16"), GemvParameters(1, 2, 1, staged=False),
    ),
}  # fmt: skip


def made(case: RotatedCase, parameters: GemvParameters, target: ResolvedTarget) -> tirx.PrimFunc:
    kernel = Gemv().apply(case.func(), target, parameters)
    assert isinstance(kernel, tirx.PrimFunc), kernel
    return kernel


def assert_near(case: RotatedCase, found: np.ndarray, inputs: list[np.ndarray]) -> None:
    right = case.expected(inputs)
    error = np.linalg.norm(found.astype("float32") - right) / np.linalg.norm(right)
    assert error < (4e-3 if case.dtype == "bfloat16" else 6e-4)


def output_of(case: RotatedCase, arguments: list[np.ndarray]) -> np.ndarray:
    return np.full((case.batch, case.positions, case.n), np.nan, arguments[0].dtype)


@pytest.mark.quick_cases("two heads, and a tile behind the last")
@pytest.mark.parametrize("name", [name for name, (case, _) in CASES.items() if case.dtype == "float16"])
def test_heads_are_rotated(name: str, tmp_path: Path) -> None:
    case, parameters = CASES[name]
    kernel, inputs = made(case, parameters, TARGET), case.inputs(np.random.default_rng(0))
    plan = make_plan(recognise_matmul_by_rows(case.func()), parameters, cuda_limits(TARGET))
    assert isinstance(plan, GemvPlan)
    arguments = case.arguments(inputs)
    output = output_of(case, arguments)
    names = [str(param.name) for param in kernel.params]
    run_on_cpu(kernel, TARGET, dict(zip(names, [*arguments, output], strict=True)), plan.blocks, tmp_path)
    assert_near(case, output, inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dependent", [False, True])
def test_heads_are_rotated_on_a_gpu(name: str, staged: bool, dependent: bool) -> None:
    case, parameters = CASES[name]
    target, device = resolve_target("cuda"), tvm.cuda(0)
    kernel = made(case, replace(parameters, staged=staged, dependent=dependent), target)
    with cuda_compiler(target.arch):
        mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
        compiled = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    rng = np.random.default_rng(0)
    for _ in range(5):
        inputs = case.inputs(rng)
        arguments = case.arguments(inputs)
        tensors = [tvm.runtime.tensor(array, device) for array in (*arguments, output_of(case, arguments))]
        compiled["main"](*tensors)
        assert_near(case, tensors[-1].numpy(), inputs)
