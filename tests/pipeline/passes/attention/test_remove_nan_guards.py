from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.passes.attention.remove_nan_guards import remove_nan_guards
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, graph_of, operators_of, run_module, state_of

MIN32 = float(np.finfo(np.float32).min)
MIN16 = float(np.finfo(np.float16).min)
Masked = Callable[[relax.BlockBuilder, relax.Expr, relax.Var], relax.Expr]


def causal(fill: float, first_row: float | None = None) -> np.ndarray:
    mask = np.where(np.tril(np.ones((4, 4), bool)), 0.0, fill).astype("float32")
    if first_row is not None:
        mask[0] = first_row
    return mask


def guarded(masked: Masked, dtype: str = "float32", mask_dtype: str = "bool") -> ImportedGraph:
    """Return `where(isnan(s), 0, s)` for `s = softmax(masked(q @ k))`."""

    def build(builder: relax.BlockBuilder, q: relax.Var, k: relax.Var, mask: relax.Var) -> relax.Expr:
        scores = masked(builder, builder.emit(relax.op.matmul(q, k)), mask)
        s = builder.emit(relax.op.nn.softmax(scores))
        nan = builder.emit(relax.op.isnan(s))
        s = builder.emit(relax.op.where(nan, relax.const(0.0, dtype), s))
        return builder.emit(relax.op.matmul(s, s))

    return graph_of(build, {"q": ((4, 4), dtype), "k": ((4, 4), dtype), "mask": ((1, 4), mask_dtype)})


def add_constant(array: np.ndarray) -> Masked:
    return lambda builder, scores, _: builder.emit(relax.op.add(scores, relax.const(array, str(array.dtype))))


def select(fill: float, dtype: str = "float32") -> Masked:
    def masked(builder: relax.BlockBuilder, scores: relax.Expr, mask: relax.Var) -> relax.Expr:
        return builder.emit(relax.op.where(mask, scores, relax.const(fill, dtype)))

    return masked


def add_selected(fill: float, dtype: str = "float32") -> Masked:
    """A score plus a mask that the inputs decide."""

    def masked(builder: relax.BlockBuilder, scores: relax.Expr, mask: relax.Var) -> relax.Expr:
        additive = builder.emit(relax.op.where(mask, relax.const(0.0, dtype), relax.const(fill, dtype)))
        return builder.emit(relax.op.add(scores, additive))

    return masked


@pytest.mark.parametrize(
    "masked",
    [
        add_constant(causal(-np.inf)),
        add_constant(causal(MIN32)),
        select(MIN32),
        add_selected(MIN32),
        add_selected(-1e4),
    ],
    ids=["causal -inf", "causal minimum", "where minimum", "dynamic minimum", "dynamic -1e4"],
)
def test_guard_is_removed_when_each_row_has_a_finite_score(masked: Masked) -> None:
    graph = guarded(masked)
    state = state_of(graph)
    removed = remove_nan_guards(graph.mod, state)
    assert "isnan" not in operators_of(removed)
    assert state.notes == ["1 guards removed"]
    rng = np.random.default_rng(0)
    arguments = [*rng.standard_normal((2, 4, 4)).astype("float32"), np.array([[True, True, False, False]])]
    assert_agrees(run_module(removed, arguments, LLVM), run_module(graph.mod, arguments, LLVM), 1e-6)


@pytest.mark.parametrize(
    ("masked", "dtype", "mask_dtype", "reason"),
    [
        (add_constant(causal(-np.inf, -np.inf)), "float32", "bool", "may be -inf all over"),
        (add_constant(causal(0.0, np.nan)), "float32", "bool", "could not be bounded"),
        (select(-np.inf), "float32", "bool", "may be -inf all over"),
        (add_selected(-np.inf), "float32", "bool", "may be -inf all over"),
        (add_selected(MIN16, "float16"), "float16", "bool", "may be -inf all over"),
        (lambda b, s, m: b.emit(relax.op.add(s, m)), "float32", "float32", "could not be bounded"),
        (lambda b, s, m: b.emit(relax.op.divide(s, relax.const(0.0))), "float32", "bool", "could not be bounded"),
        (lambda b, s, m: b.emit(relax.op.subtract(s, m)), "float32", "float32", "could not be bounded"),
    ],
    ids=["row -inf", "nan", "where -inf", "dynamic -inf", "fp16 minimum", "float mask", "divide by 0", "minus input"],
)
def test_guard_is_kept_with_a_reason_when_a_row_may_be_nan(
    masked: Masked, dtype: str, mask_dtype: str, reason: str
) -> None:
    graph = guarded(masked, dtype, mask_dtype)
    state = state_of(graph)
    assert remove_nan_guards(graph.mod, state).same_as(graph.mod)
    assert len(state.notes) == 1
    assert reason in state.notes[0]


def test_other_selections_stay_when_they_are_not_a_guard() -> None:
    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        s = builder.emit(relax.op.nn.softmax(x))
        other = builder.emit(relax.op.isnan(x))
        return builder.emit(relax.op.where(other, relax.const(0.0), s))

    graph = graph_of(build, {"x": ((2, 4), "float32")})
    state = state_of(graph)
    assert remove_nan_guards(graph.mod, state).same_as(graph.mod)
    assert state.notes == []


def test_guard_is_removed_when_it_is_the_result_of_main() -> None:
    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        scores = builder.emit(relax.op.matmul(x, x))
        s = builder.emit(relax.op.astype(builder.emit(relax.op.nn.softmax(scores)), "float16"))
        return relax.op.where(builder.emit(relax.op.isnan(s)), relax.const(0.0, "float16"), s)

    graph = graph_of(build, {"x": ((4, 4), "float32")})
    removed = remove_nan_guards(graph.mod, state_of(graph))
    assert operators_of(removed) == ["matmul", "nn.softmax", "astype"]
    x = np.eye(4, dtype="float32")
    assert_agrees(run_module(removed, [x], LLVM), run_module(graph.mod, [x], LLVM), 1e-6)
