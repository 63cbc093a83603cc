from __future__ import annotations

import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule

from pipeline.codegen.gpu_check import bind_all_kernels, unbound_kernels, unroll_bool_vectors
from pipeline.errors import LoweringError

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm")


@pytest.fixture
def two_blocks() -> tvm.ir.IRModule:
    x = te.placeholder((4, 64), "float32", name="x")
    y = te.compute((4, 64), lambda i, j: x[i, j] + 1.0, name="first")
    z = te.compute((4, 64), lambda i, j: y[i, j] * y[i, 0], name="second")
    return tvm.IRModule({"kernel": te.create_prim_func([x, z])})


def bound(mod: tvm.ir.IRModule, *blocks: str) -> tvm.ir.IRModule:
    """Return the module with the outer loop of each block bound to GPU blocks."""
    schedule = Schedule(tvm.IRModule({"main": mod["kernel"]}))
    for name in blocks:
        schedule.bind(schedule.get_loops(schedule.get_sblock(name))[0], "blockIdx.x")
    return tvm.IRModule({"kernel": schedule.mod["main"]})


@pytest.mark.parametrize(
    ("blocks", "expected"), [((), ["kernel"]), (("first",), ["kernel"]), (("first", "second"), [])]
)
def test_a_kernel_is_unbound_when_one_of_its_blocks_is(
    two_blocks: tvm.ir.IRModule, blocks: tuple[str, ...], expected: list[str]
) -> None:
    assert unbound_kernels(bound(two_blocks, *blocks)) == expected


def test_an_unbound_kernel_is_scheduled_anew(two_blocks: tvm.ir.IRModule, caplog: pytest.LogCaptureFixture) -> None:
    fixed = bind_all_kernels(two_blocks, bound(two_blocks, "first"), TARGET)
    assert unbound_kernels(fixed) == []
    assert fixed["kernel"].attrs["tirx.is_scheduled"]
    assert "kernels kernel have blocks outside every GPU thread" in caplog.text
    whole = bound(two_blocks, "first", "second")
    assert bind_all_kernels(two_blocks, whole, TARGET) is whole


def test_a_kernel_that_no_rule_binds_is_an_error(two_blocks: tvm.ir.IRModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.codegen.gpu_check.dlight.gpu.Fallback.apply", lambda *_: None)
    with pytest.raises(LoweringError, match="kernels kernel have blocks that no GPU thread runs"):
        bind_all_kernels(two_blocks, two_blocks, TARGET)


@pytest.mark.parametrize(("dtype", "expected"), [("bool", "T.unroll"), ("int8", "T.vectorized")])
def test_loops_over_booleans_are_not_vectorised(dtype: str, expected: str) -> None:
    mask = te.placeholder((64,), dtype, name="mask")
    out = te.compute((64,), lambda i: tvm.tirx.Select(mask[i].astype("bool"), 1.0, 0.0), name="pick")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([mask, out])}))
    schedule.vectorize(schedule.split(schedule.get_loops(schedule.get_sblock("pick"))[0], [None, 4])[1])
    kernel = unroll_bool_vectors(tvm.IRModule({"kernel": schedule.mod["main"]}))["kernel"].script()
    assert expected in kernel
