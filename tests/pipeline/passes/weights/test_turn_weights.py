from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.ir import bindings_of, constants_in, main_of, static_shape
from relaxtune.pipeline.passes.weights.turn_weights import is_turned, turn_weights
from relaxtune.schedules.registry import list_candidates
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, graph_of, operators_of, run_module, state_of

op = relax.op
CUDA = resolve_target("cuda:sm_90a").target
RNG = np.random.default_rng(0)
X = {"x": ((2, 3, 16), "float16")}


def graph_with(columns: int):
    weight = RNG.standard_normal((16, columns)).astype("float16")

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return b.emit(op.matmul(x, relax.const(weight, "float16"), out_dtype="float32"), name_hint="logits")

    return graph_of(build, X)


def test_a_weight_of_an_odd_width_is_kept_turned_for_the_template() -> None:
    graph = graph_with(21)
    made = turn_weights(graph.mod, replace(state_of(graph), target=CUDA))
    (weight,) = constants_in(next(bindings_of(main_of(made))).value)
    assert static_shape(weight) == (21, 16)
    (name,) = [var for var in made.get_global_vars() if var.name_hint == "matmul"]
    found = recognise_matmul(made[name])
    assert isinstance(found, MatmulFunction)
    assert found.b_transposed
    x = RNG.standard_normal((2, 3, 16)).astype("float16")
    assert_agrees(run_module(made, [x]), run_module(graph.mod, [x]), 1e-2)


@pytest.mark.parametrize(("columns", "target"), [(24, CUDA), (21, LLVM)])
def test_aligned_weights_and_cpus_are_left_alone(columns: int, target: object) -> None:
    graph = graph_with(columns)
    assert operators_of(turn_weights(graph.mod, replace(state_of(graph), target=target))) == ["matmul"]


@pytest.mark.parametrize(
    ("rows", "arch", "turned"),
    [(16, "sm_80", True), (16, "sm_120", True), (17, "sm_80", False), (None, "sm_80", False), (16, "sm_90a", False)],
)
def test_weights_of_few_rows_are_kept_turned_where_their_template_reads_them(
    rows: int | None, arch: str, turned: bool
) -> None:
    weight = RNG.standard_normal((32, 24)).astype("float16")

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return b.emit(op.matmul(x, relax.const(weight), out_dtype="float32"), name_hint="y")

    graph = graph_of(build, {"x": ((1, tirx.Var("rows", "int64") if rows is None else rows, 32), "float16")})
    target = resolve_target(f"cuda:{arch}")
    made = turn_weights(graph.mod, replace(state_of(graph), target=target.target))
    if rows is None or not turned:
        assert operators_of(made) == ["matmul"]
        return
    (name,) = [var for var in made.get_global_vars() if var.name_hint == "matmul"]
    assert list_candidates(made[name], target)[0][0].template == "gemv"
    x = RNG.standard_normal((1, rows, 32)).astype("float16")
    assert_agrees(run_module(made, [x]), run_module(graph.mod, [x]), 1e-2)


@pytest.mark.parametrize(("length", "turned"), [(32, True), (36, False)])
def test_weights_whose_rows_cannot_be_loaded_are_not_turned_by_passes_that_fuse(length: int, turned: bool) -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return b.emit(op.abs(x), name_hint="y")

    graph = graph_of(build, {"x": ((1, 4, length), "float16")})
    state = replace(state_of(graph), target=resolve_target("cuda:sm_80").target)
    assert is_turned(next(iter(main_of(graph.mod).params)), state) == turned


def integer_graph(rows: int, x: str = "int8"):
    weight = RNG.integers(-128, 128, (rows, 24)).astype("int8")

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return b.emit(op.matmul(x, relax.const(weight), out_dtype="int32"), name_hint="sums")

    return graph_of(build, {"x": ((2, 3, rows), x)})


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("x", ["int8", "uint8"])
def test_integer_weights_are_kept_turned_for_tensor_cores(x: str, arch: str) -> None:
    graph, target = integer_graph(32, x), resolve_target(f"cuda:{arch}")
    made = turn_weights(graph.mod, replace(state_of(graph), target=target.target))
    (weight,) = constants_in(next(bindings_of(main_of(made))).value)
    assert static_shape(weight) == (24, 32)
    (name,) = [var for var in made.get_global_vars() if var.name_hint == "matmul"]
    found, refused = list_candidates(made[name], target)
    assert found, refused
    assert found[0].template == ("gemm_sm90" if arch == "sm_90a" else "gemm_sm80")
    values = RNG.integers(0, 128, (2, 3, 32)).astype(x)
    assert_agrees(run_module(made, [values]), run_module(graph.mod, [values]), 0)


@pytest.mark.parametrize(
    ("rows", "target"),
    [(24, CUDA), (32, resolve_target("cuda:sm_75").target), (32, LLVM)],
    ids=["rows", "sm_75", "cpu"],
)
def test_integer_weights_that_no_template_reads_turned_are_left_alone(rows: int, target: object) -> None:
    graph = integer_graph(rows)
    assert operators_of(turn_weights(graph.mod, replace(state_of(graph), target=target))) == ["matmul"]
