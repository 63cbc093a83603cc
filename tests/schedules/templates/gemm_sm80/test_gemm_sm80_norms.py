"""Norms inside the template's matmuls, and tiles of other heights than powers of two: whole kernels on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tvm
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.gemm_sm80.plan import GemmParameters, GemmPlan, make_plan
from relaxtune.schedules.templates.gemm_sm80.template import GemmSm80
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.templates.block_on_cpu import run_on_cpu
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import NormCase, arrays_of, assert_right, known, named

TARGET = resolve_target("cuda:sm_80")
PLAIN = MatmulCase((100,), 64, 256, ("bias", "residual"))
NORMED = NormCase(MatmulCase((70,), 64, 160, ("bias",), transposed=True), group=16, operand=True, shifted=True)
CASES = {
    "heights of 48": (NormCase(PLAIN), GemmParameters(96, 64, 32, 4, 2, 2, 8)),
    "five fragments of rows": (NormCase(replace(PLAIN, transposed=True)), GemmParameters(80, 64, 64, 3, 1, 2, 8)),
    "blocks share sums": (NormCase(PLAIN), GemmParameters(48, 32, 32, 3, 3, 1, 8, split_k=4)),
    "partial sums": (NormCase(PLAIN, group=32, sums=True), GemmParameters(32, 64, 32, 3, 2, 2, 4)),
    "normalised rows": (NORMED, GemmParameters(48, 64, 32, 3, 1, 4, 8)),
    "normalised rows, statistics, both": (
        replace(NORMED, matmul=replace(NORMED.matmul, rows=(2, 50), transposed=False), keeps=True, sums=True),
        GemmParameters(64, 32, 32, 4, 2, 1, 8),
    ),
    "root mean square": (replace(NORMED, centred=False, shifted=False), GemmParameters(32, 32, 32, 3, 2, 2, 8)),
    "normalised residual": (
        NormCase(replace(PLAIN, epilogue=("bias", "residual")), residual=True, shifted=True, sums=True),
        GemmParameters(32, 64, 64, 3, 2, 2, 8),
    ),
    "statistics of blocks that share sums": (
        replace(NORMED, matmul=replace(NORMED.matmul, k=192), keeps=True),
        GemmParameters(32, 32, 32, 3, 2, 1, 8, split_k=2),
    ),
}


WIDE = NormCase(MatmulCase((1000,), 768, 768, ("bias",)), group=32, operand=True, shifted=True)
WIDE_CASES = {
    "partial sums": (
        NormCase(replace(WIDE.matmul, epilogue=("bias", "residual")), group=32, sums=True),
        GemmParameters(192, 128, 32, 4, 4, 2, 8),
    ),
    "normalised rows": (WIDE, GemmParameters(96, 128, 32, 4, 2, 2, 8)),
    "normalised rows, statistics": (replace(WIDE, keeps=True), GemmParameters(80, 128, 64, 3, 1, 4, 8)),
    "long rows": (
        replace(WIDE, matmul=replace(WIDE.matmul, k=2048, transposed=True), centred=False, shifted=False, group=32),
        GemmParameters(96, 64, 64, 4, 2, 2, 8),
    ),
}


@pytest.mark.quick_cases(
    "five fragments of rows",
    "normalised rows, statistics, both",
    "normalised residual",
    "statistics of blocks that share sums",
)
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float32(case: NormCase, parameters: GemmParameters, tmp_path: Path) -> None:
    func = case.func()
    kernel = GemmSm80().apply(func, TARGET, parameters)
    assert isinstance(kernel, tirx.PrimFunc), kernel
    plan = make_plan(known(func), parameters, cuda_limits(TARGET))
    assert isinstance(plan, GemmPlan)
    inputs, outputs = arrays_of(case)
    run_on_cpu(kernel, TARGET, {**inputs, **outputs}, plan.tiles_m * plan.tiles_n * parameters.split_k, tmp_path)
    assert_right(case, inputs, named(outputs), 1e-3)


@pytest.mark.quick_cases("100")
@pytest.mark.parametrize("rows", [1, 100])
def test_kernel_of_symbolic_rows_agrees_with_float32(rows: int, tmp_path: Path) -> None:
    static = replace(NORMED, matmul=replace(NORMED.matmul, rows=(rows,)), keeps=True, sums=True)
    symbolic = replace(static, matmul=replace(static.matmul, rows=(tirx.Var("rows", "int64"),)))
    kernel = GemmSm80().apply(symbolic.func(), TARGET, GemmParameters(48, 64, 32, 3, 1, 4, 8), 512)
    assert isinstance(kernel, tirx.PrimFunc), kernel
    inputs, outputs = arrays_of(static)
    tiles = -(-rows // 48)
    # Elements of A, rows, rows of tiles.
    sizes = rows * static.matmul.k, rows, tiles
    run_on_cpu(kernel, TARGET, {**inputs, **outputs}, tiles, tmp_path, sizes)
    assert_right(static, inputs, named(outputs), 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a GPU")
@pytest.mark.parametrize(("case", "parameters"), [*CASES.values(), *WIDE_CASES.values()], ids=[*CASES, *WIDE_CASES])
def test_kernel_agrees_on_a_gpu(case: NormCase, parameters: GemmParameters) -> None:
    target, device = resolve_target(f"cuda:{resolve_target('cuda').arch.removesuffix('a')}"), tvm.cuda(0)
    func = case.func()
    made = GemmSm80().apply(func, target, parameters)
    assert isinstance(made, tirx.PrimFunc), made
    mod = tvm.IRModule({"main": made.with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        kernel = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    for _ in range(3):
        inputs, outputs = arrays_of(case)
        on_device = {name: tvm.runtime.tensor(array, device) for name, array in {**inputs, **outputs}.items()}
        kernel["main"](*(on_device[str(param.name)] for param in func.params))
        assert_right(case, inputs, named({name: on_device[name].numpy() for name in outputs}), 1e-3)
