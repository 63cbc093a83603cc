"""The search space of matmuls on tensor cores, by its machine code; results need a GPU (`test_tensor_tile_gpu.py`)."""

from __future__ import annotations

import json
import struct

import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from pipeline.codegen.finish import finish_kernels
from schedules.context import QuietTuneContext
from schedules.rules.tensor_tile import tensor_tile_designs
from schedules.space import list_designs, make_space
from schedules.targets import resolve_target
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, MMA_SYNC, captured_cubins, kernel_code

# Low 12 bits of the instruction behind ldmatrix, as nvdisasm 13.0 prints it for sm_80 and sm_90.
LDSM = 0x83B


def matmul(m: int, k: int, n: int, dtype: str = "float16", *, epilogue: bool = True) -> tvm.IRModule:
    a, b = te.placeholder((1, m, k), dtype, name="A"), te.placeholder((k, n), dtype, name="B")
    bias = te.placeholder((n,), "float32", name="bias")
    r = te.reduce_axis((0, k), name="r")
    sums = te.compute(
        (1, m, n), lambda i, j, c: te.sum(a[i, j, r].astype("float32") * b[r, c].astype("float32"), axis=r), name="C"
    )
    if not epilogue:
        return tvm.IRModule({"main": te.create_prim_func([a, b, sums])})
    out = te.compute((1, m, n), lambda i, j, c: (sums[i, j, c] + bias[c]).astype(dtype), name="D")
    return tvm.IRModule({"main": te.create_prim_func([a, b, bias, out])})


def drawn(mod: tvm.IRModule, target: tvm.target.Target, count: int) -> list[Schedule]:
    """Return schedules with freshly drawn decisions that the post-processors take."""
    (design,) = tensor_tile_designs(mod["main"], target)
    space = make_space(target)
    QuietTuneContext(mod, target, space)
    found = []
    for seed in range(1, count + 1):
        schedule = Schedule(mod, seed=seed)
        with target:
            Trace(design.trace.insts, {}).apply_to_schedule(schedule, remove_postproc=True)
        schedule.enter_postproc()
        if all(rule.apply(schedule) for rule in space.postprocs):
            found.append(schedule)
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_multiply_on_tensor_cores_and_spill_nothing(arch: str, dtype: str) -> None:
    target = resolve_target(f"cuda:{arch}").target
    schedule = drawn(matmul(64, 96, 128, dtype), target, 3)[0]
    with captured_cubins(arch) as cubins, target:
        tvm.compile(finish_kernels(schedule.mod, target), target)
    codes = [low & 0xFFF for low, _ in struct.iter_unpack("<QQ", kernel_code(cubins[0]))]
    assert codes.count(MMA_SYNC) >= 2
    assert codes.count(LDSM) >= 2
    assert codes.count(LOCAL_LOAD) == codes.count(LOCAL_STORE) == 0


@pytest.mark.parametrize("epilogue", [True, False])
def test_most_candidates_keep_to_the_limits(epilogue: bool) -> None:
    target = resolve_target("cuda:sm_80").target
    found = drawn(matmul(128, 256, 256, epilogue=epilogue), target, 12)
    assert len(found) >= 8
    # What is recorded can be read again.
    assert all(json.dumps([str(step) for step in one.trace.insts]) for one in found)


@pytest.mark.parametrize(
    ("mod", "arch"),
    [
        (matmul(37, 64, 64), "sm_80"),
        (matmul(64, 64, 64, "float32"), "sm_80"),
        (matmul(64, 64, 64), "sm_75"),
        (matmul(64, 64, 64), "sm_90a"),
    ],
    ids=["odd rows", "float32", "before Ampere", "Hopper's own instructions"],
)
def test_others_are_left_to_ordinary_lanes(mod: tvm.IRModule, arch: str) -> None:
    target = resolve_target(f"cuda:{arch}").target
    assert tensor_tile_designs(mod["main"], target) == []
    assert list_designs(mod, target)
