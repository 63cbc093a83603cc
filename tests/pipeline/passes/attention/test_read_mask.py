"""Masks of symbolic lengths are no constants: a causal one compares positions, one that hides nothing is filled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.attention.read_mask import MaskReader
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.sizes import Size, size_of

NEW, PAST = tirx.Var("new", "int64"), tirx.Var("past", "int64")
op = relax.op
Positions = Callable[[tvm.ir.Expr, tvm.ir.Expr], tvm.ir.Expr]


def is_causal(
    compare: Positions,
    *,
    first_query: object = 0,
    keys: tirx.Expr = NEW,
    first_key: int = 0,
    negated: bool = False,
) -> bool:
    """Return whether a comparison of the positions of keys [1, keys] and of queries [new, 1] is read as causal."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((NEW, keys), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            query = builder.emit(op.arange(first_query, first_query + NEW, 1, "int64"))
            key = builder.emit(op.arange(first_key, first_key + keys, 1, "int64"))
            rows, columns = builder.emit(op.expand_dims(query, 1)), builder.emit(op.expand_dims(key, 0))
            seen = builder.emit(compare(columns, rows))
            result = builder.emit_output(op.where(seen, x, relax.const(-1e9, "float32")))
        builder.emit_func_output(result)
    graph = Graph(builder.get())
    sizes = [size_of(size) for size in (NEW, keys)]
    mask = MaskReader(graph, sizes[0], sizes[1]).condition(  # type: ignore[arg-type]
        next(b.var for b in graph.bindings if b.var.same_as(seen) or b.var.name == seen.name),
        negated=negated,
        fill=-1e9,
    )
    assert mask.causal == (not mask.conditions)
    return mask.causal


def of_each_row(query: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return positions [new, 1] as those of the rows of a batch, [2, new, 1]."""
    rows = op.broadcast_to(op.reshape(query, relax.ShapeExpr([1, NEW])), relax.ShapeExpr([2, NEW]))
    return op.expand_dims(rows, 2)


@pytest.mark.parametrize(
    ("compare", "changes"),
    [
        (op.less_equal, {}),
        (lambda key, query: op.greater_equal(query, key), {}),
        (op.greater, {"negated": True}),
        (lambda key, query: op.less(query, key), {"negated": True}),
        (op.less, {"first_query": 1}),
        (lambda key, query: op.less(key, op.add(query, relax.const(1, "int64"))), {}),
        (op.less_equal, {"first_query": PAST, "keys": NEW + PAST}),
        (lambda key, query: op.less_equal(key, of_each_row(query)), {}),
    ],
    ids=["<=", ">= turned", "not >", "not < turned", "< the next", "< and 1", "behind caches", "for each row"],
)
def test_comparison_of_positions_is_causal(compare: Positions, changes: dict[str, object]) -> None:
    assert is_causal(compare, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compare", "changes"),
    [
        (op.less, {}),
        (op.greater_equal, {}),
        (op.less_equal, {"negated": True}),
        (op.less_equal, {"first_query": 1}),
        (op.less_equal, {"first_key": 1}),
        (op.less_equal, {"keys": NEW + PAST}),
        (op.equal, {}),
        (lambda key, query: op.less_equal(query, query), {}),
    ],
    ids=["<", ">=", "not <=", "one more", "one fewer", "caches not counted", "itself", "queries alone"],
)
def test_other_comparisons_stay_conditions(compare: Positions, changes: dict[str, object]) -> None:
    assert not is_causal(compare, **changes)  # type: ignore[arg-type]


FULL = op.full((1, 1, NEW, PAST), relax.const(1, "int64"))
ZERO, ONE = relax.const(0, "int64"), relax.const(1.0, "float32")
MASKED = relax.const(-1e9, "float32")


@pytest.mark.parametrize(
    ("expr", "negated", "kept"),
    [
        (op.full((1, 1, NEW, PAST), relax.const(True, "bool")), False, True),
        (op.full((1, 1, NEW, PAST), relax.const(False, "bool")), True, True),
        (op.full((1, 1, NEW, PAST), relax.const(False, "bool")), False, False),
        (op.not_equal(FULL, ZERO), False, True),
        (op.equal(FULL, ZERO), False, False),
        (op.equal(FULL, ZERO), True, True),
        (op.astype(op.broadcast_to(op.ones((1, 1, 1, PAST), "int64"), (1, 1, NEW, PAST)), "bool"), False, True),
        (op.astype(op.astype(op.full((1, 1, NEW, PAST), relax.const(0.5, "float32")), "int64"), "bool"), False, False),
        (op.logical_and(op.less(FULL, relax.const(2, "int64")), op.greater(FULL, ZERO)), False, True),
    ],
)
def test_condition_that_holds_everywhere_is_no_mask_when_lengths_are_symbolic(
    expr: relax.Call, negated: bool, kept: bool
) -> None:
    graph, mask = graph_of(expr)
    found = MaskReader(graph, *plain_sizes()).condition(mask, negated=negated, fill=-1e9)
    assert (found.conditions == ()) == kept
    assert not found.causal


@pytest.mark.parametrize(
    ("expr", "kept"),
    [
        (op.multiply(op.subtract(ONE, op.astype(FULL, "float32")), MASKED), True),
        (op.where(op.astype(FULL, "bool"), relax.const(0.0, "float32"), MASKED), True),
        (op.where(op.astype(FULL, "bool"), ONE, MASKED), False),
        (op.multiply(op.astype(FULL, "float32"), MASKED), False),
    ],
)
def test_zeros_that_are_added_are_no_mask_when_lengths_are_symbolic(expr: relax.Call, kept: bool) -> None:
    graph, mask = graph_of(expr)
    found = MaskReader(graph, *plain_sizes()).addend(mask)
    assert (found.conditions == () and found.addends == ()) == kept


@pytest.mark.parametrize("least", [MASKED, op.broadcast_to(MASKED, relax.ShapeExpr([1, NEW, NEW]))])
def test_a_number_hides_keys_in_any_shape(least: relax.Expr) -> None:
    places = op.arange(0, NEW, 1, "int64")
    seen = op.less_equal(op.expand_dims(places, 0), op.expand_dims(places, 1))
    graph, mask = graph_of(op.where(seen, relax.const(0.0, "float32"), least))
    length = plain_sizes()[0]
    found = MaskReader(graph, length, length).addend(mask)
    assert (found.causal, found.conditions, found.addends) == (True, (), ())


def graph_of(expr: relax.Call) -> tuple[Graph, tvm.ir.Expr]:
    """Return a graph that computes an expression, operator by operator, and the variable of its value."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((NEW, PAST), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(expr))
        builder.emit_func_output(result)
    graph = Graph(builder.get())
    return graph, graph.bindings[-1].var


def plain_sizes() -> tuple[Size, Size]:
    queries, keys = size_of(NEW), size_of(PAST)
    assert queries is not None
    assert keys is not None
    return queries, keys
