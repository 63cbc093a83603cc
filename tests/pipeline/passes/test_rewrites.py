from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx
from tvm_ffi import structural_equal

from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.kit.ir import bindings_of, dtype_of, main_of
from relaxtune.pipeline.passes.layout.simplify_views import simplify_views
from relaxtune.pipeline.passes.layout.write_matmuls_transposed import write_matmuls_transposed
from relaxtune.pipeline.passes.merge_common_subexpressions import merge_common_subexpressions
from relaxtune.pipeline.passes.name_bindings import name_bindings
from relaxtune.pipeline.passes.precision.accumulate_in_float32 import accumulate_in_float32
from relaxtune.pipeline.passes.precision.compute_in_half_precision import compute_in_half_precision
from relaxtune.pipeline.passes.weights import fold_constants as fold_module
from relaxtune.pipeline.passes.weights.fold_constants import fold_constants
from tests.pipeline.passes.pass_cases import (
    LLVM,
    assert_agrees,
    graph_of,
    operators_of,
    run_lowered,
    run_module,
    small_model,
    state_of,
)

op = relax.op
c = relax.const
RNG = np.random.default_rng(0)
X = {"x": ((2, 3, 8), "float32")}


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def test_simplify_drops_operations_that_change_nothing() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        y = b.emit(op.reshape(x, (2, 3, 8)))
        y = b.emit(op.permute_dims(y, [0, 1, 2]))
        y = b.emit(op.broadcast_to(b.emit(op.astype(y, "float32")), (2, 3, 8)))
        return b.emit(op.tanh(y))

    graph = graph_of(build, X)
    assert operators_of(simplify_views(graph.mod, state_of(graph))) == ["tanh"]


def test_simplify_joins_chains_and_keeps_their_nodes() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        y = b.emit(op.reshape(b.emit(op.reshape(x, (6, 8))), (3, 2, 8)))
        y = b.emit(op.permute_dims(b.emit(op.permute_dims(y, [1, 2, 0])), [2, 0, 1]), name_hint="joined")
        return b.emit(op.tanh(y))

    graph = graph_of(build, X)
    state = state_of(graph)
    simplified = simplify_views(graph.mod, state)
    assert operators_of(simplified) == ["reshape", "permute_dims", "tanh"]
    assert len(state.sources["joined"]) == 2
    x = normal(2, 3, 8)
    assert_agrees(run_module(simplified, [x]), run_module(graph.mod, [x]), 0.0)


@pytest.mark.parametrize("sections", [(2, 5), 2])
def test_simplify_turns_splits_into_slices(sections: tuple[int, ...] | int) -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        parts = b.emit(op.split(x, sections, axis=-1))
        count = 2 if sections == 2 else 3
        return relax.Tuple([b.emit(op.tanh(b.emit(relax.TupleGetItem(parts, index)))) for index in range(count)])

    graph = graph_of(build, X)
    simplified = simplify_views(graph.mod, state_of(graph))
    assert "split" not in operators_of(simplified)
    x = normal(2, 3, 8)
    assert_agrees(run_module(simplified, [x]), run_module(graph.mod, [x]), 0.0)


def test_merge_computes_equal_operations_once_and_keeps_all_nodes() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        first = b.emit(op.tanh(b.emit(op.add(x, c(2.0)), name_hint="first")))
        second = b.emit(op.tanh(b.emit(op.add(x, c(2.0)), name_hint="second")))
        other = b.emit(op.tanh(b.emit(op.add(x, c(3.0)))))
        return b.emit(op.multiply(b.emit(op.add(first, second)), other))

    graph = graph_of(build, X)
    state = state_of(graph)
    merged = merge_common_subexpressions(graph.mod, state)
    assert sorted(operators_of(merged)) == ["add", "add", "add", "multiply", "tanh", "tanh"]
    assert state.sources["first"] == ("node_first", "node_second")
    x = normal(2, 3, 8)
    assert_agrees(run_module(merged, [x]), run_module(graph.mod, [x]), 1e-6)
    assert merge_common_subexpressions(merged, state).same_as(merged)


