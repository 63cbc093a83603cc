"""The kernels on a Hopper GPU: every role, at shapes that no tile divides, against float32 NumPy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import tvm
from scipy import special

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.templates.matmul_cases import MatmulCase

needs_hopper = pytest.mark.skipif(
    not tvm.cuda(0).exist or str(tvm.cuda(0).compute_version) != "9.0", reason="needs a GPU of compute capability 9.0"
)

RAGGED = MatmulCase((129,), 200, 200, ("bias", "residual"))
CASES = {
    "plain": (replace(RAGGED, epilogue=()), GemmParameters(64, 64, 3, 1)),
    "one row": (replace(RAGGED, rows=(1,)), GemmParameters(64, 32, 3, 1, dependent=True)),
    "prime rows": (replace(RAGGED, rows=(127,)), GemmParameters(128, 48, 4, 2, dependent=True)),
    "leading axes": (replace(RAGGED, rows=(3, 43), epilogue=("bias", "gelu")), GemmParameters(128, 192, 3, 2, 2)),
    "tanh form": (replace(RAGGED, epilogue=("bias", "gelu_tanh")), GemmParameters(64, 96, 3, 1)),
    "by turns": (replace(RAGGED, rows=(1000,), n=776, k=520), GemmParameters(64, 128, 3, 2, 7, 1, True, True)),
    # ptxas read the accumulators of this one too early once, and not those of the next.
    "by turns, bias in half precision": (
        MatmulCase((512,), 2304, 768, ("half_bias",)),
        GemmParameters(128, 64, 8, 2, 132, pingpong=True, dependent=True, group=4),
    ),
    "by turns, narrow, bias in half precision": (
        MatmulCase((512,), 2304, 768, ("half_bias",)),
        GemmParameters(128, 32, 10, 2, 132, pingpong=True, dependent=True, group=4),
    ),
    "split": (replace(RAGGED, k=1032), GemmParameters(64, 64, 3, 1, 0, 3, dependent=True)),
    "split with two consumers": (replace(RAGGED, k=1032), GemmParameters(128, 64, 3, 2, 0, 2)),
    "transposed": (replace(RAGGED, transposed=True, epilogue=("row_scale",)), GemmParameters(64, 96, 3, 1)),
    "bfloat16": (replace(RAGGED, dtype="bfloat16", output="bfloat16"), GemmParameters(128, 96, 3, 2)),
    "float32 output": (replace(RAGGED, output="float32"), GemmParameters(64, 64, 4, 1)),
    "few rows, split": (replace(RAGGED, rows=(16,), k=1032), GemmParameters(64, 64, 5, 1, 0, 3, dependent=True)),
    "few rows, two consumers": (replace(RAGGED, rows=(33,)), GemmParameters(128, 64, 3, 2, dependent=True)),
    "in groups": (replace(RAGGED, rows=(700,)), GemmParameters(64, 64, 3, 1, 7, group=3, dependent=True)),
    "multicast": (replace(RAGGED, rows=(700,)), GemmParameters(128, 96, 3, 2, 0, multicast=2, group=2)),
    "multicast to four": (replace(RAGGED, rows=(500,), n=128), GemmParameters(64, 64, 3, 1, 0, multicast=4)),
    "multicast by turns": (
        replace(RAGGED, rows=(1000,), n=776, k=520, epilogue=("bias", "gelu")),
        GemmParameters(128, 192, 4, 2, 5, 1, True, True, 2, 2),
    ),
    "prime columns": (replace(RAGGED, n=257, transposed=True), GemmParameters(128, 64, 3, 2, dependent=True)),
    "prime columns, multicast": (
        replace(RAGGED, rows=(300,), n=257, transposed=True, epilogue=()),
        GemmParameters(64, 64, 3, 1, 0, multicast=2),
    ),
    "gated": (replace(RAGGED, n=400, epilogue=("gated",)), GemmParameters(64, 96, 3, 1)),
    "gated, split": (replace(RAGGED, n=400, k=1032, epilogue=("gated", "bias")), GemmParameters(128, 96, 3, 2, 0, 3)),
    "gated by turns": (
        replace(RAGGED, rows=(1000,), n=816, epilogue=("gated", "residual")),
        GemmParameters(64, 128, 3, 2, 7, 1, True, True),
    ),
    "mask": (replace(RAGGED, epilogue=("bias", "masked"), output="float32"), GemmParameters(64, 64, 4, 1)),
    "sum in the ring": (
        replace(RAGGED, epilogue=("bias", "row_scale", "residual")),
        GemmParameters(64, 64, 4, 1, dependent=True),
    ),
    "sum in the ring, split": (replace(RAGGED, k=1032), GemmParameters(64, 64, 6, 1, 0, 3, dependent=True)),
    "sum in the ring, multicast": (
        replace(RAGGED, rows=(700,)),
        GemmParameters(128, 96, 4, 2, 0, dependent=True, multicast=2, group=2),
    ),
    "stream": (replace(RAGGED, k=1032), GemmParameters(64, 64, 3, 1, 50, dependent=True, stream_k=True)),
    "stream of more tiles than blocks": (
        replace(RAGGED, rows=(700,), n=776, k=520, epilogue=("bias", "gelu")),
        GemmParameters(128, 96, 3, 2, 7, group=4, dependent=True, stream_k=True),
    ),
    "stream, a block for each tile of K": (RAGGED, GemmParameters(128, 64, 3, 2, 132, stream_k=True)),
    "stream of one row": (
        replace(RAGGED, rows=(1,), k=1032),
        GemmParameters(64, 32, 9, 1, 41, dependent=True, stream_k=True),
    ),
    "stream of prime columns": (
        replace(RAGGED, n=257, k=1032, transposed=True, dtype="bfloat16", output="bfloat16"),
        GemmParameters(256, 128, 3, 2, 20, dependent=True, stream_k=True),
    ),
    "stream, gated": (
        replace(RAGGED, n=400, k=1032, epilogue=("gated", "bias")),
        GemmParameters(128, 96, 3, 2, 13, stream_k=True),
    ),
    "stream of whole tiles": (replace(RAGGED, rows=(256,)), GemmParameters(128, 64, 3, 2, 4, stream_k=True)),
}


def expected(case: MatmulCase, arrays: list[np.ndarray]) -> np.ndarray:
    a, b, *others = (array.astype("float32") for array in arrays)
    value = a @ (b.T if case.transposed else b)
    for step in case.epilogue:
        if step == "gelu":
            value = value * (0.5 + 0.5 * special.erf(value * 0.5**0.5))
        elif step == "gelu_tanh":
            value = value * (0.5 + 0.5 * np.tanh((2 / np.pi) ** 0.5 * (value + 0.044715 * value**3)))
        elif step == "gated":
            columns = np.arange(value.shape[-1] // 2)
            gate, gated = (value[..., columns // 8 * 16 + columns % 8 + offset] for offset in (0, 8))
            value = gate * special.expit(gate) * gated
        elif step == "row_scale":
            value = value * others.pop(0)
        elif step == "masked":
            value = np.where(others.pop(0) > 0, value, 0)
        else:
            value = value + others.pop(0)
    return value


def random_array(rng: np.random.Generator, param: tvm.tirx.Var) -> np.ndarray:
    shape, dtype = [int(size) for size in param.ty.shape], str(param.ty.dtype)
    if dtype == "int8":
        return rng.integers(0, 2, shape, dtype="int8")
    return rng.normal(size=shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_case_can_be_made_and_its_reference_is_right(case: MatmulCase, parameters: GemmParameters) -> None:
    """Without a GPU: the template takes the case; NumPy agrees with the function itself, built for the CPU."""
    assert isinstance(GemmSm90().apply(case.func(), resolve_target("cuda:sm_90a"), parameters), tvm.tirx.PrimFunc)
    assert_reference_agrees(replace(case, rows=(3, 2)[: len(case.rows)], n=32, k=16))


@cache
def assert_reference_agrees(small: MatmulCase) -> None:
    func, rng = small.func(), np.random.default_rng(1)
    arrays = [random_array(rng, param) for param in func.params]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")["main"](*tensors)
    tolerance = 1e-2 if small.output == "bfloat16" else 2e-3
    right = expected(small, arrays[:-1])
    np.testing.assert_allclose(tensors[-1].numpy().astype("float32"), right, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float32(case: MatmulCase, parameters: GemmParameters) -> None:
    target = resolve_target("cuda:sm_90a")
    func = case.func()
    # B, and what is read one element a column.
    constants = [place for place, param in enumerate(func.params) if place == 1 or len(param.ty.shape) == 1]
    func = GemmSm90().apply(func.with_attr(CONSTANT_PARAMS_ATTR, constants), target, parameters)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with cuda_compiler("sm_90a"):
        kernel = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    for _ in range(20):
        arrays = [random_array(rng, param) for param in func.params[:-1]]
        poisoned = np.full_like(random_array(rng, func.params[-1]), np.nan)
        tensors = [tvm.runtime.tensor(array, device) for array in (*arrays, poisoned)]
        kernel["main"](*tensors)
        found, right = tensors[-1].numpy().astype("float32"), expected(case, arrays)
        error = np.linalg.norm(found - right) / np.linalg.norm(right)
        # Rounding to 8 or 11 bits of significand, uniformly: 2**-9 or 2**-12 of the value, over the square root of 3.
        assert error < (4e-3 if case.output == "bfloat16" else 6e-4)
