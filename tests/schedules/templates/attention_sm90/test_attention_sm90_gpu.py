"""The attention kernels on a Hopper GPU: every role and mask, at shapes that no tile divides, against float64 NumPy."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.attention_sm90.plan import AttentionParameters
from relaxtune.schedules.templates.attention_sm90.template import AttentionSm90
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.attention_cases import AttentionCase, distances, draw, keys_and_values, masked_cases, reference

needs_hopper = pytest.mark.skipif(
    not tvm.cuda(0).exist or str(tvm.cuda(0).compute_version) != "9.0", reason="needs a GPU of compute capability 9.0"
)

PRIME = AttentionCase(2, 3, 127, 131, 64, dtype="float16")
SMALL = AttentionParameters(1, 64, 3)
WIDE = AttentionParameters(2, 128, 2, pingpong=True)
CASES = {
    "plain": (PRIME, SMALL),
    "one key and query": (replace(PRIME, batch=1, heads=1, queries=1, keys=1), SMALL),
    "packed": (replace(PRIME, queries=128, keys=128, packed=True), AttentionParameters(1, 128, 1, overlap=False)),
    "heads first": (replace(PRIME, heads_first=True), WIDE),
    "by turns": (replace(PRIME, queries=300, keys=900, head_dim=128), WIDE),
    "three consumers": (replace(PRIME, queries=700, keys=700, causal=True), AttentionParameters(3, pingpong=True)),
    "several tiles": (replace(PRIME, queries=333), replace(SMALL, blocks=11, residents=3)),
    "pairs of tiles": (replace(PRIME, queries=500, keys=500, head_dim=128, causal=True), replace(WIDE, blocks=5)),
    "odd pairs of tiles": (replace(PRIME, queries=400, keys=500, causal=True), replace(WIDE, blocks=4)),
    "causal": (replace(PRIME, causal=True), SMALL),
    "causal with more queries": (replace(PRIME, queries=200, keys=100, causal=True), SMALL),
    "window": (replace(PRIME, queries=300, keys=307, causal=True, window=70), SMALL),
    "window of both sides": (replace(PRIME, queries=300, keys=300, window=33), replace(WIDE, blocks=3)),
    "key padding": (replace(PRIME, bias=("add", "float16", (2, 1, 1, 131))), SMALL),
    "key padding of floats": (replace(PRIME, keys=130, bias=("add", "float32", (2, 1, 1, 130))), WIDE),
    "relative bias": (replace(PRIME, keys=130, causal=True, bias=("add", "float16", (1, 3, 127, 130))), SMALL),
    "mask of a bias's dtype": (replace(PRIME, dtype="bfloat16", bias=("add", "bfloat16", (2, 1, 127, 131))), SMALL),
    "linear bias of packed heads": (
        replace(PRIME, heads=4, kv_heads=2, queries=7, bias=("add", "float32", (1, 4, 1, 131))),
        replace(SMALL, split=2, pack=True),
    ),
    "keep": (replace(PRIME, keys=130, bias=("keep", "bool", (2, 1, 127, 130))), SMALL),
    "keep by number": (replace(PRIME, bias=("keep", "int64", (2, 1, 1, 131))), SMALL),
    **{name: (case, SMALL) for name, case in masked_cases(PRIME).items()},
    "distances, split": (
        replace(PRIME, queries=3, bias=("add", "float32", (1, 3, 99, 1)), lies=distances(49)),
        replace(SMALL, split=2),
    ),
    "guarded, split": (
        replace(PRIME, guarded=True, bias=("keep", "bool", (2, 1, 127, 131))),
        replace(SMALL, split=3),
    ),
    "grouped": (replace(PRIME, heads=8, kv_heads=2, queries=200, keys=200, causal=True, packed=True), SMALL),
    "packed heads": (replace(PRIME, heads=9, kv_heads=3, queries=5, keys=200), replace(SMALL, pack=True)),
    "decode": (
        replace(PRIME, heads=8, kv_heads=2, queries=1, keys=1009, heads_first=True),
        replace(SMALL, split=4, pack=True),
    ),
    "decode in a window": (
        replace(PRIME, heads=8, kv_heads=2, queries=7, keys=1009, head_dim=128, window=300, causal=True),
        replace(SMALL, split=8, pack=True),
    ),
    "caches that grow": (
        replace(PRIME, heads=8, kv_heads=2, queries=1, keys=1009, past=1008),
        replace(SMALL, pack=True),
    ),
    "caches that grow, split": (
        replace(PRIME, heads=8, kv_heads=2, queries=1, keys=961, past=960, bias=("add", "float16", (2, 1, 1, 961))),
        replace(SMALL, split=4, pack=True),
    ),
    "caches that grow by several": (
        replace(PRIME, queries=7, keys=131, past=124, head_dim=80, causal=True, dtype="bfloat16"),
        AttentionParameters(1, 128, 2),
    ),
    "split": (replace(PRIME, queries=130, keys=300, causal=True), AttentionParameters(2, 64, 2, split=3)),
    "split mask": (replace(PRIME, bias=("add", "float32", (2, 1, 1, 131))), replace(SMALL, split=3)),
    **{f"head of {d}": (replace(PRIME, head_dim=d, packed=True, keys=127), SMALL) for d in (32, 72, 80, 96)},
    **{
        f"widths of {d} and {v}": (replace(PRIME, head_dim=d, value_dim=v, causal=d > v), p)
        for d, v, p in ((192, 128, WIDE), (128, 64, SMALL), (64, 128, SMALL), (24, 16, SMALL), (40, 200, SMALL))
    },
    "two widths, several tiles": (
        replace(PRIME, queries=500, keys=500, head_dim=64, value_dim=128, causal=True, packed=True),
        replace(WIDE, blocks=5),
    ),
    "two widths, decode": (
        replace(PRIME, heads=8, kv_heads=2, queries=1, keys=1009, head_dim=192, value_dim=128, heads_first=True),
        replace(SMALL, stages=2, split=4, pack=True),
    ),
    "two widths, caches that grow": (
        replace(PRIME, heads=8, kv_heads=2, queries=1, keys=309, past=308, head_dim=192, value_dim=128),
        replace(SMALL, stages=2, split=2, pack=True),
    ),
    "head of 256": (replace(PRIME, head_dim=256, causal=True), AttentionParameters(2, 80, 2)),
}


@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_case_can_be_made(case: AttentionCase, parameters: AttentionParameters) -> None:
    """Without a GPU: the template takes the case."""
    made = AttentionSm90().apply(attention_function(*case.made()), resolve_target("cuda:sm_90a"), parameters)
    assert isinstance(made, tvm.tirx.PrimFunc), made


def run(
    case: AttentionCase, parameters: AttentionParameters, inputs: list[list[np.ndarray]]
) -> list[tuple[np.ndarray, ...]]:
    """Return what the kernel writes for each of some inputs, in float32: the output, and caches that grow."""
    target = resolve_target("cuda:sm_90a")
    spec, params = case.made()
    func = AttentionSm90().apply(attention_function(spec, params), target, parameters)
    with cuda_compiler("sm_90a"):
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        kernel = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    results = []
    for arrays in inputs:
        poisoned = [
            np.full(shape, np.nan, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            for shape, dtype in params[-spec.outputs :]
        ]
        tensors = [tvm.runtime.tensor(array, tvm.cuda(0)) for array in (*arrays, *poisoned)]
        kernel["main"](*tensors)
        results.append(tuple(tensor.numpy().astype("float32") for tensor in tensors[-spec.outputs :]))
    return results


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float64(case: AttentionCase, parameters: AttentionParameters) -> None:
    spec, params = case.made()
    inputs = [draw(params, spec, seed) for seed in range(20)]
    for arrays, (found, *grown) in zip(inputs, run(case, parameters, inputs), strict=True):
        for cache, whole in zip(grown, keys_and_values(spec, arrays), strict=bool(grown)):
            np.testing.assert_array_equal(cache, whole.astype("float32"))
        expected = reference(spec, params, arrays)
        empty = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), empty)
        error = np.linalg.norm((found - expected)[~empty]) / np.linalg.norm(expected[~empty])
        # The weights and the output are rounded to 8 or 11 bits of significand.
        assert error < (6e-3 if case.dtype == "bfloat16" else 8e-4)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("split", [1, 2])
def test_row_of_a_low_finite_mask_is_an_ordinary_softmax_and_one_of_minus_infinity_is_nan(split: int) -> None:
    case = replace(PRIME, bias=("add", "float32", (2, 1, 127, 131)))
    spec, params = case.made()
    arrays = draw(params, spec, seed=0)
    arrays[3][0, 0, 5] = np.finfo(np.float32).min
    arrays[3][1, 0, 7] = -np.inf
    ((found,),) = run(case, replace(SMALL, split=split), [arrays])
    value = arrays[2].astype("float32")
    np.testing.assert_allclose(found[0, 5], value[0].mean(axis=0), atol=2e-3)
    assert np.isnan(found[1, 7]).all()
    assert np.isfinite(np.delete(found[1], 7, axis=0)).all()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("keys", [300, 1040])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_mask_of_padding_on_either_side_agrees_with_float64(dtype: str, keys: int) -> None:
    case = replace(PRIME, queries=keys, keys=keys, causal=True, bias=("add", dtype, (2, 1, 1, keys)))
    spec, params = case.made()
    # Of 16 bits not the lowest, beside which float32 would round the scores.
    lowest = np.finfo(dtype).min if dtype == "float32" else -1e4
    for left, right in ((0, keys), (1, keys), (64, keys), (200, keys), (0, 1), (0, 130), (0, 192), (70, 131)):
        arrays = draw(params, spec, seed=left + right)
        # Rows whose keys are all padding have an ordinary softmax over them; blocks of zeros stand beside others.
        arrays[3][:] = 0
        arrays[3][..., :left] = lowest
        arrays[3][..., right:] = lowest
        ((found,),) = run(case, replace(SMALL, stages=2), [arrays])
        expected = reference(spec, params, arrays)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < 8e-4, (left, right)
