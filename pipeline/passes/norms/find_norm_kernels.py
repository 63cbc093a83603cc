"""Recognise kernels that are norms of rows, with whatever constant vectors are multiplied and added after them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.tir.blocks import same_sizes, shape_of
from relaxtune.schedules.tir.dataflow import Dataflow, Reduction, recognise_dataflow
from relaxtune.schedules.tir.expressions import constant_value, without_casts


@dataclass(frozen=True)
class NormKernel:
    """`(x - mean(x) if centred) / sqrt(mean(.^2) + epsilon)` over the last axis, then `steps`."""

    data: int  # Position of the parameter that is x.
    centred: bool
    epsilon: float
    # In their order: whether a parameter, one element a column, is multiplied (else added), and its position.
    steps: tuple[tuple[bool, int], ...]


def find_norm(func: tirx.PrimFunc) -> NormKernel | None:
    """Return the norm that a PrimFunc with one output is, None when it is none."""
    flow = recognise_dataflow(func, symbolic=True)
    if not isinstance(flow, Dataflow) or len(flow.outputs) != 1 or flow.outputs[0].per_row:
        return None
    shape = shape_of(func.params[flow.outputs[0].param])
    steps: list[tuple[bool, int]] = []
    value = without_casts(flow.outputs[0].value)
    while True:
        core = _core(value, flow)
        if core is not None:
            data, centred, epsilon = core
            if not same_sizes(shape_of(func.params[data]), shape) or not all(
                same_sizes(shape_of(func.params[position]), (shape or ())[-1:]) for _, position in steps
            ):
                return None
            return NormKernel(data, centred, epsilon, tuple(reversed(steps)))
        step = _step(value, flow)
        if step is None:
            return None
        inner, multiplies, position = step
        steps.append((multiplies, position))
        value = without_casts(inner)


def _step(value: tirx.Expr, flow: Dataflow) -> tuple[tirx.Expr, bool, int] | None:
    """Return what is multiplied by, or added to, a vector of columns; whether it is multiplied; the vector."""
    if not isinstance(value, (tirx.Mul, tirx.Add)):
        return None
    for inner, other in ((value.a, value.b), (value.b, value.a)):
        load = without_casts(other)
        if isinstance(load, TensorLoad) and load.indices[0].same_as(flow.columns.var):
            return inner, isinstance(value, tirx.Mul), flow.flat[load.source]
    return None


def _core(value: tirx.Expr, flow: Dataflow) -> tuple[int, bool, float] | None:
    """Return the position of x, whether it is centred, and epsilon, of `(x - mean) * rsqrt(variance + epsilon)`."""
    if not isinstance(value, tirx.Mul):
        return None
    for centred, root in ((value.a, value.b), (value.b, value.a)):
        scaled = without_casts(root)
        if not isinstance(scaled, Call) or getattr(scaled.op, "name", "") != "tirx.rsqrt":
            continue
        total = scaled.args[0]
        epsilon = constant_value(total.b) if isinstance(total, tirx.Add) else None
        variance = _mean_of(total.a, flow) if epsilon is not None else None
        if variance is None or not tvm_ffi.structural_equal(variance.element, tirx.Mul(centred, centred)):
            continue
        x, mean = (centred.a, _mean_of(centred.b, flow)) if isinstance(centred, tirx.Sub) else (centred, None)
        if isinstance(centred, tirx.Sub) and (mean is None or not tvm_ffi.structural_equal(mean.element, x)):
            continue
        load = without_casts(x)
        if isinstance(load, TensorLoad) and _is_own(load, flow):
            return flow.flat[load.source], mean is not None, float(epsilon or 0)
    return None


def _mean_of(value: tirx.Expr, flow: Dataflow) -> Reduction | None:
    """Return the sum over a row that a value is the mean of."""
    if not isinstance(value, tirx.Div) or constant_value(value.b) != flow.columns.size:
        return None
    sums = (one for one in flow.reductions if one.combine == "sum" and one.start == 0)
    return next((one for one in sums if value.a.same_as(one.result)), None)


def _is_own(load: TensorLoad, flow: Dataflow) -> bool:
    """Whether a load reads the element at the output's own position."""
    place: tirx.Expr = tirx.IntImm("int64", 0)
    for number, axis in enumerate(flow.axes):
        place = place + axis.var * math.prod(later.size for later in flow.axes[number + 1 :])
    return bool(flow.analyzer().can_prove_equal(load.indices[0], place))
