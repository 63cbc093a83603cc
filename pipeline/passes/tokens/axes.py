"""Axes of a tensor that are rows of a batch or places in them, and the values of the tensor at padding.

An axis is a product of factors, the outermost first: [B, S, H] has three axes of one factor each, [B * S, H] an axis
of two. Only tensors are followed that differ from the graph's at padding, or that hold a known number there. Of any
other tensor nothing is said: it is the graph's everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import TypeAlias

import numpy as np

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.passes.kit.known_values import COMPUTED, MASKED
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, quotient


class MixesTokensError(UsageError):
    """An operation on tokens that needs the padding; the message says why."""


class Kind(StrEnum):
    """The things that an axis counts: rows of the batch, places of a row, or anything else."""

    BATCH = "batch"
    PLACE = "place"
    OTHER = "other"


class Pad(Enum):
    """The content of a tensor at padding: the graph's values, any finite ones, or such that softmax gives 0."""

    EXACT = "exact"
    ANY = "any"
    LOW = "low"


# A number is what graph and tensor both hold there.
Padding: TypeAlias = "Pad | float"


@dataclass(frozen=True)
class Factor:
    """A factor of an axis; `pad` is of places."""

    kind: Kind
    size: Size
    pad: Padding = Pad.EXACT

    @property
    def is_clean(self) -> bool:
        """Whether all along it lies what the graph has."""
        return self.pad not in (Pad.ANY, Pad.LOW)


Axis: TypeAlias = "tuple[Factor, ...]"
Axes: TypeAlias = "tuple[Axis, ...]"


def plain_axes(shape: Shape) -> Axes:
    """Return the axes of a tensor that nothing is known of."""
    return tuple(() if size == 1 else (Factor(Kind.OTHER, size),) for size in shape)


def is_clean(axes: Axes) -> bool:
    """Return whether a tensor is the graph's everywhere."""
    return all(factor.is_clean for axis in axes for factor in axis)


def kinds(axis: Axis) -> tuple[Kind, ...]:
    """Return what an axis counts."""
    return tuple(factor.kind for factor in axis)


def places(axes: Axes) -> list[Factor]:
    """Return the factors that are places."""
    return [factor for axis in axes for factor in axis if factor.kind is Kind.PLACE]


def leading(axes: Axes) -> int | None:
    """Return how many leading axes are rows and places, [B, S, ...] or [B * S, ...]; None for any other order."""
    if len(places(axes)) != 1:
        return None
    if kinds(axes[0]) == (Kind.BATCH, Kind.PLACE):
        return 1
    return 2 if len(axes) > 1 and kinds(axes[0]) == (Kind.BATCH,) and kinds(axes[1]) == (Kind.PLACE,) else None


def degraded(axes: Axes) -> Axes:
    """Return the axes of what is computed of each row apart: a number at padding becomes another one."""
    return tuple(tuple(replace(one, pad=Pad.EXACT if one.is_clean else Pad.ANY) for one in axis) for axis in axes)


def broadcast(name: str, shape: Shape, operands: Sequence[Axes | float | None]) -> Axes:
    """Return the axes of an elementwise operation, or of the leading axes of a product.

    `name`: the operator's.
    `shape`: of the result.
    `operands`: of each operand its axes; a number; or None for a tensor that is the graph's.
    Raises `MixesTokensError`: rows of the batch or places of one operand meet other ones of another operand.
    """
    result = []
    for position, size in enumerate(shape):
        from_last = len(shape) - position
        own: list[Axis | float | None] = [
            one if not isinstance(one, tuple) else one[-from_last] if len(one) >= from_last else None
            for one in operands
        ]
        known = [axis for axis in own if isinstance(axis, tuple) and axis]
        along = [axis for axis in known if set(kinds(axis)) != {Kind.OTHER}]
        if not along:
            result.append(known[0] if known else plain_axes((size,))[0])
            continue
        if any([(one.kind, one.size) for one in axis] != [(one.kind, one.size) for one in along[0]] for axis in along):
            raise MixesTokensError(f"its operands have tokens along different axes, of sizes {shape}")
        joined = []
        for place, factor in enumerate(along[0]):
            pads = [_pad_of(one, place, along) for one in own]
            joined.append(replace(factor, pad=_combined(name, pads)) if factor.kind is Kind.PLACE else factor)
        result.append(tuple(joined))
    if sum(kinds(axis).count(Kind.BATCH) for axis in result) > 1:
        raise MixesTokensError("it combines each row of the batch with each other row")
    return tuple(result)


def _pad_of(axis: Axis | float | None, place: int, along: Sequence[Axis]) -> Padding:
    if isinstance(axis, float):
        return axis
    return axis[place].pad if axis and any(axis is one for one in along) else Pad.EXACT


def _combined(name: str, pads: Sequence[Padding]) -> Padding:
    """Return what an elementwise operation gives at padding."""
    first = pads[0]
    if name == "where" and isinstance(first, float):
        return pads[1] if first else pads[2]
    if (name == "multiply" and 0.0 in pads) or (name == "logical_and" and 0.0 in pads):
        return 0.0
    if name == "logical_or" and 1.0 in pads:
        return 1.0
    numbers = [pad for pad in pads if isinstance(pad, float)]
    if len(numbers) == len(pads):
        if name in COMPUTED:
            with np.errstate(all="ignore"):
                return float(COMPUTED[name](*numbers))
        return numbers[0] if name in ("concat", "broadcast_to") and len(set(numbers)) == 1 else Pad.EXACT
    if _stays_low(name, pads):
        return Pad.LOW
    return Pad.ANY if Pad.ANY in pads or Pad.LOW in pads else Pad.EXACT


def _stays_low(name: str, pads: Sequence[Padding]) -> bool:
    low = [is_low(pad) for pad in pads]
    if name in ("add", "minimum"):
        return any(low)
    if name == "subtract":
        return low[0] or (isinstance(pads[1], float) and pads[1] >= -MASKED)
    if name in ("multiply", "divide"):
        # The factors that scores have.
        return low[0] and isinstance(pads[1], float) and 0.01 < pads[1] < 100
    return all(low[1:] if name == "where" else low) and name in ("where", "maximum", "astype", "concat", "broadcast_to")


def is_low(pad: Padding) -> bool:
    """Return whether a score is so low that softmax gives 0 beside one of a token."""
    return pad is Pad.LOW or (isinstance(pad, float) and pad <= MASKED)


def regrouped(axes: Axes, shape: Shape) -> Axes | None:
    """Return the axes of a reshape; None where factors of tokens would be cut, or sizes do not tell."""
    waiting = [factor for axis in axes for factor in axis]
    result = []
    for size in shape:
        axis: list[Factor] = []
        rest = size
        if size == 1 and waiting and waiting[0].size == 1:
            axis.append(waiting.pop(0))
        while rest != 1:
            if not waiting:
                return None
            factor = waiting.pop(0)
            left = quotient(rest, factor.size)
            if left is None:
                inner = quotient(factor.size, rest)
                if inner is None or factor.kind is not Kind.OTHER:
                    return None
                waiting.insert(0, Factor(Kind.OTHER, inner))
                factor, left = Factor(Kind.OTHER, rest), 1
            axis.append(factor)
            rest = left
        result.append(tuple(axis))
    return None if any(factor.size != 1 for factor in waiting) else tuple(result)
