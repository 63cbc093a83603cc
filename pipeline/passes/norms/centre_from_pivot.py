"""Pass: a CPU kernel that centres rows adds up differences from one of the row's own numbers, its pivot.

A float32 sum of n equal terms is off by some roundings, and so is their mean. A norm divides what is left of the row,
where nothing should be, by the root of its epsilon: of 768 elements of 10.1 it made 3e-3. The differences are all 0.

The pivot is the median of a row's first, central and last element: one that lies far from all others would cost the
sum of differences digits, as all of them would be large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tvm
from tvm import relax, te, tirx, topi

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import dtype_of, is_op
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState

# A pivot that is larger, or no number, is taken for 0: differences from it could be infinite or NaN where the row's
# elements are not.
_LARGEST = 1e30

Place = Sequence[tvm.ir.Expr]
# A number of each row, by the place of any of the row's elements.
OfRow = Callable[[Place], tvm.ir.Expr]


def centre_from_pivot(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with layer norms, and `x - mean(x)`, as kernels that read a row as differences from its pivot.

    On a CPU. GPU kernels add up by trees, which are shorter, and are known to other passes as TVM writes them.
    """
    if state.launches_cost:
        return mod
    graph = Graph(mod)
    found: dict[relax.Var, Callable[..., te.Tensor]] = {}
    for binding in graph.bindings:
        value = binding.value
        if is_op(value, "nn.layer_norm"):
            found[binding.var] = _layer_norm(_places(value.attrs.axes, value.args[0]), float(value.attrs.epsilon))
        elif is_op(value, "subtract") and (axes := _own_mean(graph.value(value.args[1]), value.args[0])):
            found[binding.var] = _deviation(axes)
            state.sources[binding.var.name] = state.nodes_of([value.args[1].name, binding.var.name])

    def as_kernel(new: Rewriter, binding: relax.VarBinding, compute: Callable[..., te.Tensor]) -> tvm.ir.Expr:
        value = binding.value
        if is_op(value, "subtract"):
            return new.kernel(compute, new.of(value.args[0]), name="deviation")
        return new.kernel(compute, *map(new.of, value.args), name="layer_norm")

    return replace_found(mod, state, found, as_kernel)


def _own_mean(value: tvm.ir.Expr | None, data: tvm.ir.Expr) -> list[int]:
    """Return the axes over which a value is the mean of `data`; none where it is not, or computes in half precision."""
    if not is_op(value, "mean") or not value.attrs.keepdims or not isinstance(data, relax.Var):
        return []
    if not value.args[0].same_as(data) or dtype_of(data) not in ("float32", "float64"):
        return []
    return _places(value.attrs.axis, data)


def _places(axes: Sequence[int] | None, data: tvm.ir.Expr) -> list[int]:
    """Return axes counted from the first; None stands for all."""
    rank = int(data.ty.ndim)
    return list(range(rank)) if axes is None else sorted(int(axis) % rank for axis in axes)


def _layer_norm(axes: Sequence[int], epsilon: float) -> Callable[..., te.Tensor]:
    def compute(x: te.Tensor, gamma: te.Tensor, beta: te.Tensor) -> te.Tensor:
        apart = _deviation(axes)(x)
        variance = _mean_of(lambda place: apart(*place) * apart(*place), apart, axes, "variance")

        def element(*place: tirx.Var) -> tvm.ir.Expr:
            own = [place[axis] for axis in axes]
            inverse = tirx.rsqrt(variance(place) + tirx.const(epsilon, apart.dtype))
            scaled = apart(*place) * inverse * gamma(*own).astype(apart.dtype)
            return (scaled + beta(*own).astype(apart.dtype)).astype(x.dtype)

        return te.compute(x.shape, element, name="layer_norm", tag=topi.tag.INJECTIVE)

    return compute


def _deviation(axes: Sequence[int]) -> Callable[[te.Tensor], te.Tensor]:
    def compute(x: te.Tensor) -> te.Tensor:
        """Return x - mean(x), in float32 at least."""
        dtype = "float64" if str(x.dtype) == "float64" else "float32"
        wide = te.compute(x.shape, lambda *place: x(*place).astype(dtype), name="wide", tag=topi.tag.ELEMWISE)
        pivot = _pivot_of(wide, axes)
        rest = _mean_of(lambda place: wide(*place) - pivot(place), wide, axes, "rest")
        return te.compute(
            x.shape,
            lambda *place: wide(*place) - (pivot(place) + rest(place)),
            name="deviation",
            tag=topi.tag.INJECTIVE,
        )

    return compute


def _mean_of(term: Callable[[Place], tvm.ir.Expr], x: te.Tensor, axes: Sequence[int], name: str) -> OfRow:
    """Return the mean of terms over some axes of x, by the place of any element of its row."""
    steps = {axis: te.reduce_axis((0, x.shape[axis]), name=f"k{axis}") for axis in axes}
    count = math.prod((x.shape[axis] for axis in axes), start=tirx.const(1, "int64"))

    def total(*row: tirx.Var) -> tvm.ir.Expr:
        rest = iter(row)
        place = [steps[axis].var if axis in steps else next(rest) for axis in range(len(x.shape))]
        return te.sum(term(place), axis=list(steps.values()))

    sums = te.compute(_kept(x.shape, axes), total, name=name)
    return lambda place: sums(*_kept(place, axes)) / count.astype(x.dtype)


def _pivot_of(x: te.Tensor, axes: Sequence[int]) -> OfRow:
    """Return the pivot of each row over some axes, by the place of any element of its row."""
    zero, some = tirx.const(0, x.dtype), tirx.all(*(x.shape[place] > 0 for place in axes))
    # A reduction of one step: schedules inline a step into each reader, which then reads a row no longer in order.
    once = te.reduce_axis((0, 1), name="once")

    def pivot(*row: tirx.Var) -> tvm.ir.Expr:
        def element(part: Callable[[tvm.ir.Expr], tvm.ir.Expr]) -> tvm.ir.Expr:
            rest = iter(row)
            place = [part(size) if axis in axes else next(rest) for axis, size in enumerate(x.shape)]
            return tirx.if_then_else(some, x(*place), zero)

        first, central, last = element(lambda _: once.var), element(lambda n: n // 2), element(lambda n: n - 1)
        low, high = tirx.min(first, central), tirx.max(first, central)
        median = tirx.max(low, tirx.min(high, last))
        return te.sum(tirx.Select(tirx.abs(median) < _LARGEST, median, zero), axis=once)

    pivots = te.compute(_kept(x.shape, axes), pivot, name="pivot")
    return lambda place: pivots(*_kept(place, axes))


def _kept(place: Place, axes: Sequence[int]) -> list[tvm.ir.Expr]:
    return [index for axis, index in enumerate(place) if axis not in axes]
