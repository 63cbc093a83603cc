"""Attention of symbolic lengths on a CPU: no score leaves the first two caches.

    S[b..., m, n] = epilogue(sum over d of Q[b..., m, d] * K[b..., d, n])
    P[b..., m, :] = softmax(S[b..., m, :])
    O[b..., m, e] = epilogue(sum over n of P[b..., m, n] * V[b..., n, e])

`e` has a static size of whole vectors; epilogues scale, mask, transpose. Q and V may lie in a larger tensor, with K.

    parallel b..., part of the rows     where V lies in a larger tensor, its rows are copied first, once for the part
    group of row tiles                  all tiles have the same number of rows: the last one begins early enough
      scores[rows, n]                   rows are a little longer than n, so that they do not share sets of the cache
      column tile of S, row tile:       rows x vectors in registers over d; stored to scores
      row:                              epilogue and softmax without its division, in scores
      column tile of O, row tile:       rows x vectors in registers over n; divided by the row's sum; its epilogue

Columns at the end that a mask hides from all rows of a group (a later token, padding) cost little: where the epilogue
is a choice that does not read S, S is not computed, and weights of 0 are multiplied by V once for all rows.
A row tile that is not full runs through code for a few rows more, whose last rows are repeated and then ignored.
Fewer columns of S than a vector run through a plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.any_size.attention_kernel import Attention, AttentionKernel
from relaxtune.schedules.cpu.any_size.emit import View
from relaxtune.schedules.cpu.any_size.product import ELEMENT_BYTES, SET_STRIDE_BYTES, Product
from relaxtune.schedules.cpu.any_size.rows import Rows
from relaxtune.schedules.cpu.base import cpu_limits, inline_spatial
from relaxtune.schedules.cpu.contraction import MAX_ROWS, TiledContraction, find_matmul, lanes_of
from relaxtune.schedules.cpu.tiling import find_epilogue
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.blocks import position_of, same_sizes, shape_of
from relaxtune.schedules.tir.contraction import are_axes
from relaxtune.schedules.tir.expressions import depends_on, list_loads, substitute
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock, block_facts, is_canonical, list_blocks

_VECTORS = 2


def any_size_attention(func: PrimFunc, target: Target) -> Schedule | None:
    """Return the kernel of two float32 matmuls with a softmax, or another walk of rows, between; None for others."""
    found = _find(Schedule(func), cpu_limits(target))
    return None if found is None else Schedule(tvm.IRModule({"main": AttentionKernel(found).build()}))


def _find(sch: Schedule, limits: CpuLimits) -> Attention | None:
    blocks = list_blocks(sch)
    if not all(is_canonical(sch, block) for block in blocks):
        return None
    if [find_matmul(block) is not None for block in blocks if not block.is_spatial].count(True) != 2:
        return None
    inline_spatial(sch, keep=_around_the_walk(blocks))
    blocks = list_blocks(sch)
    products = [place for place, block in enumerate(blocks) if find_matmul(block) is not None]
    if len(products) != 2 or len(blocks) - products[1] > 2:
        return None
    moved = blocks[: products[0]]
    first, second = (find_matmul(blocks[place]) for place in products)
    if first is None or second is None:
        return None
    views = {
        block.store.buffer: view for block in moved if (view := _rows_elsewhere(sch.mod["main"], block, first, second))
    }
    if len(views) < len(moved):
        return None
    epilogue = find_epilogue(sch, second.block.rv)
    last = None if epilogue is None else block_facts(sch, epilogue)
    if len(blocks) - products[1] != (1 if last is None else 2):
        return None
    func, walk = sch.mod["main"], blocks[products[0] + 1 : products[1]]
    lanes = lanes_of("float32", limits)
    width = second.block.extents[second.column]
    readable = [*func.params, *views]
    if not _is_scores(readable, first) or width is None or width % lanes or limits.vector_registers <= 2 * _VECTORS:
        return None
    kept, numbers = _kept_in_row(walk, first.block)
    if not kept or position_of(func, (last or second.block).store.buffer) is None:
        return None
    places = _places(readable, first, second, kept[-1])
    if places is None:
        return None
    blocks, total = _without_division(walk, kept, numbers)
    vectors = _VECTORS if width % (_VECTORS * lanes) == 0 else 1
    rows = min(MAX_ROWS, (limits.vector_registers - 1 - _VECTORS) // _VECTORS)
    sizes = first.block.sizes
    return Attention(
        func,
        Product(func, first, None, _VECTORS, lanes, rows),
        Rows(func, tuple(blocks), sizes[: first.column], sizes[first.column], numbers, None, lanes),
        Product(func, second, last, vectors, lanes, rows),
        kept,
        places,
        rows,
        total,
        _seen(walk[0], first.block),
        views,
        limits.cores,
    )


def _rows_elsewhere(
    func: PrimFunc, block: ScheduledBlock, first: TiledContraction, second: TiledContraction
) -> View | None:
    """Return where Q or V lies in a parameter, when a block does no more than move its rows; None for any other block.

    Rows of Q a multiple of 4 KiB apart share a set of the first cache, so that a copy is better. V is copied in any
    case, by each job.
    """
    value, made = block.store.value, block.store.buffer
    is_q, is_v = made.same_as(first.left.source), made.same_as(second.right.source)
    if not block.is_spatial or not isinstance(value, TensorLoad) or is_q == is_v:
        return None
    shape = shape_of(value.source)
    if shape is None or position_of(func, value.source) is None or not are_axes(block.store.indices, block.spatial):
        return None
    row, depth = block.spatial[-2:]
    *outer, last = value.indices
    place = next((place for place, index in enumerate(outer) if are_axes([index], [row])), None)
    if place is None or any(depends_on(index, [row]) for index in (*outer[:place], *outer[place + 1 :], last)):
        return None
    start = tvm.sym.Analyzer().simplify(last - depth)
    if any(depends_on(index, [depth]) for index in (*outer, start)):
        return None
    inner = [size for size in shape[place + 1 :] if isinstance(size, int)]
    is_known = len(inner) == len(shape) - place - 1
    if not is_known or (is_q and math.prod(inner) * ELEMENT_BYTES % SET_STRIDE_BYTES == 0):
        return None

    def at(element: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        values = dict(zip(block.spatial, element, strict=True))
        return [substitute(index, values) for index in value.indices]

    return View(value.source, at)


def _without_division(
    walk: list[ScheduledBlock], kept: Sequence[tirx.Var], numbers: Sequence[tirx.Var]
) -> tuple[list[ScheduledBlock], tirx.Var | None]:
    """Return a walk without a division of the row by one of its numbers at the end, and that number.

    O is divided by it instead, which has fewer columns.
    """
    value = walk[-1].store.value
    if len(kept) < 2 or not walk[-1].store.buffer.same_as(kept[-1]) or not isinstance(value, tirx.Div):
        return walk, None
    row, number = value.a, value.b
    if not isinstance(row, TensorLoad) or not isinstance(number, TensorLoad) or not row.source.same_as(kept[-2]):
        return walk, None
    total = next((one for one in numbers if number.source.same_as(one)), None)
    return (walk, None) if total is None else (walk[:-1], total)


def _seen(block: ScheduledBlock, scores: ScheduledBlock) -> tirx.Expr | None:
    """Return the condition without which a block does not read S; None where it has none, or is no walk of rows."""
    choice = block.store.value
    if not block.is_spatial or len(block.axes) != len(scores.spatial) or not isinstance(choice, tirx.Select):
        return None

    def reads(expr: tirx.Expr) -> bool:
        return any(load.source.same_as(scores.store.buffer) for load in list_loads(expr))

    if reads(choice.condition) or (reads(choice.true_value) and reads(choice.false_value)):
        return None
    return choice.condition if reads(choice.true_value) else tirx.Not(choice.condition)


def _around_the_walk(blocks: Sequence[ScheduledBlock]) -> list[str]:
    """Return the blocks whose results are read by a walk of rows, and by the two products: not to be inlined."""
    read = [load.source for block in blocks if not block.is_spatial for load in list_loads(block.store.value)]
    return [
        block.name
        for block in blocks
        if block.is_spatial and any(source.same_as(block.store.buffer) for source in read)
    ]


def _is_scores(readable: Sequence[tirx.Var], con: TiledContraction) -> bool:
    """Whether a product is of two tensors that can be read, with one axis of rows before symbolic columns."""
    block, axes = con.block, len(con.block.spatial)
    return (
        _is_float(con)
        and all(_is_one_of(load.source, readable) for load in (con.left, con.right))
        and len(con.reduce) == 1
        and con.contiguous
        and con.panel is None
        and con.rows == (axes - 2,)
        and con.column == axes - 1
        and block.extents[con.column] is None
    )


def _places(
    readable: Sequence[tirx.Var], first: TiledContraction, second: TiledContraction, weights: tirx.Var
) -> tuple[int | None, ...] | None:
    """Return `places` where the second product multiplies rows of the weights by a tensor that can be read."""
    block, left = second.block, second.left
    plain = _is_float(second) and len(second.reduce) == 1 and second.contiguous and second.panel is None
    if not plain or not left.source.same_as(weights) or not _is_one_of(second.right.source, readable):
        return None
    *batch, row, column = left.indices
    if len(second.rows) != 1 or not are_axes([row, column], [block.axes[second.rows[0]], *block.reduced]):
        return None
    if not same_sizes([first.block.sizes[first.column]], [block.sizes[second.reduce[0]]]):
        return None
    found: list[int | None] = []
    for place, index in enumerate(batch):
        axis = next((axis for axis in second.batch if block.axes[axis].same_as(index)), None)
        if axis is None and first.block.extents[place] != 1:
            return None
        found.append(axis)
    others = [axis for axis in second.batch if axis not in found]
    distinct = len({axis for axis in found if axis is not None}) == sum(axis is not None for axis in found)
    return tuple(found) if distinct and all(block.extents[axis] == 1 for axis in others) else None


def _is_one_of(buffer: tirx.Var, buffers: Sequence[tirx.Var]) -> bool:
    return any(buffer.same_as(one) for one in buffers)


def _is_float(con: TiledContraction) -> bool:
    buffers = (con.left.source, con.right.source, con.block.store.buffer)
    return con.block.init is not None and {str(buffer.dtype) for buffer in buffers} == {"float32"}


def _kept_in_row(
    walk: Sequence[ScheduledBlock], scores: ScheduledBlock
) -> tuple[tuple[tirx.Var, ...], tuple[tirx.Var, ...]]:
    """Return the tensors as wide as S, each of which may take the place of the one before, and those of a number a row.

    Both are empty where a row of S has to be read after another one took its place, or away from its own place.
    """
    width, rows, columns = len(scores.spatial), scores.sizes[: len(scores.spatial) - 1], scores.sizes[-2]
    kept, numbers = [scores.store.buffer], list[tirx.Var]()
    for block in walk:
        loads, store, wide_axes = list_loads(block.store.value), block.store, len(block.axes) == width
        sizes = block.sizes
        ends_in_rows = same_sizes(sizes[: width - 1], rows)
        if str(store.buffer.dtype) != "float32" or not ends_in_rows or not are_axes(store.indices, block.spatial):
            return (), ()
        if wide_axes and not same_sizes(sizes[width - 1 :], [columns]):
            return (), ()
        if block.kinds not in ("S" * width, "S" * (width - 1) + "R", "S" * (width - 1)):
            return (), ()
        # What may be read of the tensors made here: the latest row, at its own place, and numbers of this row.
        readable = [(kept[-1], block.axes), *((number, block.axes[: width - 1]) for number in numbers)]
        for load in loads:
            axes = next((axes for one, axes in readable if load.source.same_as(one)), None)
            if axes is None and any(load.source.same_as(one) for one in kept):
                return (), ()
            if axes is not None and not are_axes(load.indices, axes):
                return (), ()
        if block.is_spatial and wide_axes:
            kept.append(store.buffer)
        else:
            numbers.append(store.buffer)
    return tuple(kept), tuple(numbers)
