"""The kernels on a GPU: every tile, both forms of B, at shapes that no tile divides, against float32 NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.gemm_sm80.plan import GemmParameters, GemmPlan, make_plan
from relaxtune.schedules.templates.gemm_sm80.template import FLOAT_TILES, STORED_TILES, TILES, GemmSm80
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.matmul_by_rows import recognise_matmul_by_rows
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.gemm_sm90.test_gemm_sm90_gpu import expected, random_array
from tests.schedules.templates.gemv.test_gemv_gpu import arguments_of, expected_of
from tests.schedules.templates.gemv_cases import GemvCase
from tests.schedules.templates.matmul_cases import MatmulCase

needs_gpu = pytest.mark.skipif(
    not tvm.cuda(0).exist or float(tvm.cuda(0).compute_version) < 8, reason="needs a GPU of compute capability 8.0"
)


def plain_target() -> ResolvedTarget:
    """Return the GPU's own target, without what only one compute capability has."""
    return resolve_target(f"cuda:{resolve_target('cuda').arch.removesuffix('a')}")


RAGGED = MatmulCase((129,), 200, 200, ("bias", "residual"))
WIDE = replace(RAGGED, rows=(300,), n=456, k=392)
FLOAT = replace(WIDE, dtype="float32", output="float32")
CASES = (
    {
        f"{'x'.join(map(str, tile[:3]))} on {tile[3]}x{tile[4]} warps, {'[N, K]' if transposed else '[K, N]'}": (
            replace(WIDE, transposed=transposed, n=457 if transposed else 456),
            # The largest tiles have room for two stages.
            GemmParameters(*tile[:3], 2 if sum(tile[:3]) > 320 else stages, *tile[3:], group=2, dependent=transposed),
        )
        for transposed, stages in ((False, 3), (True, 2))
        for tile in TILES
    }
    | {
        f"float32, {'x'.join(map(str, tile))}, {'[N, K]' if transposed else '[K, N]'}": (
            replace(FLOAT, transposed=transposed, n=457 if transposed else 456),
            GemmParameters(*tile[:3], stages, *tile[3:], group=2, dependent=transposed),
        )
        for transposed, stages in ((False, 3), (True, 2))
        for tile in FLOAT_TILES
    }
    | {
        "float32, gated": (replace(FLOAT, n=816, epilogue=("gated",)), GemmParameters(32, 64, 32, 3, 2, 2)),
        "float32, gelu": (replace(FLOAT, epilogue=("bias", "gelu")), GemmParameters(64, 64, 16, 3, 2, 2)),
        "plain": (replace(RAGGED, epilogue=()), GemmParameters(64, 64, 64, 4, 2, 2)),
        "one row": (replace(RAGGED, rows=(1,)), GemmParameters(16, 32, 64, 8, 1, 2, 1, True)),
        "one tile of K": (replace(RAGGED, k=16), GemmParameters(64, 64, 64, 4, 2, 2)),
        "prime rows": (replace(RAGGED, rows=(127,)), GemmParameters(32, 64, 64, 5, 2, 2, 4, True)),
        "leading axes": (
            replace(RAGGED, rows=(3, 43), epilogue=("bias", "gelu")),
            GemmParameters(64, 128, 32, 3, 2, 2, 2),
        ),
        "tanh form": (replace(RAGGED, epilogue=("bias", "gelu_tanh")), GemmParameters(64, 32, 64, 3, 2, 2)),
        "many stages": (replace(RAGGED, k=1032), GemmParameters(32, 32, 64, 8, 2, 2, 1, True)),
        "row scale": (replace(RAGGED, transposed=True, epilogue=("row_scale",)), GemmParameters(64, 64, 64, 3, 2, 2)),
        "bfloat16": (replace(RAGGED, dtype="bfloat16", output="bfloat16"), GemmParameters(128, 64, 32, 4, 2, 2)),
        "float32 output": (replace(RAGGED, output="float32"), GemmParameters(64, 64, 64, 4, 2, 2)),
        "bias in half precision": (
            MatmulCase((512,), 2304, 768, ("half_bias",)),
            GemmParameters(128, 128, 32, 4, 2, 2, 4),
        ),
        "gated": (replace(RAGGED, n=400, epilogue=("gated",)), GemmParameters(64, 64, 64, 3, 2, 2)),
        "gated and added": (
            replace(RAGGED, n=816, epilogue=("gated", "residual")),
            GemmParameters(128, 128, 32, 3, 2, 2),
        ),
        "mask": (replace(RAGGED, epilogue=("bias", "masked"), output="float32"), GemmParameters(64, 64, 64, 3, 2, 2)),
        "split": (
            replace(RAGGED, k=1088, epilogue=("bias", "gelu")),
            GemmParameters(32, 32, 64, 4, 2, 2, 1, split_k=17),
        ),
        "split, dependent": (replace(WIDE, k=1024), GemmParameters(64, 64, 64, 4, 2, 2, 2, True, split_k=4)),
        "split, float32": (replace(FLOAT, k=1024), GemmParameters(64, 64, 32, 3, 2, 2, 2, split_k=8)),
        "split, more blocks than run at a time": (
            replace(WIDE, rows=(1000,), n=2304, k=768),
            GemmParameters(32, 64, 64, 3, 2, 2, 8, split_k=3),
        ),
        "exact": (MatmulCase((256,), 256, 256), GemmParameters(128, 128, 32, 4, 2, 2, 2, True)),
    }
)


