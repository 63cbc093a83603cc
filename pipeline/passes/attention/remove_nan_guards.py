"""Pass: remove the guard that exporters put after a softmax against rows without one finite score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_op, number_of, static_shape
from relaxtune.pipeline.passes.kit.rewrite import replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState

# Assumed bound of an activation (a result of a matmul, norm, ...), in absolute value. Far beyond the values of
# networks, and small enough that adding it to the least float32 number rounds back to that number.
ACTIVATION_BOUND = {"float16": 1e4, "float32": 1e19, "bfloat16": 1e19, "float64": 1e150}

_ACTIVATIONS = ("matmul", "nn.conv1d", "nn.conv2d", "nn.layer_norm", "nn.rms_norm", "nn.gelu", "tanh", "sigmoid")


@dataclass(frozen=True)
class Range:
    """Known values of a tensor: where `finite` is true, elements lie in [low, high]; elsewhere they may also be -inf.

    `finite` broadcasts to the tensor's shape. Nothing described by a `Range` is NaN or +inf.
    """

    finite: np.ndarray
    low: float
    high: float


def remove_nan_guards(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` without `where(isnan(s), 0, s)` for `s = softmax(t)`, where no row of `t` can make a NaN.

    A row of a softmax is NaN only when it holds a NaN or +inf, or is -inf all over. The proof needs that
    `t` holds neither NaN nor +inf, and that each row has an element that is surely finite. Ranges are followed through
    constants, `where` and sums, rounding as the tensor's dtype does; so a finite minimum of float32 stays finite under
    any score, whereas in float16 it overflows to -inf and proves nothing.

    Assumed, not proved: results of matmuls, convolutions and norms are finite and under `ACTIVATION_BOUND`. A network
    that breaks this computes NaN or infinity of its own, which the guard would have hidden as zeros.
    Nothing is assumed of the model's inputs. Guards without a proof stay, with a note.
    """
    graph = Graph(mod)
    dead: dict[relax.Var, relax.Var] = {}
    for binding in graph.bindings:
        guarded = guarded_by(binding.value, graph)
        softmax = None if guarded is None else graph.value(graph.behind(guarded, "astype")[:2][-1])
        if guarded is None or not is_op(softmax, "nn.softmax"):
            continue
        reason = _unproved(softmax, graph)
        if reason:
            state.note(f"{binding.var.name}: guard kept, {reason}")
        else:
            dead[binding.var] = guarded
    return replace_found(mod, state, dead, lambda new, _, guarded: new.of(guarded), "guards removed")


def guarded_by(value: tvm.ir.Expr | None, graph: Graph) -> relax.Var | None:
    """Return `s` when `value` is `where(isnan(s), 0, s)`, None otherwise."""
    if not is_op(value, "where"):
        return None
    condition, zero, guarded = value.args
    test = graph.value(condition)
    same = isinstance(guarded, relax.Var) and is_op(test, "isnan") and test.args[0] == guarded
    return guarded if same and number_of(zero, guarded) == 0.0 else None


def _unproved(softmax: relax.Call, graph: Graph) -> str:
    """Return why a row of the softmax might be NaN, "" when none can be."""
    scores = softmax.args[0]
    found = _range_of(scores, graph, 0)
    if found is None:
        return "its scores could not be bounded"
    if found.finite.all():
        return ""
    shape = static_shape(scores)
    if shape is None:
        return "its mask holds -inf and its shape is symbolic"
    rows = np.broadcast_to(found.finite, shape).any(axis=int(softmax.attrs.axis))
    return "" if rows.all() else "a row of its scores may be -inf all over"


def _range_of(expr: tvm.ir.Expr, graph: Graph, depth: int) -> Range | None:
    """Return what is known of `expr`, None when nothing is."""
    dtype = dtype_of(expr)
    if is_constant(expr):
        return _range_of_array(array_of(expr))
    value = graph.value(expr)
    if value is None or depth > 64:
        return None
    if is_op(value, *_ACTIVATIONS) and dtype in ACTIVATION_BOUND:
        bound = ACTIVATION_BOUND[dtype]
        return Range(np.array(True), -bound, bound)
    if is_op(value, "where"):
        left, right = (_range_of(arg, graph, depth + 1) or _minus_infinity(arg) for arg in value.args[1:])
        if left is None or right is None:
            return None
        return Range(left.finite & right.finite, min(left.low, right.low), max(left.high, right.high))
    if is_op(value, "add"):
        left, right = (_range_of(arg, graph, depth + 1) for arg in value.args)
        if left is None or right is None:
            return None
        return _rounded(left.finite & right.finite, left.low + right.low, left.high + right.high, dtype)
    return None


def _range_of_array(array: np.ndarray) -> Range | None:
    data = array.astype(np.float64)
    finite = np.isfinite(data)
    if np.isnan(data).any() or np.isposinf(data).any() or not finite.any():
        return None
    return Range(finite, float(data[finite].min()), float(data[finite].max()))


def _minus_infinity(expr: tvm.ir.Expr) -> Range | None:
    """Return the range of a constant that is -inf everywhere."""
    return Range(np.array(False), np.inf, -np.inf) if is_constant(expr) and (array_of(expr) == -np.inf).all() else None


def _rounded(finite: np.ndarray, low: float, high: float, dtype: str) -> Range | None:
    """Return a range as its dtype stores it: a low end that overflows may be -inf, a high end that does is unknown."""
    if dtype not in ACTIVATION_BOUND:
        return None
    with np.errstate(over="ignore"):
        kind = np.dtype("float32") if dtype == "bfloat16" else np.dtype(dtype)
        stored_low, stored_high = float(kind.type(low)), float(kind.type(high))
    if np.isposinf(stored_high) or np.isnan(stored_high):
        return None
    if np.isfinite(stored_low):
        return Range(finite, stored_low, stored_high)
    return Range(np.array(False), -float(np.finfo(kind).max), stored_high)
