"""The attention kernels on a GPU: every tile and mask, at shapes that no tile divides, against float64 NumPy."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.attention_sm80.plan import AttentionParameters, AttentionPlan, make_plan
from relaxtune.schedules.templates.attention_sm80.template import AttentionSm80
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.attention_cases import AttentionCase, draw, masked_cases, reference

needs_gpu = pytest.mark.skipif(
    not tvm.cuda(0).exist or float(tvm.cuda(0).compute_version) < 8, reason="needs a GPU of compute capability 8.0"
)
PRIME = AttentionCase(2, 3, 127, 131, 64, dtype="float16")
SMALL = AttentionParameters(4, 1, 64, 2)
WIDE = AttentionParameters(4, 2, 64, 2)
CASES = {
    "plain": (PRIME, SMALL),
    "two rows": (PRIME, WIDE),
    "exact": (replace(PRIME, queries=128, keys=128), WIDE),
    "one key and query": (replace(PRIME, batch=1, heads=1, queries=1, keys=1), AttentionParameters(1, 1, 32, 2)),
    "packed": (replace(PRIME, queries=128, keys=128, packed=True), AttentionParameters(4, 1, 128, 2)),
    "heads first": (replace(PRIME, heads_first=True), AttentionParameters(8, 1, 64, 3)),
    "many keys": (replace(PRIME, queries=300, keys=900, head_dim=128), AttentionParameters(8, 1, 32, 3)),
    "causal": (replace(PRIME, causal=True), SMALL),
    "causal, two rows": (replace(PRIME, queries=333, keys=333, causal=True), WIDE),
    "causal with more queries": (replace(PRIME, queries=200, keys=100, causal=True), SMALL),
    "window": (replace(PRIME, queries=300, keys=307, causal=True, window=70), SMALL),
    "window of both sides": (replace(PRIME, queries=300, keys=300, window=33), WIDE),
    "key padding": (replace(PRIME, bias=("add", "float16", (2, 1, 1, 131))), SMALL),
    "key padding of floats": (replace(PRIME, keys=130, bias=("add", "float32", (2, 1, 1, 130))), SMALL),
    "relative bias": (replace(PRIME, keys=130, causal=True, bias=("add", "float16", (1, 3, 127, 130))), SMALL),
    "mask of a bias's dtype": (replace(PRIME, dtype="bfloat16", bias=("add", "bfloat16", (2, 1, 127, 131))), SMALL),
    "linear bias of packed heads": (
        replace(PRIME, heads=4, kv_heads=2, queries=7, bias=("add", "float32", (1, 4, 1, 131))),
        AttentionParameters(1, 1, 32, 2, pack=True),
    ),
    "keep": (replace(PRIME, keys=130, bias=("keep", "bool", (2, 1, 127, 130))), SMALL),
    "keep by number": (replace(PRIME, bias=("keep", "int64", (2, 1, 1, 131))), AttentionParameters(4, 1, 32, 2)),
    **{name: (case, SMALL) for name, case in masked_cases(PRIME).items()},
    "grouped": (replace(PRIME, heads=8, kv_heads=2, queries=200, keys=200, causal=True, packed=True), SMALL),
    "packed heads": (
        replace(PRIME, heads=8, kv_heads=2, queries=5, keys=200),
        AttentionParameters(2, 1, 64, 3, pack=True),
    ),
    "decode": (
        replace(PRIME, heads=8, kv_heads=2, queries=1, keys=1009, heads_first=True),
        AttentionParameters(1, 1, 128, 2, pack=True),
    ),
    **{f"head of {d}": (replace(PRIME, head_dim=d, packed=True, keys=127), SMALL) for d in (32, 72, 80, 96, 128)},
    **{
        f"widths of {d} and {v}": (replace(PRIME, head_dim=d, value_dim=v, causal=d > v), SMALL)
        for d, v in ((192, 128), (128, 64), (64, 128), (24, 16), (40, 200))
    },
    # A row of 192 elements is 24 chunks, which no number of threads divides into.
    "decode of two widths": (
        replace(PRIME, heads=4, queries=1, keys=1009, head_dim=192, value_dim=128, heads_first=True),
        AttentionParameters(1, 1, 32, 2),
    ),
    "head of 256": (replace(PRIME, head_dim=256, causal=True), AttentionParameters(4, 1, 32, 2)),
}


@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_case_is_planned(case: AttentionCase, parameters: AttentionParameters) -> None:
    spec, _ = case.made()
    found = make_plan(spec, parameters, cuda_limits(resolve_target("cuda:sm_80")), bias_bytes=4 if case.bias else 0)
    assert isinstance(found, AttentionPlan), found


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float64(case: AttentionCase, parameters: AttentionParameters) -> None:
    target = resolve_target(f"cuda:{resolve_target('cuda').arch.removesuffix('a')}")
    spec, params = case.made()
    func = AttentionSm80().apply(attention_function(spec, params), target, parameters)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        kernel = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    for seed in range(5):
        arrays = draw(params, spec, seed)
        shape, dtype = params[-1]
        poisoned = np.full(shape, np.nan, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        tensors = [tvm.runtime.tensor(array, tvm.cuda(0)) for array in (*arrays, poisoned)]
        kernel["main"](*tensors)
        found, right = tensors[-1].numpy().astype("float32"), reference(spec, params, arrays)
        empty = np.isnan(right)
        np.testing.assert_array_equal(np.isnan(found), empty)
        error = np.linalg.norm((found - right)[~empty]) / np.linalg.norm(right[~empty])
        # As for Hopper's: the weights and the output are rounded to 8 or 11 bits of significand.
        assert error < (6e-3 if case.dtype == "bfloat16" else 8e-4)
