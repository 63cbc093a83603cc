"""The GEMM template on mma.sync with 8-bit integers: what it takes, its machine code, and its results on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.registry import list_candidates
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.gemm_sm80.plan import GemmParameters, GemmPlan, make_plan
from relaxtune.schedules.templates.gemm_sm80.template import BYTE_TILES, GemmSm80
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.cubin import (
    COPY_ASYNC,
    LOCAL_LOAD,
    LOCAL_STORE,
    MMA_INTEGER,
    MMA_SYNC,
    captured_cubins,
    read_cubin,
)
from tests.schedules.templates.eightbit_cases import EXACT, INTEGERS, expected, poisoned, random_inputs
from tests.schedules.templates.matmul_cases import MatmulCase

LARGE = replace(INTEGERS, rows=(4096,), n=3072, k=768, epilogue=("dequantised", "bias", "gelu"), output="float16")
BYTES = replace(LARGE, epilogue=("corrected", "dequantised", "bias", "gelu", "requantised"), output="uint8")
RAGGED = replace(INTEGERS, rows=(300,), n=457, k=400)
SMALL = GemmParameters(64, 64, 128, 3, 2, 2)
TARGETS = ("cuda:sm_80", "cuda:sm_86", "cuda:sm_89", "cuda:sm_90", "cuda:sm_120")
# Every tile, and every epilogue of Hopper's cases.
CASES = {
    "x".join(map(str, tile)): (RAGGED, GemmParameters(*tile[:3], 2 if sum(tile[:3]) > 320 else 3, *tile[3:], group=2))
    for tile in BYTE_TILES
} | {
    "split": (replace(RAGGED, k=1024), replace(SMALL, split_k=4)),
    **{f"as Hopper's: {name}": (case, SMALL) for name, (case, _) in EXACT.items()},
}


def plan(case: MatmulCase, parameters: GemmParameters, text: str = "cuda:sm_80") -> GemmPlan | Refusal:
    return make_plan(recognise_matmul(case.func()), parameters, cuda_limits(resolve_target(text)))


@pytest.mark.parametrize("text", TARGETS)
@pytest.mark.parametrize(
    "case", [LARGE, BYTES, replace(LARGE, rows=(17,)), replace(BYTES, dtype="uint8", dtype_b="int8")]
)
def test_integers_are_proposed_and_fit(case: MatmulCase, text: str) -> None:
    target, func = resolve_target(text), case.func()
    found, _ = list_candidates(func, target)
    assert len(found) >= 4
    for parameters in found:
        assert parameters.template == "gemm_sm80"
        made = plan(case, parameters, text)
        assert isinstance(made, GemmPlan)
        assert made.shared_bytes <= cuda_limits(target).shared_bytes_optin
    assert isinstance(GemmSm80().apply(func, target, found[0]), tvm.tirx.PrimFunc)


@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_case_can_be_made(case: MatmulCase, parameters: GemmParameters) -> None:
    assert isinstance(GemmSm80().apply(case.func(), resolve_target("cuda:sm_80"), parameters), tvm.tirx.PrimFunc)


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (LARGE, "cuda:sm_90a", "the target has wgmma"),
        (replace(INTEGERS, transposed=False), "cuda:sm_80", "B of int8 is [K, N], expected [N, K]"),
        (replace(INTEGERS, k=200), "cuda:sm_80", "K is 200, expected a multiple of 16"),
        (replace(LARGE, output="int16"), "cuda:sm_80", "the output is int16"),
    ],
)
def test_others_are_refused_with_the_reason(case: MatmulCase, target: str, reason: str) -> None:
    found = GemmSm80().candidates(case.func(), resolve_target(target))
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_a_stage_is_of_128_bytes_of_k_at_most() -> None:
    refused = plan(LARGE, replace(SMALL, block_k=32))
    assert isinstance(refused, Refusal)
    assert "block_k is 32, expected a power of 2 from 64 to 128" in refused.reason


@pytest.mark.parametrize(
    ("case", "parameters", "arch"),
    [
        (LARGE, GemmParameters(128, 128, 64, 4, 2, 2, 8), "sm_80"),
        (BYTES, GemmParameters(128, 128, 128, 2, 2, 4, 8), "sm_86"),
        (replace(BYTES, dtype="uint8", dtype_b="int8"), GemmParameters(64, 128, 64, 3, 2, 2, 8, True), "sm_120"),
    ],
)
def test_cubin_has_8_bit_mma_and_no_spills(case: MatmulCase, parameters: GemmParameters, arch: str) -> None:
    target, made = resolve_target(f"cuda:{arch}"), plan(case, parameters, f"cuda:{arch}")
    assert isinstance(made, GemmPlan), made
    mod = tvm.IRModule({"main": GemmSm80().apply(case.func(), target, parameters).with_attr("global_symbol", "main")})
    with captured_cubins(arch) as cubins:
        tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    cubin = read_cubin(cubins[0])
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
    assert cubin.count(MMA_INTEGER) == made.m_steps * made.n_steps * parameters.block_k // 32
    assert cubin.count(MMA_SYNC) == 0
    assert cubin.count(COPY_ASYNC) >= 2 * parameters.stages


@pytest.mark.gpu
@pytest.mark.skipif(
    not tvm.cuda(0).exist or float(tvm.cuda(0).compute_version) < 8, reason="needs a GPU of compute capability 8.0"
)
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_integers_are_exact(case: MatmulCase, parameters: GemmParameters) -> None:
    # The GPU's own code, without what only one compute capability has.
    target = resolve_target(f"cuda:{resolve_target('cuda').arch.removesuffix('a')}")
    mod = tvm.IRModule({"main": GemmSm80().apply(case.func(), target, parameters).with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        kernel = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    for _ in range(10):
        arrays = random_inputs(case, rng)
        tensors = [tvm.runtime.tensor(array, device) for array in (*arrays, poisoned(case))]
        kernel["main"](*tensors)
        np.testing.assert_array_equal(tensors[-1].numpy(), expected(case, arrays))
