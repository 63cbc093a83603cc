from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.kit.ir import constants_in, main_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.lower import lowering_steps
from relaxtune.pipeline.passes.weights.pack_weights import pack_weights
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, graph_of, operators_of, run_module, state_of

op = relax.op
RNG = np.random.default_rng(0)


def weight(*shape: int, dtype: str = "float32") -> relax.Constant:
    return relax.const(RNG.standard_normal(shape).astype(dtype), dtype)


def constants_in_main(mod: tvm.ir.IRModule) -> list[tvm.ir.Expr]:
    return constants_in(main_of(mod))


def one_matmul(left: tuple[int, ...], right: relax.Constant, dtype: str = "float32"):
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return b.emit(op.tanh(b.emit(op.matmul(x, right), name_hint="product")))

    return graph_of(build, {"x": (left, dtype)})


@pytest.mark.parametrize("columns", [48, 64, 37])
@pytest.mark.parametrize("left", [(5, 8), (2, 3, 8)])
def test_pack_replaces_a_matmul_by_a_constant_and_keeps_its_result(left: tuple[int, ...], columns: int) -> None:
    graph = one_matmul(left, weight(8, columns))
    state = state_of(graph)
    packed = pack_weights(graph.mod, state)
    assert operators_of(packed) == ["call_tir", "tanh"]
    assert state.sources["product"] == ("node_product",)
    assert state.notes == [f"packed 1 weights of {constants_in_main(packed)[0].value.numpy().nbytes} bytes"]
    x = RNG.standard_normal(left).astype("float32")
    assert_agrees(run_module(packed, [x]), run_module(graph.mod, [x]), 1e-6)


def test_pack_makes_one_copy_of_a_weight_that_two_matmuls_read() -> None:
    shared = weight(8, 48)

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return b.emit(op.add(b.emit(op.matmul(x, shared)), b.emit(op.matmul(b.emit(op.tanh(x)), shared))))

    graph = graph_of(build, {"x": ((4, 8), "float32")})
    packed = pack_weights(graph.mod, state_of(graph))
    assert operators_of(packed).count("call_tir") == 2
    first, second = constants_in_main(packed)
    assert first.same_as(second)


@pytest.mark.parametrize("case", ["half", "batched weight", "vector times matrix", "weight on the left"])
def test_pack_leaves_alone_what_it_has_no_kernel_for(case: str) -> None:
    if case == "weight on the left":
        left = weight(4, 8)
        graph = graph_of(lambda b, x: b.emit(op.matmul(left, x)), {"x": ((8, 3), "float32")})
    elif case == "half":
        graph = one_matmul((4, 8), weight(8, 16, dtype="float16"), "float16")
    elif case == "batched weight":
        graph = one_matmul((2, 4, 8), weight(2, 8, 16))
    else:
        graph = one_matmul((8,), weight(8, 16))
    assert pack_weights(graph.mod, state_of(graph)).same_as(graph.mod)


def test_pack_leaves_the_matrix_as_it_is_when_the_target_is_a_gpu() -> None:
    graph = one_matmul((4, 8), weight(8, 16))
    state = LoweringState(graph, resolve_target("cuda:sm_90a").target, LoweringOptions())
    assert pack_weights(graph.mod, state).same_as(graph.mod)


def test_the_task_is_a_matmul_over_the_packed_weight_and_the_weight_keeps_its_initialiser_name() -> None:
    graph = one_matmul((4, 32), weight(32, 96))
    lowered = lower(graph, LLVM)
    task = extract_tasks([lowered])[0]
    assert task.family == "matmul"
    assert '"k":32' in task.signature
    assert '"n":96' in task.signature
    assert [array.ndim for array in lowered.weights.values()] == [3]
    plain = lower(graph, LLVM, LoweringOptions(disabled_passes=frozenset({"pack_weights"})))
    assert [array.ndim for array in plain.weights.values()] == [2]
    assert extract_tasks([plain])[0].workload_hash != task.workload_hash
    assert "pack_weights" in {step.name for step in lowering_steps() if not step.required}
