"""The machine code of the kernels, without a GPU: mma.sync and cp.async are there, no register is spilled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.gemm_sm80.plan import DEPTH, FLOAT_DEPTH, GemmParameters, GemmPlan, make_plan
from relaxtune.schedules.templates.gemm_sm80.template import FLOAT_TILES, STORED_TILES, TILES, GemmSm80
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.matmul_by_rows import recognise_matmul_by_rows
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.cubin import (
    COPY_ASYNC,
    LAUNCH_DEPENDENTS,
    LOCAL_LOAD,
    LOCAL_STORE,
    MMA_SYNC,
    MULTIPLY_ADD,
    TMA_LOAD,
    captured_cubins,
    read_cubin,
)
from tests.schedules.templates.gemv_cases import GemvCase
from tests.schedules.templates.matmul_cases import MatmulCase

BERT = MatmulCase((1000,), 2304, 776, ("bias", "gelu", "residual"))
HALF_BIAS = replace(BERT, epilogue=("half_bias",))
ODD = replace(BERT, n=2311, transposed=True)
FROM_BFLOAT16 = replace(ODD, epilogue=(), dtype="bfloat16", output="float32")
FLOAT = replace(BERT, dtype="float32", output="float32")
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")


STORED = GemvCase((1000,), 2048, 2080, 4, 32, epilogue="residual")


def planned(case: MatmulCase | GemvCase, parameters: GemmParameters, arch: str) -> GemmPlan | Refusal:
    func = case.func()
    matmul = recognise_matmul_by_rows(func) if isinstance(case, GemvCase) else recognise_matmul(func)
    return make_plan(matmul, parameters, cuda_limits(resolve_target(f"cuda:{arch}")))


def assert_sound(case: MatmulCase | GemvCase, parameters: GemmParameters, arch: str) -> None:
    target, plan = resolve_target(f"cuda:{arch}"), planned(case, parameters, arch)
    assert isinstance(plan, GemmPlan), plan
    made = GemmSm80().apply(case.func().with_attr(CONSTANT_PARAMS_ATTR, (1,)), target, parameters)
    mod = tvm.IRModule({"main": made.with_attr("global_symbol", "main")})
    with captured_cubins(arch) as cubins:
        tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    cubin = read_cubin(cubins[0])
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
    assert cubin.registers * plan.threads <= 65536
    # A stage's instructions, once; more multiply-adds are in the epilogue.
    instruction = FLOAT_DEPTH if case.dtype == "float32" else DEPTH
    multiplications = plan.m_steps * plan.n_steps * parameters.block_k // instruction
    if case.dtype == "float32":
        assert cubin.count(MMA_SYNC) == 0
        assert cubin.count(MULTIPLY_ADD) >= multiplications * 4 * FLOAT_DEPTH
    else:
        assert cubin.count(MMA_SYNC) == multiplications
    assert cubin.count(COPY_ASYNC) >= 2 * parameters.stages
    assert cubin.count(TMA_LOAD) == 0
    assert (cubin.count(LAUNCH_DEPENDENTS) > 0) == parameters.dependent


@pytest.mark.quick_cases(
    "case0-parameters0-sm_80", "case2-parameters2-sm_120", "case4-parameters4-sm_86", "case5-parameters5-sm_80"
)
@pytest.mark.parametrize(
    ("case", "parameters", "arch"),
    [
        (BERT, GemmParameters(128, 128, 32, 4, 2, 2, 8), "sm_80"),
        (ODD, GemmParameters(128, 128, 32, 3, 2, 2, 8), "sm_86"),
        (replace(BERT, epilogue=()), GemmParameters(32, 32, 64, 8, 2, 2, 8, True), "sm_120"),
        (replace(FLOAT, epilogue=()), GemmParameters(128, 128, 16, 3, 2, 4, 8, True), "sm_90a"),
        (STORED, GemmParameters(128, 128, 64, 3, 2, 4, 8), "sm_86"),
        (replace(BERT, rows=(100,), k=3072), GemmParameters(32, 32, 64, 6, 2, 2, 4, split_k=4), "sm_80"),
        (replace(STORED, bits=8, group=128), GemmParameters(64, 128, 64, 4, 1, 4, 8, True), "sm_120"),
    ],
)
def test_cubin_has_mma_and_no_spills(case: MatmulCase | GemvCase, parameters: GemmParameters, arch: str) -> None:
    assert_sound(case, parameters, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("case", "tile"),
    [
        *((case, tile) for case in (BERT, HALF_BIAS, ODD, FROM_BFLOAT16) for tile in TILES),
        *((case, tile) for case in (FLOAT, replace(ODD, dtype="float32", output="float32")) for tile in FLOAT_TILES),
        *((case, tile) for case in (STORED, replace(STORED, bits=8, epilogue="gated")) for tile in STORED_TILES),
    ],
)
def test_every_tile_on_every_target(case: MatmulCase | GemvCase, tile: tuple[int, ...], arch: str) -> None:
    dependent = arch in ("sm_90", "sm_120")
    m, n, k, warps_m, warps_n = tile
    offered = [GemmParameters(m, n, k, stages, warps_m, warps_n, 8, dependent) for stages in (3, 2)]
    fitting = [parameters for parameters in offered if isinstance(planned(case, parameters, arch), GemmPlan)]
    # Targets with 99 KiB of shared memory have no room for two stages of the largest tiles.
    assert fitting or (sum(tile[:3]) > 320 and arch in ("sm_86", "sm_89", "sm_120"))
    for parameters in fitting[:1]:
        assert_sound(case, parameters, arch)
