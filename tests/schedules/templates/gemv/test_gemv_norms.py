"""Norms inside matmuls of few rows: whole kernels on the CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
import tvm
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.registry import list_candidates
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.gemv.plan import GemvParameters, GemvPlan, GemvStreamParameters, make_plan
from relaxtune.schedules.templates.gemv.template import Gemv, GemvStream
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.templates.block_on_cpu import run_on_cpu
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, captured_cubins, read_cubin
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import NormCase, arrays_of, assert_right, known, named

TARGET = resolve_target("cuda:sm_80")
NORMED = NormCase(MatmulCase((3,), 40, 160, ("bias",), transposed=True), operand=True, shifted=True)
SUMS = NormCase(MatmulCase((3,), 96, 160, ("bias", "residual"), transposed=True), sums=True)
Shares: TypeAlias = "GemvParameters | GemvStreamParameters"
SMALL, WIDE = GemvParameters(1, 2, 2, True), GemvParameters(2, 4, 1, False)
CASES: dict[str, tuple[NormCase, Shares]] = {
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
    "streams": (NORMED, GemvStreamParameters(1, 2, 2, 2)),
    "streams, 16 rows": (
        replace(NORMED, matmul=replace(NORMED.matmul, rows=(16,), k=1056), keeps=True),
        GemvStreamParameters(1, 4, 3, 3),
    ),
    "streams, steps on their way before x": (NORMED, GemvStreamParameters(1, 2, 4, 2, early=1)),
    "streams, root mean square": (
        replace(NORMED, centred=False, shifted=False, keeps=True),
        GemvStreamParameters(1, 2, 2, 2),
    ),
    "streams, collected": (NORMED, GemvStreamParameters(1, 2, 2, 2, collected=True)),
    "streams, partial sums of wide groups": (replace(SUMS, group=32), GemvStreamParameters(2, 4, 1, 2)),
    "streams, normalised residual": (replace(SUMS, residual=True), GemvStreamParameters(1, 2, 2, 6)),
    "streams, x too": (
        replace(SUMS, matmul=replace(SUMS.matmul, rows=(16,), k=240)),
        GemvStreamParameters(1, 2, 3, 6, held=2),
    ),
    "streams, x too, for several tiles": (
        replace(SUMS, matmul=replace(SUMS.matmul, k=256)),
        GemvStreamParameters(1, 2, 2, 4, held=1),
    ),
    "streams, blocks share K": (
        replace(SUMS, matmul=replace(SUMS.matmul, rows=(16,), k=192, n=96)),
        GemvStreamParameters(1, 2, 2, 12, collected=True, split=3),
    ),
    "streams, blocks share K of one tile": (
        replace(SUMS, matmul=replace(SUMS.matmul, k=192, n=48)),
        GemvStreamParameters(1, 2, 2, 6, split=2),
    ),
}
# What the CPU's compiler has no type for.
BFLOAT16 = replace(NORMED, matmul=replace(NORMED.matmul, dtype="bfloat16"))
GPU_CASES = {**CASES, "streams, bfloat16": (BFLOAT16, GemvStreamParameters(1, 2, 2, 2))}


def made(case: NormCase, parameters: Shares, target: ResolvedTarget) -> tirx.PrimFunc:
    template = Gemv() if isinstance(parameters, GemvParameters) else GemvStream()
    kernel = template.apply(case.func(), target, parameters)
    assert isinstance(kernel, tirx.PrimFunc), kernel
    return kernel


def blocks_of(case: NormCase, parameters: Shares) -> int:
    if isinstance(parameters, GemvStreamParameters):
        return parameters.blocks
    plan = make_plan(known(case.func()), parameters, cuda_limits(TARGET))
    assert isinstance(plan, GemvPlan)
    return plan.blocks


@pytest.mark.quick_cases(
    "normalised rows, read from the caches",
    "one row, root mean square",
    "partial sums of two groups of a block",
    "normalised rows and partial sums",
    "blocks share K",
    "normalised residual",
    "streams, 16 rows",
    "streams, steps on their way before x",
    "streams, collected",
    "streams, x too",
    "streams, blocks share K",
)
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float32(case: NormCase, parameters: Shares, tmp_path: Path) -> None:
    kernel = made(case, parameters, TARGET)
    inputs, outputs = arrays_of(case)
    run_on_cpu(kernel, TARGET, {**inputs, **outputs}, blocks_of(case, parameters), tmp_path)
    assert_right(case, inputs, named(outputs), 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a GPU")
@pytest.mark.parametrize(("case", "parameters"), GPU_CASES.values(), ids=GPU_CASES.keys())
@pytest.mark.parametrize("dependent", [False, True])
def test_kernel_agrees_on_a_gpu(case: NormCase, parameters: Shares, dependent: bool) -> None:
    device, host = tvm.cuda(0), resolve_target("cuda").arch.removesuffix("a")
    target = resolve_target(f"cuda:{host}")
    kernel = made(case, replace(parameters, dependent=dependent and host >= "sm_90"), target)
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        library = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    inputs, outputs = arrays_of(case)
    on_device = {name: tvm.runtime.tensor(array, device) for name, array in {**inputs, **outputs}.items()}
    library["main"](*(on_device[str(param.name)] for param in case.func().params))
    error_max = 1e-3 if case.matmul.dtype == "float16" else 1e-2
    assert_right(case, inputs, named({name: on_device[name].numpy() for name in outputs}), error_max)


def test_they_come_first_for_few_rows_and_what_they_cannot_make_is_refused() -> None:
    for case in (NORMED, SUMS):
        found, _ = list_candidates(case.func(), TARGET)
        assert found[0].template == "gemv_stream"
        assert "gemv" in {one.template for one in found}
    narrow = Gemv().apply(replace(SUMS, group=32).func(), TARGET, SMALL)
    assert isinstance(narrow, Refusal)
    assert "sums of groups of 32 columns, expected 16 or 32 that divide the 16 of a block" in narrow.reason
    part = GemvStream().apply(NORMED.func(), TARGET, GemvStreamParameters(1, 1, 2, 5, split=5))
    assert isinstance(part, Refusal)
    assert "split is 5, but statistics of rows are made of whole rows" in part.reason


@pytest.mark.slow
@pytest.mark.parametrize("template", [Gemv(), GemvStream()], ids=["gemv", "gemv_stream"])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("case", [NORMED, SUMS], ids=["normalised rows", "partial sums"])
def test_no_proposal_spills(case: NormCase, rows: int, template: Gemv | GemvStream) -> None:
    case = replace(case, matmul=replace(case.matmul, rows=(rows,), n=2048, k=2048))
    target = resolve_target("cuda:sm_80@H200")
    found = template.candidates(case.func(), target)
    assert not isinstance(found, Refusal)
    for parameters in found[:1] if isinstance(template, Gemv) else found:
        mod = tvm.IRModule({"main": made(case, parameters, target).with_attr("global_symbol", "main")})
        with captured_cubins("sm_80") as cubins:
            tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
        cubin = read_cubin(cubins[0])
        assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0, parameters
