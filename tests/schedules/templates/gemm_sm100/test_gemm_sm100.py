"""The experimental template for tcgen05: its descriptors, its machine code, and that no task is given it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tvm

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.registry import EXPERIMENTAL, TEMPLATES, apply_decision, list_candidates
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.gemm_sm100.descriptors import descriptor_high, instruction_descriptor
from relaxtune.schedules.templates.gemm_sm100.template import GemmParameters, GemmSm100
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.templates.block_on_cpu import cuda_source
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, captured_cubins, read_cubin
from tests.schedules.templates.matmul_cases import MatmulCase

TARGET = resolve_target("cuda:sm_100a")
PLAIN = MatmulCase((4096,), 768, 768, transposed=True)
CASES = {
    "plain": (PLAIN, "sm_100a"),
    "epilogue": (replace(PLAIN, rows=(3, 43), n=200, k=776, epilogue=("bias", "gelu", "residual")), "sm_100a"),
    "bfloat16, odd columns": (replace(PLAIN, n=257, dtype="bfloat16", output="float32"), "sm_103a"),
}


def bits(value: int, first: int, last: int) -> int:
    return value >> first & (1 << last - first + 1) - 1


def test_instruction_descriptor_has_the_fields_of_the_manuals_table() -> None:
    """PTX ISA 9.0, "Instruction descriptor format" of .kind::f16."""
    fields = {(4, 5): 1, (7, 9): 0, (10, 12): 0, (17, 22): 128 // 8, (24, 28): 128 // 16}
    found = instruction_descriptor("float16", 128, 128)
    assert {place: bits(found, *place) for place in fields} == fields
    assert found == sum(value << first for (first, _), value in fields.items())
    brain = instruction_descriptor("bfloat16", 64, 256)
    assert [bits(brain, *place) for place in fields] == [1, 1, 1, 32, 4]


@pytest.mark.parametrize(("swizzle", "mode"), [(0, 0), (1, 6), (2, 4), (3, 2)])
def test_shared_memory_descriptor_has_the_fields_of_the_manuals_table(swizzle: int, mode: int) -> None:
    """The same, "Shared memory descriptor layout": stride, the fixed value 1, base offset, stride mode, swizzle."""
    whole = descriptor_high(64, swizzle) << 32
    fields = {(32, 45): 64, (46, 48): 0b001, (49, 51): 0, (52, 52): 0, (53, 60): 0, (61, 63): mode}
    assert {place: bits(whole, *place) for place in fields} == fields


@pytest.mark.parametrize(("case", "arch"), CASES.values(), ids=CASES.keys())
def test_it_assembles_without_spills(case: MatmulCase, arch: str) -> None:
    target = resolve_target(f"cuda:{arch}")
    func = apply_decision(case.func(), target, GemmParameters(4, 2).to_json())
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with captured_cubins(arch) as cubins:
        tvm.tirx.build(module, target=target.target, pipeline=register_mixed_pipeline())
    cubin = read_cubin(cubins[0])
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
    # The whole file of registers holds one block of 192 threads.
    assert cubin.registers <= 255


def test_source_has_each_step_once() -> None:
    source = cuda_source(GemmSm100().apply(PLAIN.func(), TARGET, GemmParameters()), TARGET)
    body = source[source.rindex("__global__") :]
    calls = [name for name in re.findall(r"tvm_builtin_ptx_(tcgen05_\w+?)\(", body)]
    counts = {
        part: sum(name.startswith(f"tcgen05_{part}_") for name in calls)
        for part in ("alloc", "relinquish", "mma", "commit", "ld", "wait", "dealloc")
    }
    assert counts == {"alloc": 1, "relinquish": 1, "mma": 4, "commit": 2, "ld": 2, "wait": 1, "dealloc": 1}


def test_no_single_thread_does_what_takes_a_whole_warp() -> None:
    source = cuda_source(GemmSm100().apply(PLAIN.func(), TARGET, GemmParameters()), TARGET)
    roles = re.findall(r"\n  if \(\(\(int\)threadIdx\.x\) == \d+\) \{(.*?)\n  \}", source, re.DOTALL)
    assert len(roles) == 3
    assert not any(re.search(r"_sync_aligned|relaxtune_uniform|shfl|warp_sync|cta_sync", role) for role in roles)


def test_no_task_is_given_it() -> None:
    assert not set(EXPERIMENTAL) & set(TEMPLATES)
    found, refused = list_candidates(PLAIN.func(), TARGET)
    assert found
    assert not any("sm100" in text for text in (*refused, *(one.template for one in found)))
    asked, _ = list_candidates(PLAIN.func(), TARGET, EXPERIMENTAL)
    assert [one.template for one in asked] == ["gemm_sm100_experimental"]


@pytest.mark.parametrize(
    ("case", "arch", "reason"),
    [
        (PLAIN, "sm_100", "the target is cuda sm_100, expected cuda sm_100a (TMA and tcgen05)"),
        (PLAIN, "sm_120a", "the target is cuda sm_120a, expected cuda sm_100a"),
        (replace(PLAIN, transposed=False), "sm_100a", "B is [K, N], expected [N, K]"),
        (replace(PLAIN, k=772), "sm_100a", "K is 772, expected a multiple of 8"),
        (replace(PLAIN, dtype="float32"), "sm_100a", "the operands are float32"),
        (replace(PLAIN, epilogue=(), output="int8"), "sm_100a", "the output is int8"),
    ],
)
def test_others_are_refused_with_the_reason(case: MatmulCase, arch: str, reason: str) -> None:
    found = GemmSm100().apply(case.func(), resolve_target(f"cuda:{arch}"), GemmParameters())
    assert isinstance(found, Refusal)
    assert reason in found.reason


@pytest.mark.parametrize(("stages", "reason"), [(1, "stages is 1"), (8, "bytes of shared memory, the target has")])
def test_rings_that_do_not_fit_are_refused(stages: int, reason: str) -> None:
    found = GemmSm100().apply(PLAIN.func(), TARGET, GemmParameters(stages))
    assert isinstance(found, Refusal)
    assert reason in found.reason
