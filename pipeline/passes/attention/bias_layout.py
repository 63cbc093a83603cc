"""Where the mask of an attention lies in the tensor that a kernel reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relaxtune.pipeline.passes.attention.find_attention import Attention
from relaxtune.pipeline.passes.attention.strided_view import Factors, StridedView, merged, regrouped
from relaxtune.pipeline.passes.kit.sizes import Shape, Size
from relaxtune.pipeline.passes.symbolic.tables import TablePlaces


@dataclass(frozen=True)
class BiasLayout:
    """Strides in elements, and the rest, as `schedules.functions.attention.ScoreBias` has them."""

    batch: Size
    head: Size
    query: Size
    key: Size
    offset: Size = 0
    limit: int = 0
    period: int = 0


def bias_layout(attention: Attention, view: StridedView, shape: Shape) -> BiasLayout | None:
    """Return where a view, which broadcasts to scores of some shape, lies; None where no strides describe it."""
    wide = view.broadcast(shape)
    if wide is None:
        return None
    leading = merged(factor for axis in wide.axes[:-2] for factor in axis)
    parts = regrouped(leading, (attention.batch, attention.heads))
    if parts is None:
        return None
    period = _period(parts[0])
    axes = (parts[0][1:] if period else parts[0], parts[1], *wide.axes[-2:])
    if any(len(axis) > 1 for axis in axes):
        return None
    batch, head, query, key = (axis[0][1] if axis else 0 for axis in axes)
    return BiasLayout(batch, head, query, key, offset=wide.offset, period=period)


def _period(axis: Factors) -> int:
    """Return after how many places an axis repeats, 0 for never."""
    if len(axis) != 2 or axis[0][1] != 0:
        return 0
    size = axis[1][0]
    return size if isinstance(size, int) else 0


def along_table(attention: Attention, layout: BiasLayout, shape: Shape, places: TablePlaces) -> BiasLayout | None:
    """Return where a mask, laid out in a tensor of some shape, lies in the table of that; None where no strides say it.

    What counts in the table are queries and keys: along those alone a kernel stays inside.
    """
    if layout.offset != 0 or layout.period:
        return None
    own = [(math.prod(shape[axis + 1 :]), size) for axis, size in enumerate(shape)]
    wanted = (
        (layout.batch, attention.batch),
        (layout.head, attention.heads),
        (layout.query, attention.queries),
        (layout.key, attention.keys),
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
    return BiasLayout(batch, head, query, key, offset=places.offset, limit=places.limit)
