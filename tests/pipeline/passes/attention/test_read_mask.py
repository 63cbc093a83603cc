"""A causal mask of symbolic lengths is a comparison of positions, which no constant shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.attention.read_mask import MaskReader
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.sizes import size_of

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
    ],
    ids=["<=", ">= turned", "not >", "not < turned", "< the next", "< and 1", "behind caches"],
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
