"""Pass: find layer norms and RMS norms that the exporter wrote out in small steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    bindings_of,
    dtype_of,
    emit_named,
    is_constant,
    is_op,
    main_of,
    rewrite_main,
    scalar_of,
    static_shape,
    values_of,
)
from relaxtune.pipeline.passes.kit.state import LoweringState

Values = Mapping[relax.Var, tvm.ir.Expr]


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
    main = main_of(mod)
    values = values_of(main)
    found: dict[relax.Var, _Norm] = {}
    for binding in bindings_of(main):
        norm = _match(binding.var, values, found)
        if norm is not None:
            found[binding.var] = norm
    if not found:
        return mod
    for var, norm in found.items():
        state.sources[var.name] = state.nodes_of([*(step.name for step in norm.steps), var.name])
    before = len(values)
    result = rewrite_main(mod, _Replace(found))
    state.note(f"{before - len(values_of(main_of(result)))} steps of norms merged")
    return result


@mutator
class _Replace(PyExprMutator):  # type: ignore[misc]
    def __init__(self, norms: Mapping[relax.Var, _Norm]) -> None:
        super().__init__()
        self._norms = norms

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        norm = self._norms.get(binding.var)
        if norm is None:
            super().visit_var_binding_(binding)
            return
        data = self.visit_expr(norm.data)
        width, dtype = _width(norm.data), dtype_of(norm.data)
        gamma = norm.gamma if norm.gamma is not None else relax.const(np.ones(width, dtype), dtype)
        if not norm.centred:
            value = relax.op.nn.rms_norm(data, _row(gamma), axes=[-1], epsilon=norm.epsilon)
        else:
            beta = norm.beta if norm.beta is not None else relax.const(np.zeros(width, dtype), dtype)
            value = relax.op.nn.layer_norm(data, _row(gamma), _row(beta), axes=[-1], epsilon=norm.epsilon)
        emit_named(self, binding.var, value)


def _row(constant: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return a constant of one row as a vector."""
    array = array_of(constant)
    return constant if array.ndim == 1 else relax.const(array.reshape(-1), dtype_of(constant))


def _width(var: relax.Var) -> int:
    """Return the length of the last axis, 0 when it is symbolic or unknown."""
    ty = var.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr) or len(ty.shape.values) == 0:
        return 0
    last = ty.shape.values[-1]
    return int(last) if isinstance(last, tvm.tirx.IntImm) else 0


def _match(var: relax.Var, values: Values, found: Mapping[relax.Var, _Norm]) -> _Norm | None:
    """Return the norm that `var` completes: the bare quotient, or a norm found before with gamma or beta applied."""
    value = values.get(var)
    if is_op(value, "multiply", "add"):
        for inner, other in (tuple(value.args), tuple(value.args)[::-1]):
            norm = found.get(inner) if isinstance(inner, relax.Var) else None
            if norm is None or not _is_row(other, norm.data):
                continue
            steps = (*norm.steps, inner)
            if is_op(value, "multiply") and norm.gamma is None and norm.beta is None:
                return _Norm(norm.data, norm.epsilon, norm.centred, other, None, steps)
            if is_op(value, "add") and norm.centred and norm.beta is None:
                return _Norm(norm.data, norm.epsilon, norm.centred, norm.gamma, other, steps)
    return _match_quotient(value, values)


def _match_quotient(value: tvm.ir.Expr | None, values: Values) -> _Norm | None:
    """Match `d / sqrt(mean(d^2) + eps)` in its forms."""
    for data, root, steps in _quotients(value, values):
        total = values.get(root)
        if not isinstance(data, relax.Var) or not is_op(total, "add") or _width(data) == 0:
            continue
        for mean, eps in (tuple(total.args), tuple(total.args)[::-1]):
            epsilon = scalar_of(eps)
            square = _mean_of(mean, values)
            if epsilon is None or square is None or not _is_square(square, data, values):
                continue
            centre = _centre_of(data, values)
            inner = (*steps, root, mean, square)
            if centre is None:
                return _Norm(data, epsilon, False, steps=inner)
            return _Norm(centre, epsilon, True, steps=(values[data].args[1], data, *inner))
    return None


def _quotients(value: tvm.ir.Expr | None, values: Values) -> list[tuple[tvm.ir.Expr, relax.Var, tuple[relax.Var, ...]]]:
    """Return (dividend, radicand, steps between) for each way of reading `value` as `dividend / sqrt(radicand)`."""
    readings: list[tuple[tvm.ir.Expr, relax.Var, tuple[relax.Var, ...]]] = []
    if is_op(value, "divide"):
        root = values.get(value.args[1])
        if is_op(root, "sqrt"):
            readings.append((value.args[0], root.args[0], (value.args[1],)))
    if is_op(value, "multiply"):
        for data, inverse in (tuple(value.args), tuple(value.args)[::-1]):
            step = values.get(inverse) if isinstance(inverse, relax.Var) else None
            if is_op(step, "rsqrt"):
                readings.append((data, step.args[0], (inverse,)))
            elif is_op(step, "divide") and scalar_of(step.args[0]) == 1.0:
                root = values.get(step.args[1])
                if is_op(root, "sqrt"):
                    readings.append((data, root.args[0], (step.args[1], inverse)))
    return readings


def _mean_of(expr: tvm.ir.Expr, values: Values) -> relax.Var | None:
    """Return what `expr` is the kept mean over the last axis of."""
    value = values.get(expr) if isinstance(expr, relax.Var) else None
    if not is_op(value, "mean") or not value.attrs.keepdims or value.attrs.axis is None:
        return None
    axes = [int(axis) for axis in value.attrs.axis]
    inner = value.args[0]
    return inner if axes in ([-1], [inner.ty.ndim - 1]) and isinstance(inner, relax.Var) else None


def _is_square(var: relax.Var, data: relax.Var, values: Values) -> bool:
    value = values.get(var)
    if is_op(value, "power"):
        return isinstance(value.args[0], relax.Var) and value.args[0] == data and scalar_of(value.args[1]) == 2.0
    if is_op(value, "square"):
        return isinstance(value.args[0], relax.Var) and value.args[0] == data
    return is_op(value, "multiply") and all(isinstance(a, relax.Var) and a == data for a in value.args)


def _centre_of(data: relax.Var, values: Values) -> relax.Var | None:
    """Return `x` when `data` is `x - mean(x)`."""
    value = values.get(data)
    if not is_op(value, "subtract") or not isinstance(value.args[0], relax.Var):
        return None
    mean = _mean_of(value.args[1], values)
    return mean if mean is not None and mean == value.args[0] else None


def _is_row(expr: tvm.ir.Expr, data: relax.Var) -> bool:
    """Return whether `expr` is a constant with one value for each element of `data`'s last axis."""
    if not is_constant(expr) or dtype_of(expr) != dtype_of(data):
        return False
    shape = static_shape(expr)
    return shape is not None and len(shape) > 0 and shape[-1] == _width(data) and int(np.prod(shape)) == shape[-1]
