"""Blocks that share the keys of a tile: whole kernels on the CPU, and which are proposed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
from tests.schedules.attention_cases import AttentionCase, draw, reference
from tests.schedules.templates.block_on_cpu import run_on_cpu

TARGET = resolve_target("cuda:sm_80")
DECODE = AttentionCase(1, 8, 1, 250, 64, dtype="float16", kv_heads=2, heads_first=True)
PACKED = AttentionParameters(1, 1, 32, 2, pack=True, split=4)
CASES = {
    "decode": (DECODE, PACKED),
    "whole blocks, three shares": (replace(DECODE, keys=192, head_dim=32), replace(PACKED, split=3)),
    "two rows of a warp": (
        replace(DECODE, queries=33, keys=130, heads=2, heads_first=False),
        AttentionParameters(2, 2, 32, 2, split=2),
    ),
    "padding hides the first shares": (
        replace(DECODE, bias=("add", "float16", (1, 1, 1, 250))),
        replace(PACKED, stages=3),
    ),
    "padding of an odd number of keys": (
        replace(DECODE, queries=33, keys=251, heads=2, kv_heads=1, bias=("add", "float32", (1, 1, 1, 251))),
        AttentionParameters(2, 1, 64, 2, split=2),
    ),
    "odd padding of halves": (
        replace(DECODE, batch=2, keys=251, bias=("add", "float16", (2, 1, 1, 251))),
        replace(PACKED, block_k=128, split=1),
    ),
    "an odd number of keys to keep": (
        replace(DECODE, batch=2, keys=251, bias=("keep", "bool", (2, 1, 1, 251))),
        replace(PACKED, block_k=64, split=2),
    ),
    "one query of a causal mask": (replace(DECODE, causal=True), replace(PACKED, split=2)),
    "whole": (DECODE, replace(PACKED, split=1)),
}


def planned(case: AttentionCase, parameters: AttentionParameters) -> AttentionPlan | Refusal:
    return make_plan(case.made()[0], parameters, cuda_limits(TARGET), bias_bytes=2 if case.bias else 0)


def inputs_of(case: AttentionCase) -> tuple[list[np.ndarray], np.ndarray]:
    """Return inputs, and what is right of them in float64."""
    spec, params = case.made()
    arrays = draw(params, spec, 0)
    if case.bias is not None:
        arrays[spec.bias.param][..., :150] = -np.inf if case.bias[0] == "add" else 0
    return arrays, reference(spec, params, arrays)


def made(case: AttentionCase, parameters: AttentionParameters, target: ResolvedTarget) -> tirx.PrimFunc:
    kernel = AttentionSm80().apply(attention_function(*case.made()), target, parameters)
    assert isinstance(kernel, tirx.PrimFunc), kernel
    return kernel


def assert_near(found: np.ndarray, right: np.ndarray) -> None:
    error = np.linalg.norm(found.astype("float64").reshape(right.shape) - right) / np.linalg.norm(right)
    assert error < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_shares_of_keys_make_the_attention(
    case: AttentionCase, parameters: AttentionParameters, tmp_path: Path
) -> None:
    kernel, plan = made(case, parameters, TARGET), planned(case, parameters)
    assert isinstance(plan, AttentionPlan)
    arrays, right = inputs_of(case)
    output = np.full([int(size) for size in kernel.params[-1].ty.shape], np.nan, "float16")
    names = [str(param.name) for param in kernel.params]
    run_on_cpu(kernel, TARGET, dict(zip(names, [*arrays, output], strict=True)), int(plan.blocks), tmp_path)
    assert_near(output, right)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a GPU")
@pytest.mark.parametrize(
    ("case", "parameters"),
    [*CASES.values(), (replace(DECODE, batch=16, heads=32, kv_heads=8, keys=1024), replace(PACKED, split=8))],
)
def test_shares_of_keys_make_the_attention_on_a_gpu(case: AttentionCase, parameters: AttentionParameters) -> None:
    target, device = resolve_target(f"cuda:{resolve_target('cuda').arch.removesuffix('a')}"), tvm.cuda(0)
    mod = tvm.IRModule({"main": made(case, parameters, target).with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        kernel = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    arrays, right = inputs_of(case)
    shape = [int(size) for size in mod["main"].params[-1].ty.shape]
    first: np.ndarray | None = None
    for _ in range(5):
        output = tvm.runtime.tensor(np.full(shape, np.nan, "float16"), device)
        kernel["main"](*(tvm.runtime.tensor(array, device) for array in arrays), output)
        assert_near(output.numpy(), right)
        # The order of sums is fixed.
        first = output.numpy() if first is None else first
        assert np.array_equal(first, output.numpy())


@pytest.mark.parametrize(
    ("case", "parameters", "reason"),
    [
        (DECODE, replace(PACKED, split=9), "split is 9, of 8 blocks of keys some would have none"),
        (DECODE, replace(PACKED, split=0), "split is 0"),
        (replace(DECODE, keys=160), replace(PACKED, split=4), "of 5 blocks of keys some would have none"),
        (replace(DECODE, queries=100, causal=True), replace(PACKED, pack=False, split=2), "tiles see different ones"),
        (replace(DECODE, window=40), replace(PACKED, split=2), "tiles see different ones"),
    ],
)
def test_keys_that_cannot_be_shared_are_refused(
    case: AttentionCase, parameters: AttentionParameters, reason: str
) -> None:
    found = planned(case, parameters)
    assert isinstance(found, Refusal)
    assert reason in found.reason


def proposed_splits(case: AttentionCase) -> list[int]:
    """Return how many blocks share the keys, by candidate."""
    return [one.split for one in AttentionSm80().candidates(attention_function(*case.made()), TARGET)]


def test_shares_are_proposed_where_tiles_are_few_and_first_where_one_tile_alone_reads_long_keys() -> None:
    long = replace(DECODE, heads=32, kv_heads=8, keys=1024)
    found = proposed_splits(long)
    assert found[0] > 1
    assert 1 in found
    for case in (replace(long, keys=128), replace(long, kv_heads=32, queries=192, keys=192)):
        assert proposed_splits(case)[0] == 1
        assert max(proposed_splits(case)) > 1
    assert set(proposed_splits(replace(long, batch=64))) == {1}


def test_decisions_of_before_blocks_shared_keys_are_read() -> None:
    old = '{"block_k":64,"dependent":false,"m_steps":1,"pack":false,"stages":2,"template":"attention_sm80","warps":4}'
    assert AttentionSm80().parse(old) == AttentionParameters(4, 1, 64, 2)
    assert AttentionParameters(4, 1, 64, 2).to_json() == old
