"""Integers that grow evenly along each axis, and some that do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import main_of
from relaxtune.pipeline.passes.kit.sizes import Size
from tests.pipeline.passes.pass_cases import graph_of, run_module

OP = relax.op
BATCH, PAST = tirx.Var("batch", "int64"), tirx.Var("past", "int64")


def number(value: int, dtype: str = "int64") -> relax.Expr:
    return relax.const(np.array([value]), dtype)


def places(start: tirx.Expr | int = 0, count: tirx.Expr | int = PAST + 1) -> relax.Expr:
    return OP.arange(start, start + count, 1, "int64")


def size(value: tirx.Expr) -> relax.Expr:
    return OP.shape_to_tensor(relax.ShapeExpr([value]))


def of_each_row(data: relax.Expr) -> relax.Expr:
    """Return one number for each row of the batch, [batch, 1]."""
    flat = OP.broadcast_to(OP.astype(data, "int32"), relax.ShapeExpr([BATCH]))
    return OP.reshape(OP.astype(flat, "int64"), relax.ShapeExpr([BATCH, 1]))


def placed_in_cache(counts: relax.Expr) -> relax.Expr:
    """Return where ONNX Runtime's attention finds key j of a row of `counts` past keys, one new one behind them."""
    behind = OP.subtract(OP.expand_dims(places(), [0]), counts)
    moved = OP.minimum(OP.add(behind, places(PAST, 1)), places(PAST, 1))
    return OP.where(OP.less(behind, number(0)), OP.expand_dims(places(), [0]), moved)


COUNTS: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "places": lambda _: places(),
    "from a size": lambda _: places(PAST),
    "in steps": lambda _: OP.arange(0, 3 * PAST, 3, "int64"),
    "a size": lambda _: size(PAST),
    "a size in each row": lambda _: of_each_row(size(PAST + 1)),
    "one less again": lambda _: OP.subtract(of_each_row(size(PAST + 1)), places(1, 1)),
    "rows times places": lambda _: OP.add(OP.multiply(OP.expand_dims(places(0, BATCH), 1), size(PAST + 1)), places()),
    "by a size on the left": lambda _: OP.multiply(size(PAST), places()),
    "taken apart": lambda _: OP.reshape(places(0, BATCH * PAST), relax.ShapeExpr([BATCH, PAST])),
    "backwards": lambda _: OP.subtract(number(5), places()),
    "a table": lambda _: relax.const(np.arange(12).reshape(3, 4) * 2 + 1, "int64"),
    "nothing of what is given": lambda x: OP.add(OP.multiply(x, number(0)), OP.expand_dims(places(), 0)),
    "the lower": lambda _: OP.minimum(places(), places(PAST, 1)),
    "the higher": lambda _: OP.maximum(places(), places(PAST, 1)),
    "one of two equal ones": lambda x: OP.where(OP.less(x, number(0)), places(), OP.add(places(1), number(-1))),
    "a known choice": lambda _: OP.where(OP.less(places(), number(0)), number(7), places()),
    "in a cache": lambda _: placed_in_cache(of_each_row(size(PAST))),
}
OTHERS: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "given": lambda x: x,
    "products of places": lambda _: OP.multiply(places(), places()),
    "rows and places merged": lambda _: OP.reshape(
        OP.add(OP.expand_dims(places(0, BATCH), 1), places()), relax.ShapeExpr([BATCH * (PAST + 1)])
    ),
    "a table that jumps": lambda _: relax.const(np.array([0, 1, 3]), "int64"),
    "the lower at some sizes": lambda _: OP.minimum(places(), number(3)),
    "the higher at some sizes": lambda _: OP.maximum(places(), number(3)),
    "one of two": lambda x: OP.where(OP.less(x, number(0)), places(), places(1)),
    "floats": lambda _: OP.astype(places(), "float32"),
    "rounded": lambda _: OP.astype(OP.astype(places(), "float16"), "int64"),
    "in a cache of other rows": lambda x: placed_in_cache(OP.reshape(x, relax.ShapeExpr([BATCH, 1]))),
}


def value_of(one: Size, sizes: dict[str, int]) -> int:
    if isinstance(one, int):
        return one
    return sum(factor * int(np.prod([sizes[name] for name in names])) for names, factor in one.terms)


@pytest.mark.parametrize("name", [*COUNTS, *OTHERS])
def test_counts_are_the_integers_at_all_sizes(name: str) -> None:
    inputs = {"x": ((BATCH, 1), "int64"), "past": ((PAST,), "float32")}
    graph = graph_of(lambda _builder, x, _past: (COUNTS | OTHERS)[name](x), inputs)
    count = Graph(graph.mod).known.count_of(main_of(graph.mod).body.body)
    assert (count is None) == (name in OTHERS)
    if count is None:
        return
    for batch, past in ((1, 1), (2, 4), (3, 7)):
        sizes = {"batch": batch, "past": past}
        (found,) = run_module(graph.mod, [np.full((batch, 1), 3), np.zeros(past, "float32")])
        expected = np.full(found.shape, value_of(count.start, sizes))
        for grid, step in zip(np.indices(found.shape), count.steps, strict=True):
            expected += grid * value_of(step, sizes)
        np.testing.assert_array_equal(found, expected)
