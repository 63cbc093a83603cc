"""Conditions before they are broadcast, and what stays behind a broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of
from relaxtune.pipeline.passes.layout.broadcast_late import broadcast_late
from tests.pipeline.passes.pass_cases import graph_of, operators_of, run_module, state_of

OP = relax.op
B, S, T = (tirx.Var(name, "int64") for name in ("batch", "length", "keys"))
SIZES = {"batch": 3, "length": 4, "keys": 5}
WIDE = (B, 2, S, T)
Case = Callable[[relax.BlockBuilder, relax.Expr, relax.Expr], relax.Expr]


def wide(x: relax.Expr, shape: Sequence[tirx.Expr | int] = WIDE) -> relax.Expr:
    return OP.broadcast_to(x, relax.ShapeExpr(list(shape)))


def number(value: float) -> relax.Expr:
    return relax.const(value, "float32")


def seen(x: relax.Expr) -> relax.Expr:
    return OP.sum(OP.astype(x, "float32"), axis=[-1], keepdims=True)


# What is made of a mask [batch, 1, 1, keys] and of scores [batch, 2, length, keys] -> operators left, in order.
CASES: dict[str, tuple[Case, list[str]]] = {
    "rows without a key": (
        lambda _, mask, scores: OP.where(OP.less(seen(wide(mask)), number(1.0)), number(0.0), scores),
        ["astype", "sum", "less", "where"],
    ),
    "broadcast twice": (
        lambda _, mask, scores: OP.less(seen(wide(wide(mask, (B, 1, S, T)))), seen(OP.greater(scores, number(0.0)))),
        ["greater", "astype", "sum", "astype", "sum", "less"],
    ),
    "a result of its own": (lambda _, mask, scores: OP.logical_not(wide(mask)), ["logical_not", "broadcast_to"]),
    "hidden by a number": (
        lambda _, mask, scores: OP.add(
            scores,
            OP.multiply(OP.subtract(number(1.0), OP.astype(wide(mask), "float32")), number(-9.0)),
        ),
        ["astype", "subtract", "multiply", "broadcast_to", "add"],
    ),
    "axes moved": (
        lambda _, mask, scores: OP.expand_dims(OP.permute_dims(wide(mask), [1, 0, 3, 2]), [0]),
        ["permute_dims", "expand_dims", "broadcast_to"],
    ),
    "axes in front": (
        lambda _, mask, scores: OP.logical_or(wide(OP.squeeze(mask, [1, 2]), (2, B, T)), OP.squeeze(mask, [1, 2])),
        ["squeeze", "squeeze", "logical_or", "broadcast_to"],
    ),
    "a sum of copies": (
        lambda _, mask, scores: OP.sum(OP.astype(wide(mask), "float32"), axis=[2], keepdims=True),
        ["astype", "broadcast_to", "sum"],
    ),
    "axes left out": (
        lambda _, mask, scores: OP.sum(OP.astype(wide(mask), "float32"), axis=[3]),
        ["astype", "broadcast_to", "sum"],
    ),
    "other axes than the mask has": (
        lambda _, mask, scores: OP.expand_dims(wide(OP.squeeze(mask, [1, 2]), (2, B, T)), [0]),
        ["squeeze", "broadcast_to", "expand_dims"],
    ),
    "floats": (lambda _, mask, scores: OP.exp(wide(OP.astype(mask, "float32"))), ["astype", "broadcast_to", "exp"]),
}


@pytest.mark.parametrize("name", CASES)
def test_conditions_are_computed_once(name: str) -> None:
    build, operators = CASES[name]
    graph = graph_of(build, {"mask": ((B, 1, 1, T), "bool"), "scores": (WIDE, "float32")})
    mod = broadcast_late(graph.mod, state_of(graph))
    left = operators_of(mod)
    assert sorted(left) == sorted(operators)
    assert left[-1] == operators[-1]
    rng = np.random.default_rng(0)
    batch, length, keys = SIZES.values()
    mask = rng.integers(0, 2, (batch, 1, 1, keys)).astype(bool)
    mask[1] = False
    feeds = [mask, rng.standard_normal((batch, 2, length, keys)).astype("float32")]
    (right,), (found,) = run_module(graph.mod, feeds), run_module(mod, feeds)
    np.testing.assert_array_equal(found, right)


def test_what_is_computed_once_stands_for_the_same_nodes() -> None:
    graph = graph_of(
        lambda builder, mask: builder.emit(OP.logical_not(wide(mask)), name_hint="hidden"),
        {"mask": ((B, 1, 1, T), "bool")},
    )
    state = state_of(graph)
    names = [binding.var.name for binding in bindings_of(main_of(broadcast_late(graph.mod, state)))]
    once = next(name for name in names if name.endswith("__once"))
    assert state.sources[once] == state.sources[once.removesuffix("__once")]
