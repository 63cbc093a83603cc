from __future__ import annotations

import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule

from relaxtune.pipeline.codegen.finish import device_toolchain, finish_kernels, fit_vectors
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.lowering import tir_pipeline_for

TARGET = resolve_target("cuda:sm_90a").target


def fitted(schedule: Schedule) -> str:
    return str(fit_vectors(tvm.IRModule({"kernel": schedule.mod["main"]}))["kernel"].script())


@pytest.mark.parametrize(("dtype", "expected"), [("bool", "T.unroll"), ("int8", "T.vectorized")])
def test_loops_over_booleans_are_not_vectorised(dtype: str, expected: str) -> None:
    mask = te.placeholder((64,), dtype, name="mask")
    out = te.compute((64,), lambda i: tvm.tirx.Select(mask[i].astype("bool"), 1.0, 0.0), name="pick")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([mask, out])}))
    schedule.vectorize(schedule.split(schedule.get_loops(schedule.get_sblock("pick"))[0], [None, 4])[1])
    assert expected in fitted(schedule)


def copy_in_vectors(columns: int, lanes: int) -> Schedule:
    """Return the schedule of a copy of 128 rows, loops fused, of every other row so that rows are not contiguous."""
    a = te.placeholder((256, columns), "float16", name="a")
    b = te.compute((128, columns), lambda i, j: a[2 * i, j], name="copy")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([a, b])}))
    fused = schedule.fuse(*schedule.get_loops(schedule.get_sblock("copy")))
    block, thread, vector = schedule.split(fused, [None, 16, lanes])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    schedule.vectorize(vector)
    return schedule


@pytest.mark.parametrize(
    ("columns", "lanes", "fit"),
    [(4, 8, 4), (12, 8, 4), (6, 8, 2), (4, 4, 4), (6, 4, 4), (8, 8, 8), (24, 8, 8), (3, 8, None)],
)
def test_vectors_of_more_than_four_stay_in_a_row_and_compile(columns: int, lanes: int, fit: int | None) -> None:
    schedule = copy_in_vectors(columns, lanes)
    script = fitted(schedule)
    assert ("T.vectorized" in script) == (fit is not None)
    assert fit is None or f"T.vectorized({fit})" in script
    assert ("T.unroll" in script) == (fit != lanes)
    finished = finish_kernels(schedule.mod, TARGET)
    with device_toolchain(TARGET), TARGET:
        assert tvm.compile(finished, TARGET, tir_pipeline=tir_pipeline_for(finished)).mod.imports


def test_division_of_anything_but_the_vector_says_nothing() -> None:
    a = te.placeholder((4, 3, 8), "float16", name="a")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([a, te.compute(a.shape, a, name="copy")])}))
    *rows, vector = schedule.get_loops(schedule.get_sblock("copy"))
    schedule.fuse(*rows)
    schedule.vectorize(vector)
    script = fitted(schedule)
    assert "// 3" in script
    assert "T.vectorized(8)" in script
    assert "T.unroll" not in script


def test_a_loop_of_two_blocks_is_split_once() -> None:
    a = te.placeholder((64, 4), "float16", name="a")
    b = te.compute(a.shape, lambda i, j: a[i, j] + tvm.tirx.const(1, "float16"), name="first")
    c = te.compute(a.shape, lambda i, j: b[i, j] * b[i, j], name="second")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([a, c])}))
    first, second = schedule.get_sblock("first"), schedule.get_sblock("second")
    _, vector = schedule.split(schedule.fuse(*schedule.get_loops(second)), [None, 8])
    schedule.compute_at(first, vector)
    schedule.vectorize(vector)
    script = fitted(schedule)
    assert script.count("T.vectorized(4)") == 1
    assert script.count("T.unroll(2)") == 1
    assert "T.unroll(1)" not in script
