"""The GEMM template on mma.sync with float8: whole kernels on the CPU, their machine code, results on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.registry import list_candidates
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.gemm_sm80.plan import GemmParameters, GemmPlan, make_plan
from relaxtune.schedules.templates.gemm_sm80.template import FLOAT8_TILES, GemmSm80
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.block_on_cpu import run_on_cpu
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, MMA_FLOAT8, MMA_SYNC, captured_cubins, read_cubin
from tests.schedules.templates.eightbit_cases import ML_DTYPES, expected, poisoned, random_inputs
from tests.schedules.templates.matmul_cases import MatmulCase

EIGHTS = MatmulCase((33,), 32, 208, ("dequantised", "bias"), "float8_e4m3fn", "float16", transposed=True)
LONG = replace(EIGHTS, k=2048, epilogue=(), output="float32")
LARGE = replace(EIGHTS, rows=(4096,), n=3072, k=768, epilogue=("bias", "gelu"))
ODD = replace(LARGE, n=3073, epilogue=(), dtype="float8_e5m2", dtype_b="float8_e4m3fn", output="float32")
SMALL = GemmParameters(32, 32, 64, 3, 2, 1)
CASES = {
    "scales and bias": (EIGHTS, SMALL),
    "wide exponents": (replace(EIGHTS, dtype_b="float8_e5m2"), replace(SMALL, block_k=128)),
    "both wide, split": (replace(EIGHTS, dtype="float8_e5m2", k=512), replace(SMALL, split_k=4)),
}
# With tensor cores of float8 for a warp, and with halves in their place.
ARCHS = ("sm_89", "sm_90")


def plan(case: MatmulCase, parameters: GemmParameters, arch: str) -> GemmPlan | Refusal:
    matmul, limits = recognise_matmul(case.func()), cuda_limits(resolve_target(f"cuda:{arch}"))
    return make_plan(matmul, parameters, limits, float8_cores=arch in ("sm_89", "sm_120"))


def on_cpu(
    case: MatmulCase, parameters: GemmParameters, arch: str, arrays: list[np.ndarray], folder: Path
) -> np.ndarray:
    func, target, made = case.func(), resolve_target(f"cuda:{arch}"), plan(case, parameters, arch)
    assert isinstance(made, GemmPlan), made
    named = {str(param.name): array for param, array in zip(func.params, [*arrays, poisoned(case)], strict=True)}
    blocks = made.tiles_m * made.tiles_n * parameters.split_k
    run_on_cpu(GemmSm80().apply(func, target, parameters), target, named, blocks, folder)
    return named[str(func.params[-1].name)]


def relative_error(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype("float64") - right) / np.linalg.norm(right))


@pytest.mark.quick_cases("scales and bias-sm_89", "wide exponents-sm_90", "both wide, split-sm_89")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float64(case: MatmulCase, parameters: GemmParameters, arch: str, tmp_path: Path) -> None:
    arrays = random_inputs(case, np.random.default_rng(0))
    assert relative_error(on_cpu(case, parameters, arch, arrays, tmp_path), expected(case, arrays)) < 6e-4


def test_long_sums_lose_no_more_than_a_stage_does(tmp_path: Path) -> None:
    """Tensor cores keep 13 bits: over K = 2048 they alone would sum up 3 % too little of positive numbers."""
    rng = np.random.default_rng(0)
    arrays = [rng.random(shape).astype(ML_DTYPES[LONG.dtype]) for shape in ((33, LONG.k), (32, LONG.k))]
    found, right = on_cpu(LONG, SMALL, "sm_89", arrays, tmp_path), expected(LONG, arrays)
    assert abs(np.mean(found / right) - 1) < 5e-4
    assert relative_error(found, right) < 6e-4


@pytest.mark.parametrize(
    ("case", "arch", "reason"),
    [
        (EIGHTS, "sm_80", "the target is cuda sm_80, expected cuda sm_89 or later (mma of float8)"),
        (EIGHTS, "sm_90a", "the target has wgmma"),
        (replace(EIGHTS, transposed=False), "sm_89", "B of float8_e4m3fn is [K, N], expected [N, K]"),
        (replace(EIGHTS, k=200), "sm_89", "K is 200, expected a multiple of 16"),
        (replace(EIGHTS, epilogue=(), output="int8"), "sm_89", "the output is int8"),
    ],
)
def test_others_are_refused_with_the_reason(case: MatmulCase, arch: str, reason: str) -> None:
    found = GemmSm80().candidates(case.func(), resolve_target(f"cuda:{arch}"))
    assert isinstance(found, Refusal)
    assert reason in found.reason


@pytest.mark.parametrize("rows", [1, 128, 4096])
@pytest.mark.parametrize("arch", [*ARCHS, "sm_120"])
def test_candidates_fit_and_differ(arch: str, rows: int) -> None:
    case = replace(LARGE, rows=(rows,))
    found, _ = list_candidates(case.func(), resolve_target(f"cuda:{arch}"))
    assert len({one.to_json() for one in found}) == len(found) >= 4
    assert all(isinstance(plan(case, one, arch), GemmPlan) for one in found)


def assert_sound(case: MatmulCase, parameters: GemmParameters, arch: str) -> None:
    target, made = resolve_target(f"cuda:{arch}"), plan(case, parameters, arch)
    assert isinstance(made, GemmPlan), made
    mod = tvm.IRModule({"main": GemmSm80().apply(case.func(), target, parameters).with_attr("global_symbol", "main")})
    with captured_cubins(arch) as cubins:
        tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    cubin = read_cubin(cubins[0])
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
    multiplications = made.m_steps * made.n_steps * parameters.block_k // 32
    counts = (multiplications, 0) if made.sums_outside else (0, 2 * multiplications)
    assert (cubin.count(MMA_FLOAT8), cubin.count(MMA_SYNC)) == counts


@pytest.mark.parametrize(
    ("case", "arch"), [(LARGE, "sm_89"), (ODD, "sm_120"), (replace(LARGE, dtype_b="float8_e5m2"), "sm_90")]
)
def test_cubin_multiplies_float8_and_has_no_spills(case: MatmulCase, arch: str) -> None:
    assert_sound(case, GemmParameters(128, 128, 128, 2, 2, 4, 8), arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*ARCHS, "sm_120"])
@pytest.mark.parametrize("tile", FLOAT8_TILES)
@pytest.mark.parametrize("case", [LARGE, ODD], ids=["even", "odd"])
def test_every_tile_on_every_target(case: MatmulCase, tile: tuple[int, ...], arch: str) -> None:
    m, n, k, warps_m, warps_n = tile
    offered = [GemmParameters(m, n, k, stages, warps_m, warps_n, 8) for stages in (3, 2)]
    fitting = [parameters for parameters in offered if isinstance(plan(case, parameters, arch), GemmPlan)]
    # Sums held twice leave no registers for the largest tiles.
    for parameters in fitting[:1]:
        assert_sound(case, parameters, arch)


@pytest.mark.gpu
@pytest.mark.skipif(
    not tvm.cuda(0).exist or float(tvm.cuda(0).compute_version) < 8.9, reason="needs a GPU of compute capability 8.9"
)
@pytest.mark.parametrize("arch", ["sm_89", "its own"])
@pytest.mark.parametrize(
    ("case", "parameters"),
    [*CASES.values(), (LONG, SMALL), (replace(LARGE, k=2048), GemmParameters(128, 128, 128, 2, 2, 4, 8))],
)
def test_kernel_agrees_on_a_gpu(case: MatmulCase, parameters: GemmParameters, arch: str) -> None:
    """Of sm_89 the PTX: a later GPU's driver makes what its tensor cores do of the instructions for float8."""
    native = resolve_target("cuda").arch.removesuffix("a")
    target = resolve_target(f"cuda:{native if arch == 'its own' else arch}")
    mod = tvm.IRModule({"main": GemmSm80().apply(case.func(), target, parameters).with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch, portable=True):
        kernel = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    for _ in range(5):
        arrays = random_inputs(case, rng)
        tensors = [tvm.runtime.tensor(array, device) for array in (*arrays, poisoned(case))]
        kernel["main"](*tensors)
        assert relative_error(tensors[-1].numpy(), expected(case, arrays)) < 6e-4
