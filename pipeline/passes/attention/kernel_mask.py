"""Decide what of an attention's mask becomes numbers of the kernel, and which tensor it reads for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import tvm
from tvm import relax
from tvm_ffi import StructuralKey

from relaxtune.pipeline.passes.attention.find_attention import Attention
from relaxtune.pipeline.passes.attention.head_layout import readings_of
from relaxtune.pipeline.passes.attention.read_mask import Condition, Mask, MaskReader
from relaxtune.pipeline.passes.attention.scores import NotAttentionError, ScoreStep
from relaxtune.pipeline.passes.attention.strided_view import StridedView, merged, regrouped, whole
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, Symbols, order, quotient, sizes_of
from relaxtune.pipeline.passes.symbolic.tables import TablePlaces, table_places
from relaxtune.schedules.functions.attention import ScoreBias


@dataclass(frozen=True)
class Masking:
    """The mask of an attention; `causal`, `window` and `layout` are those of `schedules.functions.attention`."""

    causal: bool = False
    window: int = 0
    layout: ScoreBias | None = None  # In the tensor that is read, with sizes of passes; None when none is.
    # The tensor of the graph, if it has one. Otherwise it is computed: the sum of `addends` times their factors, and of
    # `fill` where `conditions` do not all hold.
    source: tvm.ir.Expr | None = None
    addends: tuple[tuple[tvm.ir.Expr, float], ...] = ()
    conditions: tuple[Condition, ...] = ()
    fill: float = 0.0
    shape: Shape = ()  # Of the tensor.

    @property
    def elements(self) -> Size:
        """How many the tensor has."""
        return 0 if self.layout is None else math.prod(self.shape)

    @property
    def operands(self) -> list[tvm.ir.Expr]:
        """The tensors that it is made of."""
        return [expr for expr, _ in self.addends] + [condition.expr for condition in self.conditions]

    def key(self) -> tuple[object, ...]:
        """Return what masks that are the same tensor have in common."""
        conditions = tuple((StructuralKey(one.expr), one.negated) for one in self.conditions)
        return tuple((StructuralKey(expr), factor) for expr, factor in self.addends), conditions, self.fill


def masking_of(attention: Attention, graph: Graph) -> Masking:
    """Return the mask of an attention.

    Raises `NotAttentionError`: a kernel cannot have it.
    """
    if not attention.steps:
        return Masking()
    shape = max((step.shape for step in attention.steps), key=len)
    steps = [_of_shape(step, shape, graph.symbols) for step in attention.steps]
    reader = MaskReader(graph, attention.queries, attention.keys)
    masks = [_mask_of(step, reader) for step in steps]
    mask = Mask()
    for one in masks:
        mask = mask.joined(one)
    finite = (is_constant(expr) and np.isfinite(array_of(expr)).all() for expr in mask.addends)
    if attention.guarded and not all(finite):
        raise NotAttentionError("its bias may give rows of NaN; they become zeros")
    infinite = any(np.isneginf(fill) for fill in mask.fills)
    fill = max((fill for fill in mask.fills if np.isfinite(fill)), default=-np.inf)
    addends = tuple((expr, step.factor) for step, one in zip(steps, masks, strict=True) for expr in one.addends)
    scores = _Scores(attention, shape, graph)
    apart = scores.laid_out(Masking(mask.causal, mask.window, addends=addends, conditions=mask.conditions, fill=fill))
    if apart.layout is None or mask.causal or mask.window or (attention.guarded and infinite):
        return apart
    # The tensors read, or added up, as they stand in the graph.
    masked = [step for step in steps if step.kind != "add"]
    as_it_is = scores.laid_out(
        Masking(
            addends=tuple((step.expr, step.factor) for step in steps if step.kind == "add"),
            conditions=tuple(Condition(step.expr, step.kind == "where_not") for step in masked),
            fill=max((step.fill for step in masked), default=0.0),
        )
    )
    return apart if order(apart.elements) < order(as_it_is.elements) else as_it_is


def _of_shape(step: ScoreStep, shape: Shape, symbols: Symbols) -> ScoreStep:
    """Return a step for scores whose leading axes are grouped otherwise (batch and heads as one axis, say)."""
    own = sizes_of(step.expr)
    if step.shape == shape:
        return step
    if own is None or len(own) < 2 or (own[:-2] != step.shape[:-2] and math.prod(own[:-2]) != 1):
        raise NotAttentionError(f"its masks are for scores of different shapes, {step.shape} and {shape}")
    leading = (1,) * (len(shape) - 2) if math.prod(own[:-2]) == 1 else shape[:-2]
    target = symbols.shape((*leading, *own[-2:]))
    regrouped = relax.BlockBuilder().normalize(relax.op.reshape(step.expr, target))
    return replace(step, expr=regrouped, shape=shape)


def _mask_of(step: ScoreStep, reader: MaskReader) -> Mask:
    if step.kind != "add":
        return reader.condition(step.expr, negated=step.kind == "where_not", fill=step.fill)
    mask = reader.addend(step.expr)
    # Very low scores stay very low under the usual factors of scores; another factor is not one of attention.
    known = not mask.fills or 0.01 < step.factor < 100
    return mask if known else Mask(addends=(step.expr,))


@dataclass(frozen=True)
class _Scores:
    """The scores [..., queries, keys] of an attention, of some shape, which tensors are added to or hide."""

    attention: Attention
    shape: Shape
    graph: Graph

    def laid_out(self, masking: Masking) -> Masking:
        """Return a mask with the tensor that is read: one of the graph, where one says it all."""
        addends, conditions = masking.addends, masking.conditions
        plain = Masking(masking.causal, masking.window)
        if not addends and not conditions:
            return plain
        if not addends and len(conditions) == 1 and not conditions[0].negated and np.isneginf(masking.fill):
            return self._read(conditions[0].expr, "keep", plain)
        if not conditions and len(addends) == 1 and addends[0][1] == 1.0:
            return self._read(addends[0][0], "add", plain)
        return self._made(masking)

    def _read(self, expr: tvm.ir.Expr, kind: Literal["add", "keep"], masking: Masking) -> Masking:
        """Return a masking that reads a tensor of the graph, as far back as the kernel can."""
        for reading in readings_of(expr, self.graph, scaled=False):
            layout, source = self._layout(reading.view, kind), reading.base
            if layout is None:
                continue
            if kind == "add" and (places := table_places(source, self.graph)) is not None:
                along = self._along_table(layout, sizes_of(source) or (), places)
                layout, source = (layout, source) if along is None else (along, places.table)
            return replace(masking, layout=layout, source=source, shape=sizes_of(source) or ())
        raise NotAttentionError(f"its mask {sizes_of(expr)} lies in a way that no strides describe")

    def _made(self, masking: Masking) -> Masking:
        """Return a masking whose tensor is still to be made."""
        masking, period = _without_repeats(masking, self.shape, self.graph)
        made = _broadcast([sizes_of(expr) for expr in masking.operands])
        if made is None:
            raise NotAttentionError("its mask has an unknown shape")
        view = whole(made)
        if period:
            view = replace(view, axes=(((quotient(self.shape[0], period) or 0, 0), *view.axes[0]), *view.axes[1:]))
        layout = self._layout(view, "add")
        if layout is None:
            raise NotAttentionError(f"its mask {made} lies in a way that no strides describe")
        return replace(masking, layout=layout, shape=made)

    def _layout(self, view: StridedView, kind: Literal["add", "keep"]) -> ScoreBias | None:
        """Return where a view, which broadcasts to the scores, lies; None where no strides describe it."""
        wide = view.broadcast(self.shape)
        if wide is None:
            return None
        leading = merged(factor for axis in wide.axes[:-2] for factor in axis)
        parts = regrouped(leading, (self.attention.batch, self.attention.heads))
        if parts is None:
            return None
        batch_axis, period = parts[0], 0
        if len(batch_axis) == 2 and batch_axis[0][1] == 0 and isinstance(size := batch_axis[1][0], int):
            batch_axis, period = batch_axis[1:], size
        axes = (batch_axis, parts[1], *wide.axes[-2:])
        if any(len(axis) > 1 for axis in axes):
            return None
        batch, head, query, key = (axis[0][1] if axis else 0 for axis in axes)
        return ScoreBias(0, kind, batch, head, query, key, offset=wide.offset, period=period)

    def _along_table(self, layout: ScoreBias, shape: Shape, places: TablePlaces) -> ScoreBias | None:
        """Return where a mask, laid out in a tensor of some shape, lies in its table; None where no strides say it.

        The table is by queries and keys: along those alone a kernel stays inside.
        """
        if layout.offset != 0 or layout.period:
            return None
        attention = self.attention
        own = [(math.prod(shape[axis + 1 :]), size) for axis, size in enumerate(shape)]
        wanted = (
            (layout.batch_stride, attention.batch),
            (layout.head_stride, attention.heads),
            (layout.query_stride, attention.queries),
            (layout.key_stride, attention.keys),
        )
        strides: list[Size] = []
        for place, (stride, extent) in enumerate(wanted):
            axis = next((axis for axis, one in enumerate(own) if one == (stride, extent)), None)
            counts = axis is not None and places.counting[axis]
            if (axis is None and stride != 0) or (counts and place < 2) or (place >= 2 and stride != 0 and not counts):
                return None
            strides.append(0 if axis is None or stride == 0 else places.strides[axis])
        batch, head, query, key = strides
        if not isinstance(query, int) or not isinstance(key, int):
            return None
        return ScoreBias(0, "add", batch, head, query, key, offset=places.offset, limit=places.limit)


def _without_repeats(masking: Masking, shape: Shape, graph: Graph) -> tuple[Masking, int]:
    """Return a masking whose parts are not repeated along the first axis of the scores, and after how many places.

    The windows of an image have the masks of another one's, say. 0 places: nothing is repeated.
    """
    once = [_once(expr, shape, graph) for expr in masking.operands]
    shapes = [sizes_of(expr) or () for expr in once]
    leading = {own[0] for own in shapes if len(own) == len(shape)} - {1}
    period = leading.pop() if len(leading) == 1 else 0
    if not isinstance(period, int) or period in (0, shape[0]):
        return masking, 0
    addends = [(expr, factor) for expr, (_, factor) in zip(once, masking.addends, strict=False)]
    conditions = [replace(one, expr=expr) for expr, one in zip(once[len(addends) :], masking.conditions, strict=True)]
    return replace(masking, addends=tuple(addends), conditions=tuple(conditions)), period


def _once(expr: tvm.ir.Expr, shape: Shape, graph: Graph) -> tvm.ir.Expr:
    """Return a tensor without its repetition along the first axis of the scores, itself where it has none."""
    for reading in readings_of(expr, graph, scaled=False):
        view = reading.view
        if len(view.axes) != len(shape) or len(view.axes[0]) != 2 or view.axes[0][0][1] != 0:
            continue
        once = replace(view, axes=(view.axes[0][1:], *view.axes[1:]))
        if once == whole(once.shape) and dtype_of(reading.base) == dtype_of(expr):
            return relax.BlockBuilder().normalize(relax.op.reshape(reading.base, graph.symbols.shape(once.shape)))
    return expr


def _broadcast(shapes: Sequence[Shape | None]) -> Shape | None:
    """Return what some shapes broadcast to, None where that is not known."""
    if any(shape is None for shape in shapes):
        return None
    made: list[Size] = [1] * max(len(shape or ()) for shape in shapes)
    for shape in shapes:
        for place, size in enumerate(reversed(shape or ()), start=1):
            if 1 not in (size, made[-place]) and size != made[-place]:
                return None
            made[-place] = size if made[-place] == 1 else made[-place]
    return tuple(made)
