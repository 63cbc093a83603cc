"""Pass: find layer norms and RMS norms that the exporter wrote out in small steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    binding_count,
    dtype_of,
    either_way,
    is_constant,
    is_op,
    number_of,
    numbers_beside,
    shape_of,
    static_shape,
)
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState


@dataclass(frozen=True)
class _Norm:
    """`(x - mean(x) if centred) / sqrt(mean(.^2) + epsilon) * gamma + beta`, over the last axis."""

    data: relax.Var
    epsilon: float
    centred: bool
    gamma: tvm.ir.Expr | None = None
    beta: tvm.ir.Expr | None = None
    steps: tuple[relax.Var, ...] = ()


def recognise_norms(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with written-out norms over the last axis as `nn.layer_norm` and `nn.rms_norm`: one kernel each.

    ::

        m = mean(x); d = x - m; v = mean(d^2); y = d / sqrt(v + eps) [* gamma [+ beta]]    layer norm
        v = mean(x^2); y = x / sqrt(v + eps) [* gamma]                                     RMS norm

    The square may be `d * d` or `d ^ 2`; the quotient may be a product with a reciprocal or `rsqrt`. Without this each
    is two or three kernels and as many passes over memory.
    """
    graph = Graph(mod)
    found: dict[relax.Var, _Norm] = {}
    for binding in graph.bindings:
        norm = _match(binding.var, graph, found)
        if norm is not None:
            found[binding.var] = norm
    if not found:
        return mod
    for var, norm in found.items():
        state.sources[var.name] = state.nodes_of([*(step.name for step in norm.steps), var.name])

    def as_operator(new: Rewriter, _binding: relax.VarBinding, norm: _Norm) -> tvm.ir.Expr:
        width, dtype = _width(norm.data), dtype_of(norm.data)

        def row(constant: tvm.ir.Expr | None, number: int) -> tvm.ir.Expr:
            array = np.full(width, number, dtype) if constant is None else array_of(constant).reshape(-1)
            return constant if constant is not None and constant.ty.ndim == 1 else relax.const(array, dtype)

        rows = [row(norm.gamma, 1), *([row(norm.beta, 0)] if norm.centred else [])]
        make = relax.op.nn.layer_norm if norm.centred else relax.op.nn.rms_norm
        return make(new.of(norm.data), *rows, axes=[-1], epsilon=norm.epsilon)

    result = replace_found(mod, state, found, as_operator)
    state.note(f"{binding_count(mod) - binding_count(result)} steps of norms merged")
    return result


def _width(var: relax.Var) -> int:
    """Return the length of the last axis, 0 when it is symbolic or unknown."""
    last = (shape_of(var) or [None])[-1]
    return int(last) if isinstance(last, tvm.tirx.IntImm) else 0


def _match(var: relax.Var, graph: Graph, found: Mapping[relax.Var, _Norm]) -> _Norm | None:
    """Return the norm that `var` completes: the bare quotient, or a norm found before with gamma or beta applied."""
    value = graph.value(var)
    if is_op(value, "multiply", "add"):
        for inner, other in either_way(value):
            norm = found.get(inner) if isinstance(inner, relax.Var) else None
            if norm is None or not _is_row(other, norm.data):
                continue
            steps = (*norm.steps, inner)
            if is_op(value, "multiply") and norm.gamma is None and norm.beta is None:
                return replace(norm, gamma=other, steps=steps)
            if is_op(value, "add") and norm.centred and norm.beta is None:
                return replace(norm, beta=other, steps=steps)
    return _match_quotient(value, graph)


def _match_quotient(value: tvm.ir.Expr | None, graph: Graph) -> _Norm | None:
    """Match `d / sqrt(mean(d^2) + eps)` in its forms."""
    for data, root, steps in _quotients(value, graph):
        total = graph.value(root)
        if not isinstance(data, relax.Var) or not is_op(total, "add") or _width(data) == 0:
            continue
        for mean, epsilon in numbers_beside(total):
            square = _mean_of(mean, graph)
            squared = graph.value(square)
            if is_op(squared, "power"):
                fits = squared.args[0] == data and number_of(squared.args[1], data) == 2.0
            else:
                fits = is_op(squared, "square", "multiply") and all(arg == data for arg in squared.args)
            if square is None or not fits:
                continue
            inner = (*steps, root, mean, square)
            # Whether `data` is x - mean(x).
            centred = graph.value(data)
            if is_op(centred, "subtract") and centred.args[0] == _mean_of(centred.args[1], graph):
                return _Norm(centred.args[0], epsilon, True, steps=(centred.args[1], data, *inner))
            return _Norm(data, epsilon, False, steps=inner)
    return None


def _quotients(value: tvm.ir.Expr | None, graph: Graph) -> list[tuple[tvm.ir.Expr, relax.Var, tuple[relax.Var, ...]]]:
    """Return (dividend, radicand, steps between) for each way of reading `value` as `dividend / sqrt(radicand)`."""
    readings: list[tuple[tvm.ir.Expr, relax.Var, tuple[relax.Var, ...]]] = []
    if is_op(value, "divide"):
        root = graph.value(value.args[1])
        if _is_root(root):
            readings.append((value.args[0], root.args[0], (value.args[1],)))
    if is_op(value, "multiply"):
        for data, inverse in either_way(value):
            step = graph.value(inverse)
            if is_op(step, "rsqrt"):
                readings.append((data, step.args[0], (inverse,)))
            elif is_op(step, "divide") and number_of(step.args[0], step.args[1]) == 1.0:
                root = graph.value(step.args[1])
                if _is_root(root):
                    readings.append((data, root.args[0], (step.args[1], inverse)))
    return readings


def _is_root(value: tvm.ir.Expr | None) -> TypeGuard[relax.Call]:
    return is_op(value, "sqrt") or (is_op(value, "power") and number_of(value.args[1], value.args[0]) == 0.5)


def _mean_of(expr: tvm.ir.Expr, graph: Graph) -> relax.Var | None:
    """Return what `expr` is the kept mean over the last axis of."""
    value = graph.value(expr)
    if not is_op(value, "mean") or not value.attrs.keepdims or value.attrs.axis is None:
        return None
    axes = [int(axis) for axis in value.attrs.axis]
    inner = value.args[0]
    return inner if axes in ([-1], [inner.ty.ndim - 1]) and isinstance(inner, relax.Var) else None


def _is_row(expr: tvm.ir.Expr, data: relax.Var) -> bool:
    """Return whether `expr` is a constant of one value for each element of `data`'s last axis, and of no more axes."""
    if not is_constant(expr) or dtype_of(expr) != dtype_of(data):
        return False
    shape, width = static_shape(expr) or (), _width(data)
    return shape[-1:] == (width,) and int(np.prod(shape)) == width and len(shape) <= int(data.ty.ndim)
