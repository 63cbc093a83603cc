from __future__ import annotations

from functools import partial

import pytest
import tvm
from tvm import s_tir, te, tirx, topi
from tvm.s_tir import dlight
from tvm.script import ir as I, tirx as T

from relaxtune.schedules.errors import UnscheduledError
from relaxtune.schedules.fallback import apply_fallback, fallback_with_rules
from relaxtune.schedules.gpu import dlight_rules
from relaxtune.schedules.gpu.binding import count_launches, list_unbound_blocks
from relaxtune.schedules.gpu.dlight_rules import binding_rule
from relaxtune.schedules.targets import resolve_target
from tests.schedules.kernel_cases import prim_func


@pytest.fixture(scope="module")
def target() -> tvm.target.Target:
    return resolve_target("cuda:sm_90a").target


@pytest.fixture
def transpose_and_join() -> tirx.PrimFunc:
    """What a decoder does with its cache: transpose the new keys and put them behind the old ones."""
    new = te.placeholder((8, 3), "float32", name="new")
    old = te.placeholder((5, 8), "float32", name="old")
    return prim_func([new, old, topi.concatenate([old, topi.transpose(new)], 0)])


def test_dlight_transpose_leaves_blocks_unbound_and_is_passed_over(
    transpose_and_join: tirx.PrimFunc, target: tvm.target.Target
) -> None:
    stock = dlight.gpu.Transpose()
    with target:
        left = list_unbound_blocks(stock.apply(transpose_and_join, target, False).mod["main"])
        assert left == ["T_concat"]
        assert binding_rule(stock)(transpose_and_join, target) is None
    module = tvm.IRModule({"main": transpose_and_join})
    assert fallback_with_rules(module, target)[1] == {"main": "dlight-fallback"}
    assert list_unbound_blocks(apply_fallback(module, target)["main"]) == []


def test_transpose_keeps_its_rule_when_every_block_is_bound(target: tvm.target.Target) -> None:
    a = te.placeholder((64, 48), "float32", name="A")
    module = tvm.IRModule({"main": prim_func([a, topi.transpose(a)])})
    assert fallback_with_rules(module, target)[1] == {"main": "dlight-transpose"}


def test_fallback_takes_a_transpose_when_an_axis_has_length_one(target: tvm.target.Target) -> None:
    a = te.placeholder((8, 1), "float32", name="A")
    func = prim_func([a, topi.transpose(a)])
    with target, pytest.raises(ValueError, match="Cannot use and / or / not"):
        dlight.gpu.Transpose().apply(func, target, False)
    assert fallback_with_rules(tvm.IRModule({"main": func}), target)[1] == {"main": "dlight-fallback"}


def test_next_rule_takes_over_when_dlight_raises_what_is_no_schedule_error(
    target: tvm.target.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dlight_rules, "Transpose", dlight.gpu.Transpose)
    a = te.placeholder((8, 1), "float32", name="A")
    module = tvm.IRModule({"main": prim_func([a, topi.transpose(a)])})
    assert fallback_with_rules(module, target)[1] == {"main": "dlight-fallback"}


def test_every_block_is_bound_when_a_gather_has_several(target: tvm.target.Target) -> None:
    a = te.placeholder((6, 5), "float32", name="A")
    first = te.compute((6, 5), lambda i, j: a[i, j] + a[5 - i, j], name="first")
    total = topi.sum(first, 1)
    module = tvm.IRModule(
        {"main": prim_func([a, topi.concatenate([topi.transpose(first), topi.transpose(a)], 0), total])}
    )
    assert list_unbound_blocks(apply_fallback(module, target)["main"]) == []


def test_code_that_names_its_threads_is_taken_as_it_is(target: tvm.target.Target) -> None:
    """Mixtures of experts scatter their scores; before, a graph with ScatterElements had no kernel on a GPU."""
    data, rows = te.placeholder((4, 6), "float32", name="data"), te.placeholder((4, 2), "int64", name="rows")
    updates = te.placeholder((4, 2), "float32", name="updates")
    with target:
        func = prim_func([data, rows, updates, topi.gpu.scatter_elements(data, rows, updates, 1)])
    module = tvm.IRModule({"main": func})
    assert fallback_with_rules(module, target)[1] == {"main": "bound"}
    assert count_launches(apply_fallback(module, target)["main"]) == 2


def test_fallback_refuses_when_no_rule_binds_every_block(
    transpose_and_join: tirx.PrimFunc, target: tvm.target.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dlight_rules.dlight.gpu, "Fallback", dlight.gpu.Transpose)
    with pytest.raises(UnscheduledError, match="no rule could bind all its blocks to threads"):
        apply_fallback(tvm.IRModule({"main": transpose_and_join}), target)


def test_blocks_are_listed_by_the_binding_of_the_loops_around_them() -> None:
    a = te.placeholder((4, 64), "float32", name="A")
    first = te.compute((4, 64), lambda i, j: a[i, j] + 1.0, name="first")
    second = te.compute((4, 64), lambda i, j: first[i, j] * first[i, 0], name="second")
    schedule = s_tir.Schedule(prim_func([a, second]))
    assert list_unbound_blocks(schedule.mod["main"]) == ["first", "second"]
    schedule.bind(schedule.get_loops(schedule.get_sblock("second"))[1], "threadIdx.x")
    assert list_unbound_blocks(schedule.mod["main"]) == ["first"]


def test_block_counts_as_bound_when_it_launches_threads_itself() -> None:
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def main(A: T.Buffer((64,), "float32"), c: T.int64):
            with T.sblock("own_threads"):
                T.reads()
                T.writes(A[0:64])
                if c > T.int64(0):
                    with T.launch_thread("threadIdx.x", 64) as tx:
                        A[tx] = T.float32(1)
            if c > T.int64(1):
                with T.sblock("host"):
                    A[0] = T.float32(2)
            else:
                with T.sblock("host_too"):
                    A[0] = T.float32(3)

    assert list_unbound_blocks(Module["main"]) == ["host", "host_too"]


def _raised(data: te.Tensor, by: int, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
    return data[i, j] + float(by)


def test_launches_are_counted_by_what_threads_run_together(
    transpose_and_join: tirx.PrimFunc, target: tvm.target.Target
) -> None:
    scheduled = apply_fallback(tvm.IRModule({"main": transpose_and_join}), target)["main"]
    assert count_launches(scheduled) == 1

    data = te.placeholder((4, 8), "float32", name="data")
    outputs = [te.compute((4, 8), partial(_raised, data, k), name=f"out{k}") for k in range(3)]
    several = apply_fallback(tvm.IRModule({"main": prim_func([data, *outputs])}), target)["main"]
    assert count_launches(several) == 3
