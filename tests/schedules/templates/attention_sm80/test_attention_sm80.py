"""The attention template on mma.sync: what it takes, what it proposes for each target, and its machine code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.registry import list_candidates
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.attention_sm80.plan import AttentionParameters, AttentionPlan, make_plan
from relaxtune.schedules.templates.attention_sm80.template import AttentionSm80
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.attention_cases import AttentionCase
from tests.schedules.templates.cubin import (
    COPY_ASYNC,
    LOCAL_LOAD,
    LOCAL_STORE,
    MMA_SYNC,
    TMA_LOAD,
    captured_cubins,
    read_cubin,
)

BERT = AttentionCase(8, 12, 128, 128, 64, dtype="float16")
TARGETS = ("cuda:sm_80", "cuda:sm_86", "cuda:sm_89", "cuda:sm_90", "cuda:sm_120")


@pytest.mark.parametrize("text", TARGETS)
@pytest.mark.parametrize(
    "case",
    [
        BERT,
        replace(BERT, queries=2048, keys=2048, head_dim=128, causal=True),
        replace(BERT, kv_heads=4, queries=1, keys=1000),
        replace(BERT, head_dim=256),
        replace(BERT, bias=("add", "float32", (8, 12, 128, 128))),
        replace(BERT, heads=16, kv_heads=4, queries=1, keys=1000, past=999),
    ],
    ids=["BERT", "long", "decode", "wide heads", "bias", "caches that grow"],
)
def test_every_proposal_fits_its_target(case: AttentionCase, text: str) -> None:
    target, limits = resolve_target(text), cuda_limits(resolve_target(text))
    spec, params = case.made()
    found = AttentionSm80().candidates(attention_function(spec, params), target)
    assert not isinstance(found, Refusal)
    for parameters in found:
        plan = make_plan(spec, parameters, limits, bias_bytes=4 if case.bias else 0)
        assert isinstance(plan, AttentionPlan)
        assert plan.shared_bytes <= limits.shared_bytes_optin
        assert plan.registers * plan.threads <= limits.registers_per_block
        assert not parameters.dependent


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (BERT, "cuda:sm_90a", "the target has wgmma"),
        (BERT, "cuda:sm_75", "expected cuda sm_80 or later"),
        (replace(BERT, dtype="float32"), "cuda:sm_80", "expected float16 or bfloat16"),
        (replace(BERT, head_dim=20), "cuda:sm_80", "head_dim is 20, expected a multiple of 8 up to 256"),
        (replace(BERT, batch=tvm.tirx.Var("batch", "int64")), "cuda:sm_80", "its sizes are symbolic"),
    ],
)
def test_refusal_says_why(case: AttentionCase, target: str, reason: str) -> None:
    found = AttentionSm80().candidates(attention_function(*case.made()), resolve_target(target))
    assert isinstance(found, Refusal)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"warps": 3}, "warps is 3, expected 1, 2, 4 or 8"),
        ({"m_steps": 3}, "m_steps is 3, expected 1 or 2"),
        ({"block_k": 40}, "block_k is 40, expected a multiple of 16 up to 128"),
        ({"stages": 1}, "stages is 1, expected 2 to 4"),
        ({"m_steps": 2, "block_k": 128}, "registers"),
        ({"block_k": 128, "stages": 4}, "bytes of shared memory, the target has 101376"),
    ],
)
def test_parameters_that_make_no_kernel_are_refused(change: dict[str, int], reason: str) -> None:
    func = attention_function(*BERT.made())
    found = AttentionSm80().apply(func, resolve_target("cuda:sm_86"), replace(AttentionParameters(), **change))
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_it_is_what_an_untuned_attention_takes() -> None:
    found, _ = list_candidates(attention_function(*BERT.made()), resolve_target("cuda:sm_89"))
    assert {one.template for one in found} == {"attention_sm80"}
    assert AttentionSm80().parse(found[0].to_json()) == found[0]


@pytest.mark.quick_cases("causal", "split")
@pytest.mark.parametrize(
    ("case", "parameters", "arch"),
    [
        (replace(BERT, queries=127, keys=131, causal=True), AttentionParameters(4, 2, 64, 2), "sm_80"),
        (replace(BERT, head_dim=128, bias=("add", "float16", (8, 1, 1, 128))), AttentionParameters(4, 1, 64), "sm_86"),
        (replace(BERT, head_dim=128), AttentionParameters(4, 2, 32, 2, dependent=True), "sm_120"),
        (
            replace(BERT, batch=1, heads=8, kv_heads=2, queries=1, keys=1024, head_dim=128),
            AttentionParameters(1, 1, 128, 2, pack=True, split=4),
            "sm_80",
        ),
    ],
    ids=["causal", "padding", "wide", "split"],
)
def test_cubin_has_mma_and_no_spills(case: AttentionCase, parameters: AttentionParameters, arch: str) -> None:
    target = resolve_target(f"cuda:{arch}")
    spec, params = case.made()
    made = AttentionSm80().apply(attention_function(spec, params), target, parameters)
    mod = tvm.IRModule({"main": made.with_attr("global_symbol", "main")})
    with captured_cubins(arch) as cubins:
        tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    cubin = read_cubin(cubins[0])
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
    # Scores and values of a block of keys, once: as many instructions.
    products = parameters.m_steps * (parameters.block_k // 8) * (spec.head_dim // 16)
    assert cubin.count(MMA_SYNC) == 2 * products
    assert cubin.count(COPY_ASYNC) > 4
    assert cubin.count(TMA_LOAD) == 0
