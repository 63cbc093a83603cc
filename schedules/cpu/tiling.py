"""The schedule of a contraction: packing, register tile, epilogue, threads (see `contraction` for the picture)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Var
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.base import (
    PARTITION_HINT,
    cpu_limits,
    inline_spatial,
    schedule_elementwise,
    vectorize_loop,
    worth_parallel,
)
from relaxtune.schedules.cpu.contraction import (
    FEW_ROWS,
    Tile,
    TiledContraction,
    axis_extent,
    choose_tile,
    find_matmul,
    needs_padding,
    stride_is_one,
)
from relaxtune.schedules.cpu.generic import schedule_reduction_plainly
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.blocks import same_sizes, static_extent
from relaxtune.schedules.tir.expressions import is_zero, used_vars
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.scheduled_blocks import (
    ScheduledBlock,
    block_facts,
    can_partition_loops,
    find_only_reduction,
    find_path_to,
    is_canonical,
    is_costly,
    list_blocks,
    loop_extents,
)

Found = tuple[TiledContraction, Tile]


def contraction_rule(
    find: Callable[[ScheduledBlock, CpuLimits], Found | None],
) -> Callable[[PrimFunc, Target], Schedule | None]:
    """Return a rule for functions with one reduction, a contraction; `find` returns its roles and tile."""

    def apply(func: PrimFunc, target: Target) -> Schedule | None:
        sch, limits = Schedule(func), cpu_limits(target)
        reduction = find_only_reduction(sch)
        if reduction is None or find(reduction, limits) is None:
            return None
        inline_spatial(sch, keep=find_path_to(sch, reduction))
        found = find(block_facts(sch, reduction.rv), limits)
        if found is None:
            return None
        schedule_contraction(sch, *found, limits)
        return sch

    return apply


def find_tiled_matmul(block: ScheduledBlock, limits: CpuLimits) -> Found | None:
    """Return the roles of a matmul's loops and its tile, None when the block is not one that a tile is good for.

    Where one row is multiplied by a matrix that lies along the sum (the keys of a cache, any number of them), a panel
    would be packed for a single use: products along the sum (`cpu.reduction`) take a fraction of that.
    """
    con = find_matmul(block)
    if con is None:
        return None
    along_sum = not con.contiguous and stride_is_one(con.right, block.axes[con.reduce[-1]])
    if con.row is None and along_sum and block.extents[con.column] is None:
        return None
    return con, choose_tile(con, limits)


def normed_matmul(func: PrimFunc, target: Target) -> Schedule | None:
    """Return the schedule of a matmul with statistics of rows or partial sums; None for any other function.

    Kernels of such matmuls on a GPU are compared with it. The statistics before the product, and the partial sums of
    its result after it (`schedules.tir.row_norm`), are loops of their own.
    """
    found = recognise_matmul(func)
    if isinstance(found, Refusal) or (found.norm is None and found.partials is None):
        return None
    sch = Schedule(func)
    blocks = list_blocks(sch)
    products = [block for block in blocks if find_matmul(block) is not None]
    if len(products) != 1 or not all(is_canonical(sch, block) for block in blocks):
        return None
    statistics = [block.name for block in found.norm.blocks] if found.norm is not None else []
    inline_spatial(sch, keep=[*statistics, *find_path_to(sch, products[0])])
    if found.norm is not None:
        # What reads statistics cannot be moved under the product's loops; a copy of the sums is, in its place.
        sch.cache_write(products[0].rv, 0, "global")
    con = find_matmul(next(block for block in list_blocks(sch) if block.name == products[0].name))
    if con is None:
        return None
    limits = cpu_limits(target)
    schedule_contraction(sch, con, choose_tile(con, limits), limits)
    return sch


def schedule_contraction(sch: Schedule, con: TiledContraction, tile: Tile, limits: CpuLimits) -> None:
    """Tile, pack, vectorise, unroll and parallelise a contraction with its epilogue; the other blocks run plainly."""
    block = con.block
    partitioned = _can_partition(con, tile) and can_partition_loops(sch)
    padded = needs_padding(con, tile) and not partitioned
    batch = math.prod(axis_extent(block, position) for position in con.batch)
    weights = _find_dequantisation(sch, con)
    epilogue, pack = isolate(sch, con, tile.columns if padded else None)
    pack = weights or pack
    stage = stage_accumulators(sch, con, epilogue, padded)
    loops = _tile_loops(sch, con, tile)
    if partitioned:
        sch.annotate(loops.panel, PARTITION_HINT, 1)
    finish_tile(sch, con, loops.row_tile, (epilogue, stage), tile.lanes)
    if pack is not None:
        place_pack(sch, pack, loops.panel, tile.lanes)
    if partitioned:
        sch.parallel(loops.panel)
    elif padded and 4 * limits.cores <= batch < math.inf and can_partition_loops(sch):
        # Every core takes whole matrices, and only the last panel of each is checked for its end.
        sch.annotate(loops.panel, PARTITION_HINT, 1)
        sch.parallel(sch.fuse(*loops.outer[:-1]))
    else:
        _parallelize(sch, con, loops, limits, packs=pack is not None)
    done = [str(sch.get(rv).name_hint) for rv in (block.rv, epilogue, stage, pack) if rv is not None]
    sch.decompose_reduction(block.rv, loops.reduce)
    for other in list_blocks(sch):
        if other.name not in done and other.is_reduction:
            schedule_reduction_plainly(sch, other)
        elif other.name not in done and other.is_spatial:
            schedule_elementwise(sch, other, limits)


def _find_dequantisation(sch: Schedule, con: TiledContraction) -> SBlockRV | None:
    """Return the block that makes panels of the right operand out of bytes, None where there is none.

    It is placed like a block that packs: each panel is made once, by the core that reads it.
    """
    if con.panel is None:
        return None
    for producer in sch.get_producers(con.block.rv):
        facts = block_facts(sch, producer)
        writes = any(write.source.same_as(con.right.source) for write in facts.stmt.writes)
        if writes and facts.is_spatial and any(str(read.source.dtype) == "uint8" for read in facts.stmt.reads):
            return producer
    return None


def _can_partition(con: TiledContraction, tile: Tile) -> bool:
    """Whether the last, partial panel can run in a loop of its own instead of padding the right operand.

    Padding copies the whole operand, which pays off only when many rows use the copy. A partial panel is scalar code,
    which pays off when few rows run through it. The panel loop has to be
    the only parallel one: a fused loop cannot be cut.
    """
    columns = con.block.extents[con.column]
    rows = math.prod(axis_extent(con.block, position) for position in con.rows)
    batch = math.prod(axis_extent(con.block, position) for position in con.batch)
    wide = columns is not None and columns % tile.columns != 0 and columns > 8 * tile.columns
    return wide and con.contiguous and rows <= FEW_ROWS and batch == 1


@dataclass(frozen=True)
class _Loops:
    """The loops of a tiled contraction, outermost first; `panel` is in `outer`, and `row_tile` is the innermost."""

    outer: list[LoopRV]
    panel: LoopRV
    rest: list[LoopRV]
    row_tile: LoopRV
    reduce: LoopRV
    row_exact: bool


def isolate(
    sch: Schedule, con: TiledContraction, pad_to: int | None, force_pack: bool = False
) -> tuple[SBlockRV, SBlockRV | None]:
    """Return the epilogue block (a plain copy where there is none) and the block that packs the right operand.

    The vector axis is padded to a multiple of `pad_to`, which packs. Without padding, the operand is packed where it is
    not contiguous or `force_pack` says so.
    """
    block = con.block
    epilogue = find_epilogue(sch, con.block.rv)
    pack: SBlockRV | None = None
    if pad_to is not None:
        sch.pad_einsum(block.rv, [pad_to if i == con.column else 1 for i in range(len(block.kinds))])
        crop = sch.get_consumers(block.rv)[0]
        for producer in sch.get_producers(block.rv):
            if any(read.source.same_as(con.right.source) for read in sch.get(producer).reads):
                pack = producer
        if epilogue is None:
            epilogue = crop
        else:
            sch.compute_inline(crop)
    elif force_pack or not con.contiguous:
        right = next(at for at, read in enumerate(sch.get(block.rv).reads) if read.source.same_as(con.right.source))
        pack = sch.cache_read(block.rv, right, "global")
    if pack is not None and not con.contiguous:
        column = block.axes[con.column]
        at = next(dim for dim, index in enumerate(con.right.indices) if column in used_vars(index))
        sch.transform_layout(pack, ("write", 0), _moved_last(at))
    if epilogue is None:
        epilogue = sch.cache_write(block.rv, 0, "global")
    return epilogue, pack


def stage_accumulators(sch: Schedule, con: TiledContraction, epilogue: SBlockRV, padded: bool) -> SBlockRV | None:
    """Put the accumulators in registers; return the block that copies them to a tile on the stack, None without one.

    The epilogue addresses registers only if it is unrolled. It stays a loop, and reads the stack, where unrolling would
    repeat much code, where it is bound-checked, and where the output is not contiguous along the vectors.
    """
    column_last = con.column == max((*con.batch, *con.rows, con.column))
    if not padded and column_last and not is_costly(block_facts(sch, epilogue)):
        sch.set_scope(con.block.rv, 0, "local")
        return None
    stage = sch.cache_write(con.block.rv, 0, "local")
    sch.set_scope(stage, 0, "local")
    if not column_last:
        at = sorted((*con.batch, *con.rows, con.column)).index(con.column)
        sch.transform_layout(con.block.rv, ("write", 0), _moved_last(at))
        sch.transform_layout(stage, ("write", 0), _moved_last(at))
    return stage


def finish_tile(
    sch: Schedule, con: TiledContraction, tile_loop: LoopRV, readers: tuple[SBlockRV, SBlockRV | None], lanes: int
) -> None:
    """Move the epilogue and the stage, if any, under the loop over tiles, and vectorise them."""
    epilogue, stage = readers
    if stage is not None:
        sch.reverse_compute_at(stage, tile_loop, preserve_unit_loops=True)
        _unroll_tile(sch, con, stage, lanes)
    sch.reverse_compute_at(epilogue, tile_loop, preserve_unit_loops=True)
    if stage is None:
        _unroll_tile(sch, con, epilogue, lanes)
    elif con.column == max((*con.batch, *con.rows, con.column)):
        vectorize_loop(sch, sch.get_loops(epilogue)[-1], lanes)


def place_pack(sch: Schedule, pack: SBlockRV, loop: LoopRV, lanes: int) -> None:
    """Pack under a loop, and write the packed panel in vectors along its innermost axis."""
    sch.compute_at(pack, loop, preserve_unit_loops=True)
    facts = block_facts(sch, pack)
    inner = sch.get_loops(pack)[-len(facts.kinds) :]
    last = facts.stmt.body.indices[-1]
    at = next(i for i, iter_var in enumerate(facts.stmt.iter_vars) if last.same_as(iter_var.var))
    sch.reorder(*(loop for i, loop in enumerate(inner) if i != at), inner[at])
    vectorize_loop(sch, inner[at], lanes)


def find_epilogue(sch: Schedule, product: SBlockRV) -> SBlockRV | None:
    """Return the only reader of C when it walks C element by element and nothing beyond, else None.

    A reader beyond C (a Pad behind it) would leave unwritten what lies outside all tiles.
    """
    block, readers = block_facts(sch, product), sch.get_consumers(product)
    if len(readers) != 1:
        return None
    reader = block_facts(sch, readers[0])
    if not reader.is_spatial or not is_canonical(sch, reader) or not isinstance(reader.stmt.body, tirx.BufferStore):
        return None
    iters = [iter_var.var for iter_var in reader.stmt.iter_vars]
    whole = [size for size, kind in zip(block.sizes, block.kinds, strict=True) if kind == "S"]
    if len(reader.sizes) != len(whole):
        return None
    for size, most in zip(reader.sizes, whole, strict=True):
        numbers = isinstance(size, int) and isinstance(most, int)
        if not (size <= most if numbers else same_sizes([size], [most])):
            return None
    accumulator = block.stmt.body.buffer
    for read in reader.stmt.reads:
        if read.source.same_as(accumulator):
            starts = [axis.min for axis in read.region]
            same = len(starts) == len(iters) and all(
                start.same_as(var) or (is_zero(start) and extent == 1)
                for start, var, extent in zip(starts, iters, loop_extents(sch, reader.rv), strict=True)
            )
            return readers[0] if same else None
    return None


def _tile_loops(sch: Schedule, con: TiledContraction, tile: Tile) -> _Loops:
    loops = sch.get_loops(con.block.rv)
    panel, inner_column = sch.split(loops[con.column], [None, tile.columns])
    vector, lane = sch.split(inner_column, [None, tile.lanes])
    reduce = [loops[index] for index in con.reduce]
    rest = [loops[index] for index in con.rows if index != con.row]
    outer = [*(loops[index] for index in con.batch), panel]
    row_exact = True
    if con.row is None:
        sch.reorder(*outer, *rest, *reduce, vector, lane)
        row_tile = panel
    else:
        row_extent = static_extent(sch.get(loops[con.row]).extent)
        row_exact = row_extent is not None and row_extent % tile.rows == 0
        row_tile, inner_row = sch.split(loops[con.row], [None, tile.rows])
        sch.reorder(*outer, *rest, row_tile, *reduce, inner_row, vector, lane)
        sch.unroll(inner_row)
        if row_extent is not None and not row_exact and can_partition_loops(sch):
            sch.annotate(row_tile, PARTITION_HINT, 1)
    sch.unroll(vector)
    sch.vectorize(lane)
    return _Loops(outer, panel, rest, row_tile, reduce[0], row_exact)


def _unroll_tile(sch: Schedule, con: TiledContraction, rv: SBlockRV, lanes: int) -> None:
    """Unroll rows and vectors of a block that reads the accumulators, so that each is addressed by a constant."""
    spatial = sorted((*con.batch, *con.rows, con.column))
    inner = sch.get_loops(rv)[-len(spatial) :]
    by_position = dict(zip(spatial, inner, strict=True))
    vector, lane = sch.split(by_position[con.column], [None, lanes])
    row = [by_position[con.row]] if con.row is not None else []
    sch.reorder(*row, vector, lane)
    for loop in (*row, vector):
        sch.unroll(loop)
    sch.vectorize(lane)


def _moved_last(at: int) -> Callable[..., list[Var]]:
    """Return the index map that moves one axis behind all others."""

    def moved(*axes: Var) -> list[Var]:
        return [*axes[:at], *axes[at + 1 :], axes[at]]

    return moved


def _parallelize(sch: Schedule, con: TiledContraction, loops: _Loops, limits: CpuLimits, packs: bool) -> None:
    """Share panels among the cores; where they are few, row tiles too (not under a packed panel, which all share)."""
    known = [extent for extent in con.block.extents if extent is not None]
    if not worth_parallel(math.prod(known) if len(known) == len(con.block.extents) else None):
        return
    taken = list(loops.outer)
    further = list(loops.rest)
    if loops.row_exact and con.row is not None:
        further.append(loops.row_tile)

    def jobs() -> float:
        extents = [static_extent(sch.get(loop).extent) for loop in taken]
        return math.prod(math.inf if extent is None else extent for extent in extents)

    while further and not packs and jobs() < 4 * limits.cores:
        taken.append(further.pop(0))
    sch.parallel(sch.fuse(*taken))
