"""From a softmax back to the product of queries and keys: scales, masks and biases on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import either_way, is_op, number_of, numbers_beside
from relaxtune.pipeline.passes.kit.known_values import MASKED
from relaxtune.pipeline.passes.kit.sizes import Shape, sizes_of

_DEPTH_MAX = 32


class NotAttentionError(Exception):
    """Why a softmax is not that of an attention which a kernel can make."""


@dataclass(frozen=True)
class ScoreStep:
    """A change of scores of one shape between their product and the softmax."""

    # "add": `expr` times `factor` is added. "where": where `expr` is false a score becomes `fill`; "where_not": where
    # it is true.
    kind: Literal["add", "where", "where_not"]
    expr: tvm.ir.Expr  # Broadcasts to `shape`.
    shape: Shape
    factor: float = 1.0
    fill: float = 0.0


@dataclass(frozen=True)
class Scores:
    """`scale * product`, then the steps, each a mask or a bias, so that their order does not matter.

    `path` are the variables from the product to the softmax's argument.
    """

    product: relax.Var
    scale: float
    steps: tuple[ScoreStep, ...] = ()
    path: tuple[relax.Var, ...] = ()


def scores_of(expr: tvm.ir.Expr, graph: Graph, factor: float = 1.0, depth: int = 0) -> Scores:
    """Return how scores, which are multiplied by `factor` later on, are made of a product of two activations.

    Raises `NotAttentionError`: it is not, or not in a form that is known.
    """
    value = graph.value(expr)
    if not isinstance(value, relax.Call) or depth == _DEPTH_MAX:
        raise NotAttentionError("its scores are made of no matmul")
    if is_op(value, "matmul"):
        if not all(isinstance(arg, relax.Var) for arg in value.args):
            raise NotAttentionError("its scores are a product with a constant")
        return Scores(expr, factor, path=(expr,))
    found = _step(value, graph, factor, depth + 1)
    return replace(found, path=(*found.path, expr))


def _step(value: relax.Call, graph: Graph, factor: float, depth: int) -> Scores:
    if is_op(value, "astype") or (is_op(value, "reshape", "expand_dims", "squeeze") and _keeps_planes(value)):
        return scores_of(value.args[0], graph, factor, depth)
    if is_op(value, "multiply", "divide"):
        return _scaled(value, graph, factor, depth)
    if is_op(value, "where"):
        return _masked(value, graph, factor, depth)
    if is_op(value, "add", "subtract"):
        return _biased(value, graph, factor, depth)
    if is_op(value, "maximum"):
        for scores, floor in numbers_beside(value):
            if floor * factor <= MASKED:
                return scores_of(scores, graph, factor, depth)
    operator = value.op.name if isinstance(value.op, tvm.ir.Op) else "a call"
    raise NotAttentionError(f"its scores go through {operator}")


def _scaled(value: relax.Call, graph: Graph, factor: float, depth: int) -> Scores:
    for scores, by in numbers_beside(value):
        if is_op(value, "multiply"):
            return scores_of(scores, graph, factor * by, depth)
        if by:
            return scores_of(scores, graph, factor / by, depth)
    how = "divided" if is_op(value, "divide") else "multiplied"
    raise NotAttentionError(f"its scores are {how} by a tensor")


def _masked(value: relax.Call, graph: Graph, factor: float, depth: int) -> Scores:
    condition, chosen, other = value.args
    if (fill := number_of(other, value)) is not None:
        step = ScoreStep("where", condition, _shape(value), fill=fill * factor)
        scores = chosen
    elif (fill := number_of(chosen, value)) is not None:
        step = ScoreStep("where_not", condition, _shape(value), fill=fill * factor)
        scores = other
    else:
        raise NotAttentionError("its mask puts a tensor in the place of scores")
    if step.fill > MASKED:
        raise NotAttentionError(f"its mask puts {step.fill:g} in the place of scores, expected {MASKED:g} or less")
    return _with(step, scores, graph, factor, depth)


def _biased(value: relax.Call, graph: Graph, factor: float, depth: int) -> Scores:
    forms = either_way(value) if is_op(value, "add") else either_way(value)[:1]
    by = -factor if is_op(value, "subtract") else factor
    reasons = []
    for scores, bias in forms:
        try:
            return _with(ScoreStep("add", bias, _shape(value), factor=by), scores, graph, factor, depth)
        except NotAttentionError as e:
            reasons.append(e)
    raise reasons[0]


def _with(step: ScoreStep, scores: tvm.ir.Expr, graph: Graph, factor: float, depth: int) -> Scores:
    found = scores_of(scores, graph, factor, depth)
    if _shape(scores) != step.shape:
        raise NotAttentionError(f"a mask broadcasts its scores from {_shape(scores)} to {step.shape}")
    return replace(found, steps=(*found.steps, step))


def _shape(expr: tvm.ir.Expr) -> Shape:
    shape = sizes_of(expr)
    if shape is None:
        raise NotAttentionError("its scores have an unknown shape")
    return shape


def _keeps_planes(call: relax.Call) -> bool:
    """Return whether a reshape groups the axes before the last two otherwise and changes nothing else."""
    before, after = sizes_of(call.args[0]), sizes_of(call)
    return before is not None and after is not None and len(after) > 1 and before[-2:] == after[-2:]
