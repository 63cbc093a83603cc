"""Where the heads of attention lie: from views of the operands to batch, head and position strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from relaxtune.pipeline.passes.attention.strided_view import (
    Factor,
    Factors,
    StridedView,
    is_view,
    merged,
    regrouped,
    size_of_axis,
    view_through,
    whole,
)
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import HALVES, dtype_of, is_op, numbers_beside
from relaxtune.pipeline.passes.kit.rewrite import Rewriter
from relaxtune.pipeline.passes.kit.sizes import Size, order, quotient, sizes_of
from relaxtune.schedules.functions.attention import HeadLayout


class Roundings:
    """The half-precision copies of tensors of the function that is rewritten."""

    def __init__(self) -> None:
        self._known: dict[tuple[tvm.ir.Expr, str], relax.Var] = {}

    def note(self, binding: relax.VarBinding) -> None:
        """Remember a tensor that the graph rounds itself."""
        if is_op(binding.value, "astype") and dtype_of(binding.var) in HALVES:
            self._known.setdefault((binding.value.args[0], dtype_of(binding.var)), binding.var)

    def get(self, new: Rewriter, base: tvm.ir.Expr, dtype: str) -> tvm.ir.Expr:
        """Return a tensor of the old function in a dtype, as a tensor of the new one; it is rounded as a whole."""
        if dtype_of(base) == dtype:
            return new.of(base)
        if (base, dtype) not in self._known:
            rounded = relax.op.astype(new.of(base), dtype)
            self._known[base, dtype] = new.extra(f"{base.name}__{dtype}", rounded, [base])
        return new.of(self._known[base, dtype])


@dataclass(frozen=True)
class Reading:
    """A tensor as `scale` times a view of another one, `base`."""

    base: tvm.ir.Expr
    view: StridedView
    scale: float = 1.0


def readings_of(expr: tvm.ir.Expr, graph: Graph, *, scaled: bool) -> list[Reading]:
    """Return a tensor as views of what it is made of, the furthest back first, itself last.

    Casts between half precision and float32 are seen through: rounding commutes with moving. With `scaled`, so are
    products and quotients by a number.
    """
    chain: list[relax.Call] = []
    readings: list[Reading] = []
    current = expr
    while True:
        shape = sizes_of(current)
        if shape is None:
            break
        reading = _apply(chain, Reading(current, whole(shape)))
        if reading is not None:
            readings.append(reading)
        value = graph.value(current) if isinstance(current, relax.Var) else current
        step = _operand_of(value, graph, scaled=scaled)
        if step is None or not isinstance(value, relax.Call):
            break
        chain.append(value)
        current = step
    return readings[::-1]


def _operand_of(value: tvm.ir.Expr | None, graph: Graph, *, scaled: bool) -> tvm.ir.Expr | None:
    """Return the operand that a value is a view, a cast or a multiple of."""
    if is_op(value, "astype"):
        inner = value.args[0]
        floats = (*HALVES, "float32")
        if dtype_of(value) not in floats or dtype_of(inner) not in floats:
            return None
        behind = graph.value(inner)
        rounds = dtype_of(value) in HALVES and dtype_of(inner) == "float32"
        # A tensor that is rounded as a whole is stored rounded.
        return None if rounds and _operand_of(behind, graph, scaled=scaled) is None else inner
    if is_view(value):
        return value.args[0]  # type: ignore[union-attr]
    if scaled and is_op(value, "multiply", "divide"):
        for data, factor in numbers_beside(value):
            if factor and isinstance(data, relax.Var):
                return data
    return None


def _apply(chain: Sequence[relax.Call], reading: Reading) -> Reading | None:
    view, scale = reading.view, reading.scale
    for call in reversed(chain):
        if is_op(call, "multiply", "divide"):
            factor = numbers_beside(call)[0][1]
            scale = scale * factor if is_op(call, "multiply") else scale / factor
        elif not is_op(call, "astype"):
            seen = view_through(call, view)
            if seen is None:
                return None
            view = seen
    return Reading(reading.base, view, scale)


@dataclass(frozen=True)
class Heads:
    """A tensor that holds heads: what it is made of, where they lie in it, in sizes of passes, and how many differ."""

    base: tvm.ir.Expr
    layout: HeadLayout
    count: int


@dataclass(frozen=True)
class Planes:
    """A tensor as planes [positions, width], counted by one axis: batch and heads together."""

    leading: Factors
    offset: Size
    positions: Factors
    unit: Size

    @property
    def count(self) -> Size:
        """How many planes there are."""
        return size_of_axis(self.leading)


def planes_of(view: StridedView, leading: Sequence[Size], *, transposed: bool = False) -> Planes | None:
    """Return a matmul operand [leading..., positions, width] (transposed: the last two swapped) as planes.

    None when rows of a head do not lie together.
    """
    last = view.axes[-2:]
    wide = view.broadcast([*leading, *view.shape[-2:]])
    positions, features = last[::-1] if transposed else last
    if wide is None or len(positions) > 1 or len(features) != 1 or features[0][1] != 1:
        return None
    flat = merged(factor for axis in wide.axes[:-2] for factor in axis)
    return Planes(flat, view.offset, positions, math.prod(view.shape))


def heads_of(base: tvm.ir.Expr, planes: Planes, heads: int, *, shared: bool) -> Heads | None:
    """Return the heads of a tensor, `heads` planes for each batch element; neighbours may share one (`shared`)."""
    parts = regrouped(planes.leading, (quotient(planes.count, heads) or 1, heads))
    if parts is None or len(parts[0]) > 1:
        return None
    batch, own = parts
    if shared and own and own[-1][1] == 0:
        own = own[:-1]
    elif any(stride == 0 for _, stride in own):
        return None
    if len(own) > 1:
        return None
    # The stride of an axis of size 1 does not matter; this one is as aligned as any other.
    strides = (axis[0][1] if axis else planes.unit for axis in (batch, planes.positions, own))
    differing = size_of_axis(own)
    assert isinstance(differing, int)
    return Heads(base, HeadLayout(0, planes.offset, *strides), differing if shared else heads)


def head_counts(leading: Sequence[Size], planes: Sequence[Planes]) -> list[int]:
    """Return how many planes could be the heads of one batch element, the likeliest first."""
    count = math.prod(leading)
    cuts = [math.prod(leading[1:])] if len(leading) > 1 else []
    for one in planes:
        inner: Size = 1
        for size, _ in reversed(one.leading):
            inner = inner * size
            cuts.append(inner)
    cuts += [count, 1]
    return list(dict.fromkeys(cut for cut in cuts if isinstance(cut, int) and quotient(count, cut) is not None))


def inverse(chain: Sequence[relax.Call], shape: Sequence[Size], result: Sequence[Size]) -> StridedView | None:
    """Return where a tensor's elements lie in the result of a chain of moves; None when some are lost."""
    view: StridedView | None = whole(shape)
    for call in chain:
        if view is not None and not is_op(call, "astype"):
            view = view_through(call, view)
    if view is None or view.offset != 0 or math.prod(result) != math.prod(shape):
        return None
    moved: list[tuple[Size, Factor]] = []
    inner: Size | None = math.prod(result)
    for axis in view.axes:
        for size, stride in axis:
            inner = None if inner is None else quotient(inner, size)
            if inner is None:
                return None
            moved.append((stride, (size, inner)))
    moved.sort(key=lambda one: order(one[0]), reverse=True)
    expected: Size | None = math.prod(shape)
    for stride, (size, _) in moved:
        expected = None if expected is None else quotient(expected, size)
        if stride != expected:
            return None
    parts = regrouped(merged(factor for _, factor in moved), shape)
    return None if parts is None else StridedView(0, parts)