def test_transposed_matmul_replaces_the_copy_after_attention() -> None:
    def build(b: relax.BlockBuilder, p: relax.Var, v: relax.Var) -> relax.Expr:
        y = b.emit(op.astype(b.emit(op.matmul(p, v, "float32")), "float16"))
        return b.emit(op.tanh(b.emit(op.permute_dims(y, [0, 2, 1, 3]), name_hint="moved")))

    graph = graph_of(build, {"p": ((2, 3, 5, 5), "float16"), "v": ((2, 3, 5, 4), "float16")})
    state = state_of(graph)
    rewritten = write_matmuls_transposed(graph.mod, state)
    assert operators_of(rewritten) == ["call_tir", "astype", "tanh"]
    assert len(state.sources["moved"]) == 3
    arguments = [normal(2, 3, 5, 5, dtype="float16"), normal(2, 3, 5, 4, dtype="float16")]
    assert_agrees(run_module(rewritten, arguments), run_module(graph.mod, arguments), 1e-3)


@pytest.mark.parametrize("case", ["last axis moves", "batch broadcasts", "two readers"])
def test_transposed_matmul_is_left_alone_when_it_does_not_fit(case: str) -> None:
    def build(b: relax.BlockBuilder, p: relax.Var, v: relax.Var) -> relax.Expr:
        y = b.emit(op.matmul(p, v))
        moved = b.emit(op.permute_dims(y, [0, 1, 3, 2] if case == "last axis moves" else [0, 2, 1, 3]))
        return relax.Tuple([moved, y if case == "two readers" else moved])

    right = (1, 3, 5, 4) if case == "batch broadcasts" else (2, 3, 5, 4)
    graph = graph_of(build, {"p": ((2, 3, 5, 5), "float32"), "v": (right, "float32")})
    assert write_matmuls_transposed(graph.mod, state_of(graph)).same_as(graph.mod)


def test_fold_makes_constants_of_what_does_not_depend_on_inputs() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        mask = b.emit(op.astype(b.emit(op.greater(c(np.arange(8)), c(np.int64(3)))), "float32"))
        return b.emit(op.add(x, b.emit(op.multiply(mask, c(-1e4)))))

    graph = graph_of(build, X)
    state = state_of(graph)
    assert operators_of(fold_constants(graph.mod, state)) == ["add"]
    assert state.constants_folded == 3
    assert state.notes == []


def test_fold_leaves_a_large_result_in_the_graph_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_module, "FOLD_BYTES_MAX", 64)

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        small = b.emit(op.multiply(c(np.ones((1, 1, 8), "float32")), c(2.0)), name_hint="small")
        large = b.emit(op.broadcast_to(small, (2, 3, 8)), name_hint="large")
        return b.emit(op.add(x, b.emit(op.tanh(large))))

    graph = graph_of(build, X)
    state = state_of(graph)
    folded = fold_constants(graph.mod, state)
    assert operators_of(folded) == ["multiply", "broadcast_to", "tanh", "add"]
    assert len(main_of(folded).params) == 1
    assert state.notes == ["large is left in the graph: as a constant it would take 192 bytes, made of 32"]


def test_fold_hides_only_the_constants_of_the_large_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_module, "FOLD_BYTES_MAX", 64)

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        large = b.emit(op.broadcast_to(c(np.ones((1, 1, 8), "float32")), (2, 3, 8)))
        scale = b.emit(op.add(c(1.0), c(2.0)))
        return b.emit(op.multiply(b.emit(op.add(x, large)), scale))

    graph = graph_of(build, X)
    folded = fold_constants(graph.mod, state_of(graph))
    assert operators_of(folded) == ["broadcast_to", "add", "multiply"]
    assert len(main_of(folded).params) == 1
    x = normal(2, 3, 8)
    assert_agrees(run_module(folded, [x]), [(x + 1) * 3], 1e-6)


