from __future__ import annotations

import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule

from pipeline.codegen.bool_vectors import unroll_bool_vectors


@pytest.mark.parametrize(("dtype", "expected"), [("bool", "T.unroll"), ("int8", "T.vectorized")])
def test_loops_over_booleans_are_not_vectorised(dtype: str, expected: str) -> None:
    mask = te.placeholder((64,), dtype, name="mask")
    out = te.compute((64,), lambda i: tvm.tirx.Select(mask[i].astype("bool"), 1.0, 0.0), name="pick")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([mask, out])}))
    schedule.vectorize(schedule.split(schedule.get_loops(schedule.get_sblock("pick"))[0], [None, 4])[1])
    kernel = unroll_bool_vectors(tvm.IRModule({"kernel": schedule.mod["main"]}))["kernel"].script()
    assert expected in kernel
