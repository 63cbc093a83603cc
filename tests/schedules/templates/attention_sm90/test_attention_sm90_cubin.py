"""The machine code of attention kernels, without a GPU: wgmma and TMA are there, registers and stack within bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import tvm

from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.attention_sm90.plan import AttentionParameters
from relaxtune.schedules.templates.attention_sm90.template import AttentionSm90
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.attention_cases import AttentionCase
from tests.schedules.templates.cubin import (
    LOCAL_LOAD,
    LOCAL_STORE,
    MMA_SYNC,
    MOVE_TO_UNIFORM,
    TMA_LOAD,
    WGMMA,
    WGMMA_FROM_REGISTERS,
    captured_cubins,
    read_cubin,
)

BERT = AttentionCase(1, 12, 128, 128, 64, dtype="float16", packed=True)
LONG = AttentionCase(8, 16, 2048, 2048, 128, dtype="float16", packed=True)


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


@pytest.mark.quick_cases("small", "causal", "decode that appends")
@pytest.mark.parametrize(
    ("case", "parameters", "registers_max"),
    [
        (BERT, AttentionParameters(1, 64, 2, residents=3), 128),
        (replace(BERT, batch=32, queries=512, keys=512), AttentionParameters(1, 64, 3, blocks=396, residents=3), 128),
        (
            replace(BERT, bias=("add", "float32", (1, 1, 1, 128))),
            AttentionParameters(1, 128, 1, overlap=False, residents=2),
            168,
        ),
        # Three warpgroups start with 168 registers a thread, four with 128; the consumers get more by setmaxnreg.
        (replace(LONG, causal=True), AttentionParameters(2, 128, 2, pingpong=True, blocks=132), 168),
        (replace(LONG, head_dim=64), AttentionParameters(3, 128, 2, pingpong=True, blocks=132), 128),
        (
            replace(LONG, heads_first=True, packed=False, queries=1, kv_heads=4, dtype="bfloat16"),
            AttentionParameters(1, 128, 2, split=8, pack=True),
            255,
        ),
        (
            replace(LONG, packed=False, batch=1, queries=1, kv_heads=4, head_dim=64, past=2047),
            AttentionParameters(1, 128, 4, pack=True),
            255,
        ),
        (
            replace(LONG, head_dim=80, window=100, bias=("keep", "bool", (8, 1, 2048, 2048))),
            AttentionParameters(2, 112, 2),
            168,
        ),
        (replace(LONG, head_dim=256), AttentionParameters(2, 80, 2, pingpong=True), 168),
        (replace(LONG, head_dim=192, value_dim=128, causal=True), AttentionParameters(2, 128, 2, pingpong=True), 168),
    ],
    ids=[
        "small",
        "several tiles",
        "mask",
        "causal",
        "three consumers",
        "decode",
        "decode that appends",
        "window",
        "wide",
        "two widths",
    ],
)
def test_cubin_has_wgmma_and_no_spills(
    case: AttentionCase, parameters: AttentionParameters, registers_max: int, target: ResolvedTarget
) -> None:
    func = AttentionSm90().apply(attention_function(*case.made()), target, parameters)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with captured_cubins("sm_90a") as cubins:
        tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    (data,) = cubins
    cubin = read_cubin(data)
    # Q K^T reads both operands from shared memory, P V takes P from registers; none of the slower tensor-core path.
    assert cubin.count(WGMMA) >= math.ceil(case.head_dim / 16)
    assert cubin.count(WGMMA_FROM_REGISTERS) >= parameters.block_k // 16
    assert cubin.count(TMA_LOAD) >= 3
    assert cubin.count(MMA_SYNC) == 0
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
    assert cubin.registers <= registers_max
    # Descriptors are sums in uniform registers, which takes roles that the compiler knows to be whole warps'.
    places = [place for place, opcode in enumerate(cubin.opcodes) if opcode in (WGMMA, WGMMA_FROM_REGISTERS)]
    assert cubin.opcodes[places[0] : places[-1]].count(MOVE_TO_UNIFORM) < len(places)


@pytest.mark.quick_cases("mask")
@pytest.mark.parametrize(
    "case",
    [
        replace(BERT, bias=("add", "float16", (1, 1, 1, 128))),
        replace(BERT, queries=197, keys=197),
        replace(BERT, queries=256, keys=256),
    ],
    ids=["mask", "ViT", "256 keys"],
)
def test_first_proposal_for_two_blocks_of_keys_spills_nothing(case: AttentionCase, target: ResolvedTarget) -> None:
    func = attention_function(*case.made())
    first, *_ = AttentionSm90().candidates(func, target)
    assert first.overlap
    assert case.keys <= 2 * first.block_k
    mod = tvm.IRModule({"main": AttentionSm90().apply(func, target, first).with_attr("global_symbol", "main")})
    with captured_cubins("sm_90a") as cubins:
        tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    assert read_cubin(cubins[0]).frame_bytes == 0
