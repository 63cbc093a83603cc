"""Norms inside matmuls of few rows: whole kernels on the CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tvm
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.registry import list_candidates
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.gemv.plan import GemvParameters, GemvPlan, make_plan
from relaxtune.schedules.templates.gemv.template import Gemv
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.templates.block_on_cpu import run_on_cpu
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, captured_cubins, read_cubin
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import NormCase, arrays_of, assert_right, known, named

TARGET = resolve_target("cuda:sm_80")
NORMED = NormCase(MatmulCase((3,), 40, 160, ("bias",), transposed=True), operand=True, shifted=True)
SUMS = NormCase(MatmulCase((3,), 96, 160, ("bias", "residual"), transposed=True), sums=True)
SMALL, WIDE = GemvParameters(1, 2, 2, True), GemvParameters(2, 4, 1, False)
CASES = {
    "normalised rows": (NORMED, SMALL),
    "normalised rows, read from the caches": (replace(NORMED, keeps=True), WIDE),
    "16 rows": (replace(NORMED, matmul=replace(NORMED.matmul, rows=(16,), k=1056)), WIDE),
    "one row, root mean square": (
        replace(NORMED, matmul=replace(NORMED.matmul, rows=(1,), k=528), centred=False, shifted=False),
        SMALL,
    ),
    "partial sums": (SUMS, SMALL),
    "partial sums of two groups of a block": (replace(SUMS, matmul=replace(SUMS.matmul, rows=(16,))), WIDE),
    "partial sums of wide groups": (replace(SUMS, group=32), WIDE),
    "partial sums of few threads": (replace(SUMS, matmul=replace(SUMS.matmul, n=80)), GemvParameters(2, 1, 1, True)),
    "normalised rows and partial sums": (replace(NORMED, matmul=replace(NORMED.matmul, n=48), sums=True), SMALL),
    "blocks share K": (
        replace(NORMED, matmul=replace(NORMED.matmul, rows=(16,), k=192, n=96), sums=True, keeps=True),
        GemvParameters(2, 2, 1, False, split=3),
    ),
    "blocks share K, four tiles": (
        replace(NORMED, matmul=replace(NORMED.matmul, rows=(16,), k=256, n=128), sums=True),
        GemvParameters(4, 2, 2, False, split=2),
    ),
    "blocks share K of odd steps": (
        replace(NORMED, matmul=replace(NORMED.matmul, k=192)),
        GemvParameters(1, 2, 2, True, split=2),
    ),
    "normalised residual": (replace(SUMS, residual=True), SMALL),
}


def made(case: NormCase, parameters: GemvParameters, target: ResolvedTarget) -> tirx.PrimFunc:
    kernel = Gemv().apply(case.func(), target, parameters)
    assert isinstance(kernel, tirx.PrimFunc), kernel
    return kernel


@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float32(case: NormCase, parameters: GemvParameters, tmp_path: Path) -> None:
    kernel, plan = made(case, parameters, TARGET), make_plan(known(case.func()), parameters, cuda_limits(TARGET))
    assert isinstance(plan, GemvPlan)
    inputs, outputs = arrays_of(case)
    run_on_cpu(kernel, TARGET, {**inputs, **outputs}, plan.blocks, tmp_path)
    assert_right(case, inputs, named(outputs), 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a GPU")
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dependent", [False, True])
def test_kernel_agrees_on_a_gpu(case: NormCase, parameters: GemvParameters, dependent: bool) -> None:
    device, host = tvm.cuda(0), resolve_target("cuda").arch.removesuffix("a")
    target = resolve_target(f"cuda:{host}")
    kernel = made(case, replace(parameters, dependent=dependent and host >= "sm_90"), target)
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        library = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    inputs, outputs = arrays_of(case)
    on_device = {name: tvm.runtime.tensor(array, device) for name, array in {**inputs, **outputs}.items()}
    library["main"](*(on_device[str(param.name)] for param in case.func().params))
    assert_right(case, inputs, named({name: on_device[name].numpy() for name in outputs}), 1e-3)


def test_it_comes_first_for_few_rows_and_what_it_cannot_make_is_refused() -> None:
    for case in (NORMED, SUMS):
        found, _ = list_candidates(case.func(), TARGET)
        assert found[0].template == "gemv"
    narrow = Gemv().apply(replace(SUMS, group=32).func(), TARGET, SMALL)
    assert isinstance(narrow, Refusal)
    assert "sums of groups of 32 columns, expected 16 or 32 that divide the 16 of a block" in narrow.reason


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("case", [NORMED, SUMS], ids=["normalised rows", "partial sums"])
def test_first_proposal_spills_nothing(case: NormCase, rows: int) -> None:
    case = replace(case, matmul=replace(case.matmul, rows=(rows,), n=2048, k=2048))
    target = resolve_target("cuda:sm_80@H200")
    kernel = made(case, Gemv().candidates(case.func(), target)[0], target)
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    with captured_cubins("sm_80") as cubins:
        tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    cubin = read_cubin(cubins[0])
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
