"""Decide what of an attention's mask becomes numbers of the kernel, and which tensor it reads for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.attention.find_attention import Attention
from relaxtune.pipeline.passes.attention.head_layout import readings_of
from relaxtune.pipeline.passes.attention.read_mask import Condition, Mask, MaskReader
from relaxtune.pipeline.passes.attention.scores import NotAttentionError, ScoreStep
from relaxtune.pipeline.passes.attention.strided_view import StridedView, merged, regrouped, whole
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, is_constant
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, Symbols, order, sizes_of

# Of batch, head, query and key.
BiasStrides: TypeAlias = "tuple[Size, Size, Size, Size]"

# Takes the place of -inf where rows that see no key must not become NaN.
_FINITE_FILL = -1e30


@dataclass(frozen=True)
class Masking:
    """The mask of an attention.

    Attributes
    ----------
    causal, window, kind
        As of `schedules.functions.attention`.
    strides
        Of the tensor that is read, None when none is.
    source
        That tensor where the graph has it. Otherwise it is to be made: the sum of `addends` times their factors, and of
        `fill` where `conditions` do not all hold.
    shape
        Of the tensor.
    """

    causal: bool = False
    window: int = 0
    kind: Literal["add", "keep"] = "add"
    strides: BiasStrides | None = None
    source: tvm.ir.Expr | None = None
    addends: tuple[tuple[tvm.ir.Expr, float], ...] = ()
    conditions: tuple[Condition, ...] = ()
    fill: float = 0.0
    shape: Shape = ()

    @property
    def elements(self) -> Size:
        """How many the tensor has."""
        return 0 if self.strides is None else math.prod(self.shape)

    def key(self) -> tuple[object, ...]:
        """Return what masks that are the same tensor have in common."""
        conditions = tuple((hash(one.expr), one.negated) for one in self.conditions)
        return tuple((hash(expr), factor) for expr, factor in self.addends), conditions, self.fill


def masking_of(attention: Attention, graph: Graph) -> Masking:
    """Return the mask of an attention.

    Raises
    ------
    NotAttentionError
        A kernel cannot have it.
    """
    if not attention.steps:
        return Masking()
    shape = max((step.shape for step in attention.steps), key=len)
    attention = replace(attention, steps=tuple(_of_shape(step, shape, graph.symbols) for step in attention.steps))
    reader = MaskReader(graph, attention.queries, attention.keys)
    masks = [_mask_of(step, reader) for step in attention.steps]
    whole_mask = Mask()
    for mask in masks:
        whole_mask = whole_mask.joined(mask)
    if attention.guarded and not all(_is_finite(expr) for expr in whole_mask.addends):
        raise NotAttentionError("zeros take the place of rows that are NaN, which its bias may make")
    infinite = any(np.isneginf(fill) for fill in whole_mask.fills)
    fill = max((fill for fill in whole_mask.fills if np.isfinite(fill)), default=-np.inf)
    if attention.guarded and np.isneginf(fill):
        fill = _FINITE_FILL
    addends = tuple(
        (expr, step.factor) for step, mask in zip(attention.steps, masks, strict=True) for expr in mask.addends
    )
    apart = _taken_apart(attention, shape, graph, whole_mask, addends, fill)
    nothing_is_read = apart.strides is None
    if nothing_is_read or whole_mask.causal or whole_mask.window or (attention.guarded and infinite):
        return apart
    as_it_is = _as_it_is(attention, shape, graph)
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
    # What is low by far stays so under the factors that scores have; another factor is not one of attention.
    known = not mask.fills or 0.01 < step.factor < 100
    return mask if known else Mask(addends=(step.expr,))


def _as_it_is(attention: Attention, shape: Shape, graph: Graph) -> Masking:
    """Return the mask with its tensors read, or added up, as they stand in the graph."""
    steps = attention.steps
    if len(steps) == 1 and steps[0].kind == "where" and np.isneginf(steps[0].fill):
        return _read(attention, shape, graph, steps[0].expr, "keep", Masking())
    if len(steps) == 1 and steps[0].kind == "add" and steps[0].factor == 1.0:
        return _read(attention, shape, graph, steps[0].expr, "add", Masking())
    masked = [step for step in steps if step.kind != "add"]
    return _made(
        attention,
        shape,
        Masking(
            addends=tuple((step.expr, step.factor) for step in steps if step.kind == "add"),
            conditions=tuple(Condition(step.expr, step.kind == "where_not") for step in masked),
            fill=max((step.fill for step in masked), default=0.0),
        ),
    )


def _taken_apart(
    attention: Attention,
    shape: Shape,
    graph: Graph,
    mask: Mask,
    addends: tuple[tuple[tvm.ir.Expr, float], ...],
    fill: float,
) -> Masking:
    conditions = mask.conditions
    plain = Masking(mask.causal, mask.window)
    if not addends and not conditions:
        return plain
    if not addends and len(conditions) == 1 and not conditions[0].negated and np.isneginf(fill):
        return _read(attention, shape, graph, conditions[0].expr, "keep", plain)
    if not conditions and len(addends) == 1 and addends[0][1] == 1.0:
        return _read(attention, shape, graph, addends[0][0], "add", plain)
    made = Masking(mask.causal, mask.window, addends=addends, conditions=conditions, fill=fill)
    return _made(attention, shape, made)


def _read(
    attention: Attention,
    shape: Shape,
    graph: Graph,
    expr: tvm.ir.Expr,
    kind: Literal["add", "keep"],
    masking: Masking,
) -> Masking:
    """Return a masking that reads a tensor of the graph, as far back as the kernel can."""
    for reading in readings_of(expr, graph, scaled=False):
        strides = _strides(attention, reading.view, shape)
        if strides is not None:
            lies_in = sizes_of(reading.base) or ()
            return replace(masking, kind=kind, strides=strides, source=reading.base, shape=lies_in)
    raise NotAttentionError(f"its mask {sizes_of(expr)} lies in a way that no strides describe")


def _made(attention: Attention, shape: Shape, masking: Masking) -> Masking:
    """Return a masking whose tensor is still to be made."""
    parts = [sizes_of(expr) for expr, _ in masking.addends]
    parts += [sizes_of(condition.expr) for condition in masking.conditions]
    made = _broadcast(parts)
    if made is None:
        raise NotAttentionError("its mask has an unknown shape")
    strides = _strides(attention, whole(made), shape)
    if strides is None:
        raise NotAttentionError(f"its mask {made} lies in a way that no strides describe")
    return replace(masking, strides=strides, shape=made)


def _strides(attention: Attention, view: StridedView, shape: Shape) -> BiasStrides | None:
    wide = view.broadcast(shape)
    if wide is None or view.offset != 0:
        return None
    leading = merged(factor for axis in wide.axes[:-2] for factor in axis)
    parts = regrouped(leading, (attention.batch, attention.heads))
    if parts is None:
        return None
    axes = (*parts, *wide.axes[-2:])
    if any(len(axis) > 1 for axis in axes):
        return None
    batch, head, query, key = (axis[0][1] if axis else 0 for axis in axes)
    return batch, head, query, key


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


def _is_finite(expr: tvm.ir.Expr) -> bool:
    return is_constant(expr) and bool(np.isfinite(array_of(expr)).all())
