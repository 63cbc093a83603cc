"""Caches that grow: attention writes them whole, of what it reads; whole kernels on the CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.attention_sm80.plan import AttentionParameters, AttentionPlan, make_plan
from relaxtune.schedules.templates.attention_sm80.template import AttentionSm80
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.attention_cases import AttentionCase, draw, keys_and_values, reference
from tests.schedules.templates.block_on_cpu import run_on_cpu
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, captured_cubins, read_cubin

TARGET = resolve_target("cuda:sm_80")
DECODE = AttentionCase(2, 8, 1, 131, 64, dtype="float16", kv_heads=2, past=130)
ONE = AttentionParameters(1, 1, 32, 2, pack=True)
CASES = {
    "one position": (DECODE, ONE),
    "a block of new positions alone": (replace(DECODE, keys=97, past=96), replace(ONE, stages=3)),
    "whole blocks": (replace(DECODE, keys=128, past=127, causal=True), ONE),
    "shares of the keys": (replace(DECODE, bias=("add", "float16", (2, 1, 1, 131))), replace(ONE, split=3)),
    "two warps": (replace(DECODE, head_dim=32), replace(ONE, warps=2, block_k=64)),
    "several positions, over two blocks": (
        replace(DECODE, heads=2, queries=7, keys=67, past=60, head_dim=80, causal=True),
        replace(ONE, pack=False),
    ),
    "more new positions than a block has": (
        replace(DECODE, batch=1, heads=1, kv_heads=1, queries=50, keys=55, past=5, head_dim=32, causal=True),
        AttentionParameters(4, 1, 16, 3, split=2),
    ),
    "two widths": (replace(DECODE, batch=1, head_dim=72, value_dim=40), ONE),
}


def poisoned(params: list, outputs: int) -> list[np.ndarray]:
    dtypes = [ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype for _, dtype in params[-outputs:]]
    return [np.full(shape, np.nan, dtype) for (shape, _), dtype in zip(params[-outputs:], dtypes, strict=True)]


def made(case: AttentionCase, parameters: AttentionParameters, target: ResolvedTarget) -> tirx.PrimFunc:
    kernel = AttentionSm80().apply(attention_function(*case.made()), target, parameters)
    assert isinstance(kernel, tirx.PrimFunc), kernel
    return kernel


def assert_right(case: AttentionCase, arrays: list[np.ndarray], found: list[np.ndarray]) -> None:
    """Compare the caches bit by bit, and the output with float64."""
    spec, params = case.made()
    output, *caches = (array.astype("float32") for array in found)
    for cache, whole in zip(caches, keys_and_values(spec, arrays), strict=True):
        np.testing.assert_array_equal(cache, whole.astype("float32"))
    right = reference(spec, params, arrays)
    error = np.linalg.norm(output - right) / np.linalg.norm(right)
    assert error < (6e-3 if case.dtype == "bfloat16" else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_attention_writes_the_grown_caches(
    case: AttentionCase, parameters: AttentionParameters, tmp_path: Path
) -> None:
    spec, params = case.made()
    kernel, plan = made(case, parameters, TARGET), make_plan(spec, parameters, cuda_limits(TARGET))
    assert isinstance(plan, AttentionPlan)
    arrays, results = draw(params, spec, 0), poisoned(params, 3)
    names = [str(param.name) for param in kernel.params]
    run_on_cpu(kernel, TARGET, dict(zip(names, [*arrays, *results], strict=True)), int(plan.blocks), tmp_path)
    assert_right(case, arrays, results)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a GPU")
@pytest.mark.parametrize(
    ("case", "parameters"),
    [
        *CASES.values(),
        (replace(DECODE, dtype="bfloat16", head_dim=128), ONE),
        (replace(DECODE, batch=16, heads=32, kv_heads=8, keys=1025, past=1024), replace(ONE, block_k=64, split=4)),
    ],
)
def test_kernel_writes_the_grown_caches_on_a_gpu(case: AttentionCase, parameters: AttentionParameters) -> None:
    target = resolve_target(f"cuda:{resolve_target('cuda').arch.removesuffix('a')}")
    spec, params = case.made()
    mod = tvm.IRModule({"main": made(case, parameters, target).with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        kernel = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    for seed in range(5):
        arrays = draw(params, spec, seed)
        tensors = [tvm.runtime.tensor(array, tvm.cuda(0)) for array in (*arrays, *poisoned(params, 3))]
        kernel["main"](*tensors)
        assert_right(case, arrays, [tensor.numpy() for tensor in tensors[-3:]])


@pytest.mark.parametrize(
    "case",
    [
        replace(DECODE, kv_heads=8, window=9),
        replace(DECODE, queries=17, keys=117, past=100, causal=True),
        replace(DECODE, kv_heads=8, queries=65, keys=165, past=100, causal=True),
    ],
    ids=["window", "rows of four heads", "rows of one head"],
)
def test_caches_of_keys_that_no_block_loads_once_are_refused(case: AttentionCase) -> None:
    found = AttentionSm80().candidates(attention_function(*case.made()), TARGET)
    assert found == Refusal("no tile fits this shape")


@pytest.mark.quick_cases("4")
@pytest.mark.parametrize("split", [1, 4])
def test_proposed_kernel_has_no_spills(split: int) -> None:
    case = replace(DECODE, batch=16, heads=32, kv_heads=8, keys=1024, past=1023)
    kernel = made(case, replace(ONE, block_k=64, stages=3, split=split), TARGET)
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    with captured_cubins("sm_80") as cubins:
        tvm.tirx.build(mod, target=TARGET.target, pipeline=register_mixed_pipeline())
    cubin = read_cubin(cubins[0])
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
