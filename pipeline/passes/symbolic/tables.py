"""Functions that read a table of positions: the mark that they carry, and where their elements lie in the table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import is_op, static_shape
from relaxtune.pipeline.passes.kit.sizes import Size, plain, sizes_of

#: Of a function that reads a table; its third operand, if there is one, is for positions that the table does not have.
TABLE_ATTR = "relaxtune.table"


@dataclass(frozen=True)
class TablePlaces:
    """Where the elements of a tensor lie in a table.

    Element (i, j, ...) of the tensor is element `offset` and each index times its axis's stride of the table, which is
    row-major; of the part that goes with the axes that count (`counting`), no less than 0 and no more than `limit`.
    """

    table: tvm.ir.Expr
    strides: tuple[Size, ...]
    counting: tuple[bool, ...]
    offset: Size
    limit: int


def table_mark(axes: Sequence[int | None], first: int, low: int) -> str:
    """Return the mark of a function of (integers, table) that takes the table where the integer is `low` as the first.

    `axes` says of each axis which one of the integers it is, None for one of the table's own; along the axis that is
    `first` the table has its places.
    """
    return json.dumps({"axes": list(axes), "first": first, "low": low})


def table_places(expr: tvm.ir.Expr, graph: Graph) -> TablePlaces | None:
    """Return where a tensor lies in a table along which its integers count, None for any other tensor."""
    value = graph.value(expr)
    if not is_op(value, "call_tir") or not isinstance(value.args[0], tvm.ir.GlobalVar):
        return None
    func = graph.mod[value.args[0]]
    mark = func.attrs.get(TABLE_ATTR) if isinstance(func, tirx.PrimFunc) and func.attrs else None
    if not mark:
        return None
    known = json.loads(str(mark))
    integers, table = value.args[1].fields[:2]
    found, shape, sizes = graph.known.count_of(integers), static_shape(table), sizes_of(expr)
    if found is None or shape is None or sizes is None:
        return None
    axes = known["axes"]
    own = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    at = axes.index(known["first"])
    strides = tuple(
        own[place] if axis is None else plain(found.steps[axis] * own[at]) for place, axis in enumerate(axes)
    )
    counting = tuple(axis is not None for axis in axes)
    offset = plain((found.start - known["low"]) * own[at])
    return TablePlaces(table, strides, counting, offset, (shape[at] - 1) * own[at])
