"""The machine code of everything that the GEMM template proposes for the benchmark's shapes, without a GPU."""

from __future__ import annotations

import pytest
import tvm

from benchmarks.kernels.bench_gemm_sm90 import CASES, EIGHT_BIT_CASES, Case, fused_matmul
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.templates.cubin import (
    MMA_SYNC,
    TMA_LOAD,
    TMA_LOAD_MULTICAST,
    WARPGROUP,
    WGMMA,
    WGMMA_FLOAT8,
    WGMMA_INTEGER,
    Cubin,
    captured_cubins,
    read_cubin,
)

# Bytes a thread may keep in memory where it has 192 accumulators or more: some of what the epilogue counts with.
FRAME_BYTES_MAX = 128


# Of 8 bits, few and many rows, short and long sums, and sums as the output.
EIGHT_BIT = (
    "int8-bert-ffn-up-128",
    "int8-llama-ffn-down-4096",
    "int8-square-4096-sums",
    "float8-bert-ffn-up-128",
    "float8-llama-ffn-down-4096",
)
EVERY = CASES | {name: EIGHT_BIT_CASES[name] for name in EIGHT_BIT}
OPCODES = {"float16": WGMMA, "int8": WGMMA_INTEGER, "float8_e4m3fn": WGMMA_FLOAT8}


def problems(cubin: Cubin, parameters: GemmParameters, opcode: int) -> list[str]:
    """Return what is wrong with a kernel's code; reads of accumulators before the wait are the compiler's to refuse."""
    groups = 1 if parameters.pingpong else parameters.consumers
    wide = parameters.block_m // groups * parameters.block_n // 128 >= 192
    found = {
        "too few wgmma": cubin.count(opcode) < 4 * (parameters.block_m // 64 // groups),
        "each wgmma is waited for by itself": cubin.count(WARPGROUP) >= cubin.count(opcode),
        "no TMA loads": cubin.count(TMA_LOAD) + cubin.count(TMA_LOAD_MULTICAST) < 2,
        "mma.sync": cubin.count(MMA_SYNC) > 0,
        f"{cubin.frame_bytes} bytes of spills": cubin.frame_bytes > (FRAME_BYTES_MAX if wide else 0),
        # Three warpgroups of 168 registers, or one of them and a warp.
        f"{cubin.registers} registers": cubin.registers > (168 if parameters.consumers > 1 else 255),
    }
    return [text for text, holds in found.items() if holds]


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY.keys())
def test_every_proposal_has_wgmma_and_spills_within_bounds(case: Case) -> None:
    target, template = resolve_target("cuda:sm_90a"), GemmSm90()
    func = fused_matmul(case).with_attr(CONSTANT_PARAMS_ATTR, [1])
    proposals = template.candidates(func, target)
    assert not isinstance(proposals, Refusal)
    wrong = {}
    for parameters in proposals:
        mod = tvm.IRModule({"main": template.apply(func, target, parameters).with_attr("global_symbol", "main")})
        with captured_cubins("sm_90a") as cubins:
            tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
        (data,) = cubins
        if found := problems(read_cubin(data), parameters, OPCODES[case.operands]):
            wrong[parameters.to_json()] = found
    assert not wrong
