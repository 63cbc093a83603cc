"""What a launch may have: threads, grid and memory of a block; and schedules of dlight that ask for more."""

from __future__ import annotations

import pytest
import tvm
from tvm import te, tirx, topi
from tvm.script import tirx as T

from relaxtune.schedules.fallback import apply_fallback, apply_plainest
from relaxtune.schedules.gpu.launch_limits import exceeded_limit
from relaxtune.schedules.targets import resolve_target
from tests.schedules.kernel_cases import prim_func


@pytest.fixture(scope="module", params=["cuda:sm_80", "cuda:sm_89", "cuda:sm_90a"])
def target(request: pytest.FixtureRequest) -> tvm.target.Target:
    return resolve_target(request.param).target


def copied(
    scope: str, elements: int, threads: int = 32, block_axis: str = "blockIdx.x", blocks: int = 1
) -> tirx.PrimFunc:
    @T.prim_func(private=True, s_tir=True)
    def func(a: T.Buffer((blocks, threads), "float32"), b: T.Buffer((blocks, threads), "float32")):
        for i in T.thread_binding(blocks, thread=block_axis):
            kept = T.alloc_buffer((elements,), "float32", scope=scope)
            for j in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("keep"):
                    x, y = T.axis.remap("SS", [i, j])
                    for k in range(elements):
                        kept[k] = a[x, y]
                    for k in range(elements):
                        b[x, y] = kept[k]

    return func


@pytest.mark.parametrize(
    ("func", "said"),
    [
        (copied("shared", 8), None),
        (copied("shared", 50_000), "200000 bytes of shared memory, and 48128 are the most"),
        (copied("local", 20_000), "80000 bytes of local memory, and 65536 are the most"),
        (copied("local", 1, threads=2048), "2048 along threadIdx.x, and 1024 are the most"),
        (copied("local", 1, block_axis="blockIdx.z", blocks=65_536), "65536 along blockIdx.z, and 65535 are the most"),
        (copied("local", 1, block_axis="blockIdx.x", blocks=65_536), None),
    ],
)
def test_what_a_function_asks_too_much_of_is_said(
    target: tvm.target.Target, func: tirx.PrimFunc, said: str | None
) -> None:
    assert exceeded_limit(func, target) == said


def grouped_convolution() -> tirx.PrimFunc:
    """The position convolution of a speech encoder, and an activation: dlight keeps all of it in one block's memory."""
    data, kernel = te.placeholder((1, 768, 627), "float16"), te.placeholder((768, 48, 128), "float16")
    sums = topi.nn.group_conv1d_ncw(data, kernel, 1, 0, 1, 16, "float32")
    return prim_func([data, kernel, topi.erf(topi.strided_slice(sums, [0, 0, 0], [1, 768, 499]))])


def test_default_schedules_stay_within_the_limits(target: tvm.target.Target) -> None:
    wanted = tvm.s_tir.dlight.gpu.GeneralReduction().apply(grouped_convolution(), target, False)
    assert "of shared memory" in str(exceeded_limit(wanted.mod["main"], target))
    made = apply_fallback(tvm.IRModule({"main": grouped_convolution()}), target)["main"]
    assert exceeded_limit(made, target) is None


def test_plainest_schedule_takes_no_shared_memory(target: tvm.target.Target) -> None:
    made = apply_plainest("main", grouped_convolution(), target)
    assert "shared" not in made.script()
    assert exceeded_limit(made, target) is None