@pytest.mark.parametrize("name", ["bert-tiny", "llama-tiny", "t5-tiny"])
def test_fold_leaves_a_module_with_nothing_to_fold_as_tvm_would(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = import_model(small_model(name))
    expected = relax.transform.FoldConstant()(graph.mod)
    monkeypatch.setattr(relax.transform, "FoldConstant", None)
    folded = fold_constants(graph.mod, state_of(graph))
    assert structural_equal(folded, expected)


def test_fold_makes_constants_of_the_parts_of_a_split_constant() -> None:
    """A mixture's experts as an exporter splits them: each was cut out and rounded anew in every call."""
    weights = normal(2, 8, 4)

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        parts = b.emit(op.split(c(weights), 2, axis=0))
        first, second = (b.emit(op.squeeze(b.emit(relax.TupleGetItem(parts, place)), [0])) for place in range(2))
        return b.emit(op.add(b.emit(op.matmul(x, first)), b.emit(op.matmul(x, second))))

    graph = graph_of(build, X)
    folded = fold_constants(graph.mod, state_of(graph))
    assert operators_of(folded) == ["matmul", "matmul", "add"]
    x = normal(2, 3, 8)
    assert_agrees([*run_module(folded, [x])], [x @ weights[0] + x @ weights[1]], 1e-5)


def test_a_part_of_a_constant_that_is_infinite_times_0_is_no_number() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        parts = b.emit(op.split(c(np.array([np.inf, 1.0], "float32")), 2, axis=0))
        return b.emit(op.add(x, b.emit(op.multiply(b.emit(relax.TupleGetItem(parts, 0)), c(0.0)))))

    graph = graph_of(build, X)
    (got,) = run_lowered(lower(graph, LLVM), {"x": normal(2, 3, 8)})
    assert np.isnan(got).all()


def test_fold_makes_constants_of_what_follows_a_constant_with_a_name() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        named = b.emit(c(2.0))
        return b.emit(op.add(x, b.emit(op.multiply(named, named))))

    graph = graph_of(build, X)
    assert operators_of(fold_constants(graph.mod, state_of(graph))) == ["add"]


@pytest.mark.quick_cases("int8-float32", "uint8-float64", "int64-float32")
@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("target", ["int8", "uint8", "int16", "int32", "int64"])
def test_fold_casts_numbers_that_no_integer_has_as_onnx_runtime_does(source: str, target: str) -> None:
    """ONNX leaves infinities, NaN and what is too large open; ONNX Runtime does as the processor, and as NumPy."""
    numbers = [np.inf, -np.inf, np.nan, 1e20, -1e20, 300.0, -3.5]

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        folded = [b.emit(op.astype(b.emit(op.negative(c(one, source))), target)) for one in numbers]
        return relax.Tuple([x, *folded])

    graph = graph_of(build, X)
    folded = fold_constants(graph.mod, state_of(graph))
    assert operators_of(folded) == []
    _, *found = run_module(folded, [normal(2, 3, 8)])
    with np.errstate(all="ignore"):
        expected = [(-np.array(one, source)).astype(target) for one in numbers]
    assert [value.tolist() for value in found] == [value.tolist() for value in expected]


def test_accumulate_widens_sums_and_keeps_dtypes() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var, image: relax.Var) -> relax.Expr:
        y = b.emit(op.nn.softmax(b.emit(op.matmul(x, c(normal(8, 8, dtype="float16"), "float16")))))
        mean = b.emit(op.mean(y, [-1], keepdims=True))
        total = b.emit(op.sum(y, [-1]))
        kernel = c(normal(4, 3, 2, 2, dtype="float16"), "float16")
        return relax.Tuple([mean, total, b.emit(op.nn.conv2d(image, kernel, strides=2))])

    graph = graph_of(build, {"x": ((2, 3, 8), "float16"), "image": ((1, 3, 4, 4), "float16")})
    state = state_of(graph)
    widened = accumulate_in_float32(graph.mod, state)
    assert state.notes == ["5 operations accumulate in float32"]
    sums = ("matmul", "nn.softmax", "mean", "sum", "nn.conv2d")
    found = [
        b for b in bindings_of(main_of(widened)) if isinstance(b.value, relax.Call) and b.value.op.name[6:] in sums
    ]
    assert [dtype_of(binding.var) for binding in found] == ["float32"] * 5
    arguments = [normal(2, 3, 8, dtype="float16"), normal(1, 3, 4, 4, dtype="float16")]
    assert_agrees(run_module(widened, arguments), run_module(graph.mod, arguments), 2e-2)


