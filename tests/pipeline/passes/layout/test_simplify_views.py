"""Axes that are merged, moved as one and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tvm import relax, tirx

from relaxtune.pipeline.passes.layout.simplify_views import simplify_views
from tests.pipeline.passes.pass_cases import graph_of, operators_of, run_module, state_of

OP = relax.op
B, S = tirx.Var("batch", "int64"), tirx.Var("length", "int64")
Shape = Sequence[tirx.Expr | int]


@pytest.mark.parametrize(
    ("shape", "merged", "axes", "apart", "moves"),
    [
        ((B, 4, S, 8), (B * 4, S, 8), [0, 2, 1], (B, 4, 8, S), ["permute_dims"]),
        ((2, 4, 6, 8), (8, 6, 8), [0, 2, 1], (2, 4, 8, 6), ["permute_dims"]),
        ((B, 4, S, 8), (B * 4, S * 8), [1, 0], (S, 8, B, 4), ["permute_dims"]),
        ((B, 4, S, 8), (B, 4, 1, S * 8), [3, 1, 2, 0], (S, 8, 4, B), ["permute_dims"]),
        # Taken apart in another way, and what was one axis before.
        ((2, 4, 6, 8), (8, 6, 8), [0, 2, 1], (4, 2, 8, 6), ["reshape", "permute_dims", "reshape"]),
        ((B, 4, S, 8), (B * 4, S, 8), [0, 2, 1], (4, B, 8, S), ["reshape", "permute_dims", "reshape"]),
        ((B, S, 32), (B, S, 4, 8), [0, 2, 1, 3], (B * 4, S, 8), ["reshape", "permute_dims", "reshape"]),
        ((B, 4, S, 8), (B * 4, S, 8), [0, 2, 1], (B * 4, 8 * S), ["reshape", "permute_dims", "reshape"]),
    ],
)
def test_axes_moved_as_one_are_a_transpose(
    shape: Shape, merged: Shape, axes: list[int], apart: Shape, moves: list[str]
) -> None:
    def case(_builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        moved = OP.permute_dims(OP.reshape(x, relax.ShapeExpr(list(merged))), axes)
        return OP.reshape(moved, relax.ShapeExpr(list(apart)))

    graph = graph_of(case, {"x": (shape, "float32")})
    mod = simplify_views(graph.mod, state_of(graph))
    assert operators_of(mod) == moves
    sizes = [size if isinstance(size, int) else {"batch": 3, "length": 5}[size.name] for size in shape]
    data = np.arange(np.prod(sizes), dtype="float32").reshape(sizes)
    (right,), (found,) = run_module(graph.mod, [data]), run_module(mod, [data])
    np.testing.assert_array_equal(found, right)


def test_a_transpose_before_joins_it() -> None:
    def case(_builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        heads = OP.permute_dims(x, [0, 2, 1, 3])
        moved = OP.permute_dims(OP.reshape(heads, relax.ShapeExpr([B * 4, S, 8])), [0, 2, 1])
        return OP.reshape(moved, relax.ShapeExpr([B, 4, 8, S]))

    graph = graph_of(case, {"x": ((B, S, 4, 8), "float32")})
    mod = simplify_views(graph.mod, state_of(graph))
    assert operators_of(mod) == ["permute_dims"]
    data = np.arange(3 * 5 * 32, dtype="float32").reshape(3, 5, 4, 8)
    np.testing.assert_array_equal(run_module(mod, [data])[0], data.transpose(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("size", "index", "operators"),
    [
        (S, 0, ["strided_slice", "squeeze"]),
        (7, 3, ["strided_slice", "squeeze"]),
        # Where the axis may end before the place, and outside it, the index is clipped.
        (S, 1, ["take"]),
        (7, 7, ["take"]),
        (0, 0, ["take"]),
    ],
)
def test_one_place_of_an_axis_is_a_slice_where_it_surely_is_inside(
    size: tirx.Expr | int, index: int, operators: list[str]
) -> None:
    def case(_builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        return OP.take(x, relax.const(index, "int64"), 1, mode="clip")

    graph = graph_of(case, {"x": ((B, size, 4), "float32")})
    mod = simplify_views(graph.mod, state_of(graph))
    assert operators_of(mod) == operators
    for length in (1, 2, 7) if size is S else (7,) if size == 7 else ():
        data = np.arange(2 * length * 4, dtype="float32").reshape(2, length, 4)
        np.testing.assert_array_equal(run_module(mod, [data])[0], data[:, min(index, length - 1)])
