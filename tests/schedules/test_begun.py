"""Steps that begin before they are asked for."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import tvm
from tvm import te
from tvm.ir import IRModule
from tvm.tirx import PrimFunc

from relaxtune.schedules.begun import Begun, begun_work, shared_step, sharing


def scaled(by: float = 2.0) -> PrimFunc:
    x = te.placeholder((8,), "float32")
    return te.create_prim_func([x, te.compute((8,), lambda i: x[i] * by)])


@pytest.fixture
def calls() -> list[str]:
    return []


def test_a_step_is_done_once_for_a_function_wherever_it_stands(calls: list[str]) -> None:
    func = scaled()
    again = func.with_attr("a", 1).without_attr("a")
    with begun_work() as begun, sharing(begun):
        step = shared_step("lower", lambda mod: calls.append("lower") or len(mod.functions))
        assert [step(IRModule({"f": one})) for one in (func, again)] == [1, 1]
        assert shared_step("build", lambda _mod: "built")(IRModule({"f": func})) == "built"
    assert calls == ["lower"]


def test_other_attributes_or_another_body_are_another_function(calls: list[str]) -> None:
    func = scaled()
    with begun_work() as begun, sharing(begun):
        step = shared_step("lower", lambda _mod: calls.append("lower"))
        for one in (func, func.with_attr("a", 1), scaled(3.0), func):
            step(IRModule({"f": one}))
    assert len(calls) == 3


def test_a_module_of_several_functions_is_no_functions_result(calls: list[str]) -> None:
    mod = IRModule({"f": scaled(), "g": scaled(3.0)})
    with begun_work() as begun, sharing(begun):
        step = shared_step("lower", lambda _mod: calls.append("lower"))
        step(mod)
        step(mod)
    assert len(calls) == 2


def test_nothing_is_shared_outside(calls: list[str]) -> None:
    mod = IRModule({"f": scaled()})
    with begun_work() as begun, sharing(begun), begun_work() as inner:
        assert inner is begun
    step = shared_step("lower", lambda _mod: calls.append("lower"))
    step(mod)
    step(mod)
    assert len(calls) == 2


def test_who_asks_waits_for_what_is_under_way_and_gets_its_error() -> None:
    func, under_way = scaled(), Future[str]()
    begun = Begun()
    assert begun.begin("build", func, lambda: under_way) is under_way
    begun.pool.submit(under_way.set_exception, tvm.error.InternalError("no room"))
    with pytest.raises(tvm.error.InternalError, match="no room"):
        begun.result("build", func, lambda: "other")
    begun.pool.shutdown()
