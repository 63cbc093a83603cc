from __future__ import annotations

import logging

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import IRModule
from tvm.s_tir import Schedule
from tvm.script import ir as I, tirx as T

from relaxtune.schedules import fallback
from relaxtune.schedules.cpu.generic import elementwise
from relaxtune.schedules.errors import TargetError, UnscheduledError
from relaxtune.schedules.fallback import apply_fallback, fallback_with_rules, rules_for
from relaxtune.schedules.marks import is_scheduled
from relaxtune.schedules.targets import resolve_target
from tests.schedules.kernel_cases import host, matmul_case, rows_case


def two_kernels() -> IRModule:
    return IRModule({"scores": matmul_case(8, 32, 16).func, "weights": rows_case("softmax", 8, 32).func})


def test_fallback_names_a_rule_for_each_kernel_when_on_llvm():
    names = fallback_with_rules(two_kernels(), host().target)[1]
    assert names == {"scores": "cpu-matmul", "weights": "cpu-reduction"}


def test_fallback_binds_threads_when_on_cuda():
    target = resolve_target("cuda:sm_90a").target
    names = fallback_with_rules(two_kernels(), target)[1]
    assert names == {"scores": "dlight-matmul", "weights": "dlight-generalreduction"}
    scheduled = apply_fallback(two_kernels(), target)
    for name in names:
        assert "threadIdx.x" in scheduled[name].script(show_meta=False)


def test_fallback_leaves_the_input_and_scheduled_functions_alone_when_applied():
    module = two_kernels()
    before = tvm.ir.save_json(module)
    marked = module["scores"].with_attr(fallback.SCHEDULED_ATTR, True)
    module_marked = IRModule({"scores": marked, "weights": module["weights"]})
    after = apply_fallback(module_marked, host().target)
    assert after["scores"].same_as(marked)
    assert is_scheduled(after["weights"])
    assert tvm.ir.save_json(module) == before
    assert fallback_with_rules(after, host().target)[1] == {}


def test_fallback_keeps_relax_functions_and_runs_when_the_shape_is_symbolic():
    builder = relax.BlockBuilder()
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((1, n, 24), "float32"))
    w = relax.Var("w", relax.TensorType((24, 40), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.softmax(relax.op.matmul(x, w), axis=-1))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    module = relax.transform.LegalizeOps()(builder.get())
    module = apply_fallback(module, host().target)
    machine = relax.VirtualMachine(relax.build(module, target=host().target), tvm.cpu())
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((24, 40)).astype("float32")
    for length in (1, 7, 30):
        value = rng.standard_normal((1, length, 24)).astype("float32")
        scores = value @ weight
        exp = np.exp(scores - scores.max(-1, keepdims=True))
        got = machine["main"](tvm.runtime.tensor(value), tvm.runtime.tensor(weight)).numpy()
        np.testing.assert_allclose(got, exp / exp.sum(-1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_next_rule_takes_over_and_it_is_logged_when_a_rule_misjudges_a_function(monkeypatch, caplog):
    def misjudge(func, target):
        schedule = Schedule(func)
        schedule.vectorize(schedule.get_loops(schedule.get_child_blocks(schedule.get_sblock("root"))[0])[-1])
        return schedule

    monkeypatch.setattr(fallback, "elementwise", misjudge)
    with caplog.at_level(logging.WARNING, "relaxtune.schedules.fallback"):
        names = fallback_with_rules(IRModule({"main": matmul_case(4, 16, 8).func}), host().target)[1]
    assert names == {"main": "cpu-matmul"}
    assert "rule cpu-elementwise failed on main" in caplog.text


def test_fallback_refuses_when_the_target_has_no_rules():
    with pytest.raises(TargetError, match="no default schedules for target kind 'opencl'"):
        rules_for(tvm.target.Target("opencl"))


def test_fallback_refuses_when_no_rule_takes_a_function(monkeypatch):
    monkeypatch.setattr(fallback, "rules_for", lambda target: [("cpu-elementwise", elementwise)])
    with pytest.raises(UnscheduledError, match="no default rule for llvm took the function 'main'"):
        apply_fallback(IRModule({"main": matmul_case(2, 2, 2).func}), host().target)


def test_generic_rule_keeps_an_extern_call_when_the_body_is_no_loop_nest():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def main(A: T.Buffer((4,), "float32")):
            T.func_attr({"global_symbol": "main"})
            T.evaluate(T.call_extern("int32", "nothing", A.data))

    names = fallback_with_rules(Module, host().target)[1]
    assert names == {"main": "cpu-generic"}
