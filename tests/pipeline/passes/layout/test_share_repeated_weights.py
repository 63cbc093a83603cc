"""Products by weights that each batch row repeats, and near misses of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax, tirx

from relaxtune.pipeline.passes.layout.share_repeated_weights import share_repeated_weights
from tests.pipeline.passes.pass_cases import graph_of, operators_of, run_module, state_of

OP = relax.op
BATCH, ROWS = tirx.Var("batch", "int64"), tirx.Var("rows", "int64")
WEIGHT = np.random.default_rng(0).standard_normal((1, 2, 1, 3, 4)).astype("float32")
Case = Callable[[relax.BlockBuilder, tirx.Expr], relax.Expr]


def repeated(builder: relax.BlockBuilder, shape: tuple[tirx.Expr | int, ...]) -> relax.Expr:
    return builder.emit(OP.broadcast_to(relax.const(WEIGHT), relax.ShapeExpr(list(shape))))


def by_head(builder: relax.BlockBuilder, batch: tirx.Expr) -> relax.Expr:
    """Return what DeBERTa writes: the weights of a head, for each batch row."""
    return OP.reshape(repeated(builder, (batch, 2, 1, 3, 4)), relax.ShapeExpr([batch * 2, 3, 4]))


def turned(builder: relax.BlockBuilder, batch: tirx.Expr) -> relax.Expr:
    flat = OP.reshape(repeated(builder, (batch, 2, 1, 3, 4)), relax.ShapeExpr([batch * 2, 4, 3]))
    return OP.permute_dims(builder.emit(flat), [0, 2, 1])


def copies_of_heads(builder: relax.BlockBuilder, batch: tirx.Expr) -> relax.Expr:
    """Return weights of which each head's copies follow one another: not those of a batch row."""
    moved = OP.permute_dims(repeated(builder, (batch, 2, 1, 3, 4)), [1, 0, 2, 3, 4])
    return OP.reshape(builder.emit(moved), relax.ShapeExpr([batch * 2, 3, 4]))


@pytest.mark.parametrize(("case", "shared"), [(by_head, True), (turned, True), (copies_of_heads, False)])
def test_weights_that_a_batch_repeats_are_multiplied_by_once(case: Case, shared: bool) -> None:
    graph = graph_of(
        lambda builder, _, x: OP.matmul(x, builder.emit(case(builder, BATCH))),
        {"row": ((BATCH, ROWS), "float32"), "x": ((BATCH * 2, ROWS, 3), "float32")},
    )
    mod = share_repeated_weights(graph.mod, state_of(graph))
    assert ("broadcast_to" not in operators_of(mod)) == shared
    assert shared or mod.same_as(graph.mod)
    for batch, rows in ((1, 5), (3, 2)):
        x = np.random.default_rng(1).standard_normal((2 * batch, rows, 3)).astype("float32")
        feeds = [np.zeros((batch, rows), "float32"), x]
        (right,), (found,) = run_module(graph.mod, feeds), run_module(mod, feeds)
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6)