STORED = GemvCase((300,), 456, 800, 4)
STORED_CASES = {
    f"{bits} bits, {'x'.join(map(str, tile[:3]))} on {tile[3]}x{tile[4]} warps": (
        replace(STORED, bits=bits, group=group, epilogue="residual"),
        GemmParameters(*tile[:3], stages, *tile[3:], group=2, dependent=bits == 8),
    )
    for bits, group, stages in ((4, 32, 3), (8, 128, 2))
    for tile in STORED_TILES
} | {
    "4 bits, groups of 96": (replace(STORED, group=96, output="float32"), GemmParameters(64, 64, 64, 4, 1, 2)),
    "4 bits, a scale a column": (replace(STORED, rows=(17,), group=800), GemmParameters(32, 32, 64, 8, 1, 2)),
    "4 bits, gated": (replace(STORED, rows=(3, 43), n=816, epilogue="gated"), GemmParameters(64, 128, 64, 3, 1, 4)),
    "8 bits, ragged K": (replace(STORED, bits=8, k=784, epilogue="bias"), GemmParameters(32, 128, 64, 5, 1, 4, 4)),
    "8 bits, short K": (replace(STORED, bits=8, k=32, group=32), GemmParameters(32, 64, 64, 3, 1, 2, 4)),
    "4 bits, split": (replace(STORED, k=1024), GemmParameters(64, 64, 64, 3, 1, 2, 2, split_k=4)),
    "8 bits, one row": (replace(STORED, bits=8, rows=(1,)), GemmParameters(16, 32, 64, 8, 1, 2)),
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("case", "parameters"), STORED_CASES.values(), ids=STORED_CASES.keys())
def test_quantised_weights_are_multiplied_as_their_levels_and_scales(
    case: GemvCase, parameters: GemmParameters
) -> None:
    target, device = plain_target(), tvm.cuda(0)
    func = GemmSm80().apply(case.func(), target, parameters)
    assert isinstance(func, tvm.tirx.PrimFunc), func
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        kernel = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    # Sums of x that do not cancel show an offset of levels that is taken off wrongly.
    for shift in (0, 4) * 5:
        arrays = arguments_of(case, shift)
        # The instructions read weights in half precision. Gates are as steep as their sums are large: from weights that
        # are not rounded they differ by up to 1.06e-3 (on the H200; 7.9e-4 in 24 draws emulated in NumPy).
        right = expected_of(case, arrays, rounded=True)
        output = tvm.runtime.tensor(np.full(right.shape, np.nan, case.output), device)
        kernel["main"](*(tvm.runtime.tensor(array, device) for array in arrays.values()), output)
        error = np.linalg.norm(output.numpy().astype(np.float64) - right) / np.linalg.norm(right)
        assert error < 1e-3


EVERY_CASE = {**CASES, **STORED_CASES}


@pytest.mark.parametrize(("case", "parameters"), EVERY_CASE.values(), ids=EVERY_CASE.keys())
def test_case_is_planned(case: MatmulCase | GemvCase, parameters: GemmParameters) -> None:
    recognise = recognise_matmul_by_rows if isinstance(case, GemvCase) else recognise_matmul
    matmul = recognise(case.func())
    assert isinstance(matmul, MatmulFunction)
    assert isinstance(make_plan(matmul, parameters, cuda_limits(resolve_target("cuda:sm_80"))), GemmPlan)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float32(case: MatmulCase, parameters: GemmParameters) -> None:
    target, func = plain_target(), case.func()
    constants = [place for place, param in enumerate(func.params) if place == 1 or len(param.ty.shape) == 1]
    func = GemmSm80().apply(func.with_attr(CONSTANT_PARAMS_ATTR, constants), target, parameters)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        kernel = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    for _ in range(10):
        arrays = [random_array(rng, param) for param in func.params[:-1]]
        poisoned = np.full_like(random_array(rng, func.params[-1]), np.nan)
        tensors = [tvm.runtime.tensor(array, device) for array in (*arrays, poisoned)]
        kernel["main"](*tensors)
        found, right = tensors[-1].numpy().astype("float32"), expected(case, arrays)
        error = np.linalg.norm(found - right) / np.linalg.norm(right)
        # As for Hopper's: the rounding of the output, uniformly.
        assert error < {"bfloat16": 4e-3, "float32": 1e-6 if case.dtype == "float32" else 6e-4}.get(case.output, 6e-4)