def test_half_precision_stores_the_residual_stream_once_in_float16() -> None:
    weight = c(normal(8, 8))
    ones = c(np.ones(8, "float32"))

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        stream = b.emit(op.add(b.emit(op.matmul(x, weight)), x), name_hint="stream")
        norm = b.emit(op.nn.layer_norm(stream, ones, ones, axes=[-1]), name_hint="norm")
        y = b.emit(op.matmul(b.emit(op.reshape(norm, (6, 8))), weight))
        return b.emit(op.add(b.emit(op.reshape(y, (2, 3, 8))), stream))

    graph = graph_of(build, X)
    state = state_of(graph, precision="fp16")
    half = compute_in_half_precision(graph.mod, state)
    dtypes = {b.var.name: dtype_of(b.var) for b in bindings_of(main_of(half))}
    assert dtypes["norm__half"] == "float16"
    assert "norm" not in dtypes
    assert operators_of(half).count("nn.layer_norm") == 1
    assert dtype_of(main_of(half).body.body) == "float32"
    assert state.notes == ["2 matmuls and convolutions in float16"]
    x = normal(2, 3, 8)
    assert_agrees(run_module(half, [x]), run_module(graph.mod, [x]), 1e-2)


def test_half_precision_keeps_a_matmul_in_float32_when_its_weight_is_out_of_range() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return b.emit(op.matmul(x, c(np.full((8, 2), 1e5, "float32"))))

    graph = graph_of(build, X)
    state = state_of(graph, precision="fp16")
    assert compute_in_half_precision(graph.mod, state).same_as(graph.mod)
    assert "exceeds the range of float16" in state.notes[0]
    assert state.notes[1] == "no float32 matmul found"


def test_half_precision_rounds_every_kind_of_operand_before_its_views() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        y = b.emit(op.tanh(x))
        left = b.emit(op.squeeze(b.emit(op.expand_dims(b.emit(op.permute_dims(y, [0, 2, 1])), 1)), [1]))
        right = b.emit(op.broadcast_to(b.emit(op.reshape(y, (2, 1, 3, 8))), (2, 1, 3, 8)))
        right = b.emit(op.squeeze(right, [1]))
        product = b.emit(op.matmul(left, right))
        wide = b.emit(op.astype(b.emit(op.astype(product, "float16")), "float32"))
        return b.emit(op.matmul(wide, product))

    graph = graph_of(build, X)
    half = compute_in_half_precision(graph.mod, state_of(graph, precision="fp16"))
    operands = [
        dtype_of(arg)
        for b in bindings_of(main_of(half))
        if isinstance(b.value, relax.Call) and b.value.op.name == "relax.matmul"
        for arg in b.value.args
    ]
    assert operands == ["float16"] * 4
    x = normal(2, 3, 8)
    assert_agrees(run_module(half, [x]), run_module(graph.mod, [x]), 2e-2)


def test_name_bindings_renames_what_a_pass_could_generate_and_joins_copies() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        first = b.emit(op.tanh(x))
        assert first.name == "lv"
        return b.emit(op.tanh(first), name_hint="result_of_model")

    graph = graph_of(build, X)
    state = state_of(graph)
    state.sources.clear()
    named = name_bindings(graph.mod, state)
    names = [binding.var.name for binding in bindings_of(main_of(named))]
    assert names[:2] == ["n_lv", "result_of_model"]
    assert state.sources["n_lv"] == ("node_lv",)
    copy = names[2]
    assert state.sources[copy] == state.sources["result_of_model"]
    assert len(state.sources[copy]) == 2


def test_simplify_compares_symbolic_axes_by_identity() -> None:
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")

    def build(b: relax.BlockBuilder, x: relax.Var, y: relax.Var) -> relax.Expr:
        same = b.emit(op.reshape(x, relax.ShapeExpr([n, m])))
        other = b.emit(op.reshape(y, relax.ShapeExpr([n, m])))
        return b.emit(op.add(same, other))

    graph = graph_of(build, {"x": ((n, m), "float32"), "y": ((m, n), "float32")})
    assert operators_of(simplify_views(graph.mod, state_of(graph))) == ["reshape", "add"]
