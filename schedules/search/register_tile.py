"""The search space of a contraction on a CPU: the fallback's register tile with its sizes sampled.

    batch..., n0, m0        parallel
      [pack n1 * v * lanes columns of the right operand]
      rest of the rows..., (n1, m1) or (m1, n1)
        acc[mr, v, lanes] = 0
        k0, k1 (unrolled)   acc += left * right
        epilogue on the tile

Four designs: packed or not, and either order of the two loops over tiles; two for a weight that was packed at compile
time, whose panels fix v. Sampled in each: (n0, n1, v), (m0, m1, mr), (k0, k1). Axes are cut with `sample_perfect_tile`
where they have a divisor in the useful range, since TVM's mutators change those decisions; a row axis without one (197,
a symbolic one) gets its tile from a list and its rest from loop partitioning.
"""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.base import PARTITION_HINT, inline_spatial, schedule_elementwise
from relaxtune.schedules.cpu.contraction import MAX_ROWS, TiledContraction, axis_extent, find_convolution
from relaxtune.schedules.cpu.tiling import find_tiled_matmul, finish_tile, isolate, place_pack, stage_accumulators
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.blocks import element_bytes, static_extent
from relaxtune.schedules.tir.scheduled_blocks import can_partition_loops, find_only_reduction, find_path_to, list_blocks

MAX_VECTORS = 6
MAX_REDUCE_UNROLL = 8
# Neighbouring panels of a packed weight that one core takes before it goes on to the next rows.
MAX_PANELS = 16
# Row tiles for an axis that none of them divides.
ROW_TILES = (1, 2, 4, 5, 6, 7, 8, 10, 12, 14)


def contraction_designs(func: PrimFunc, limits: CpuLimits) -> list[Schedule]:
    """Return the sampled schedules of a function with one contraction, none for any other function."""
    either = (False, True)
    schedules = [_schedule(func, limits, pack=pack, rows_outside=rows) for pack in either for rows in either]
    return [sch for sch in schedules if sch is not None]


def find_contraction(sch: Schedule, limits: CpuLimits) -> TiledContraction | None:
    """Return the only reduction of a function as a contraction, None when it is none or not the only one."""
    reduction = find_only_reduction(sch)
    found = None if reduction is None else find_tiled_matmul(reduction, limits) or find_convolution(reduction, limits)
    return None if found is None else found[0]


def _schedule(func: PrimFunc, limits: CpuLimits, *, pack: bool, rows_outside: bool) -> Schedule | None:
    sch = Schedule(func)
    con = find_contraction(sch, limits)
    if con is None:
        return None
    inline_spatial(sch, keep=find_path_to(sch, con.block))
    con = find_contraction(sch, limits)
    if con is None:
        return None
    lanes = max(1, limits.vector_bytes // element_bytes(str(con.block.stmt.writes[0].source.dtype)))
    columns = con.block.extents[con.column]
    padded = columns is None or columns % lanes != 0
    if pack and (padded or not con.contiguous or con.panel is not None):
        return None  # packed in any case: the same design as without
    epilogue, packing = isolate(sch, con, lanes if padded else None, force_pack=pack)
    stage = stage_accumulators(sch, con, epilogue, padded)
    outer, tile_loop, reduce = _tile(sch, con, rows_outside, lanes, limits.vector_registers)
    finish_tile(sch, con, tile_loop, (epilogue, stage), lanes)
    if packing is not None:
        place_pack(sch, packing, outer[-1], lanes)
    sch.parallel(sch.fuse(*outer))
    done = {str(sch.get(rv).name_hint) for rv in (con.block.rv, epilogue, stage, packing) if rv is not None}
    sch.decompose_reduction(con.block.rv, reduce)
    for other in list_blocks(sch):
        if other.name not in done and other.is_spatial and not other.name.startswith(con.block.name):
            schedule_elementwise(sch, other, limits)
    return sch


def _tile(
    sch: Schedule, con: TiledContraction, rows_outside: bool, lanes: int, registers: int
) -> tuple[list[LoopRV], LoopRV, LoopRV]:
    """Cut the loops of the contraction; return the parallel ones, the innermost over tiles, and the first reduction."""
    loops = sch.get_loops(con.block.rv)
    rows_max = MAX_ROWS
    if con.panel is None:
        vectors, lane = sch.split(loops[con.column], [None, lanes])
        n0, n1, vector = _split_perfect(sch, vectors, 3, MAX_VECTORS)
    else:
        per_panel = con.panel // lanes
        rows_max = max(1, min(MAX_ROWS, (registers - 1 - per_panel) // per_panel))
        panels, vector, lane = sch.split(loops[con.column], [None, per_panel, lanes])
        n0, n1 = _split_perfect(sch, panels, 2, MAX_PANELS)
    batch = [loops[index] for index in con.batch]
    rest = [loops[index] for index in con.rows if index != con.row]
    reduce = [loops[index] for index in con.reduce]
    if static_extent(sch.get(reduce[-1]).extent) is not None:
        outer_k, inner_k = _split_perfect(sch, reduce[-1], 2, MAX_REDUCE_UNROLL)
        sch.unroll(inner_k)
        reduce[-1:] = [outer_k, inner_k]
    tiles, rows, inner_rows = [n1], [], []
    if con.row is not None:
        m0, m1, row = _split_rows(sch, con, loops[con.row], rows_max)
        rows, inner_rows = [m0] if m0 is not None else [], [row]
        tiles = [m1, n1] if rows_outside else [n1, m1]
        sch.unroll(row)
    outer = [*batch, n0, *rows]
    sch.reorder(*outer, *rest, *tiles, *reduce, *inner_rows, vector, lane)
    sch.unroll(vector)
    sch.vectorize(lane)
    return outer, tiles[-1], reduce[0]


def _split_perfect(sch: Schedule, loop: LoopRV, parts: int, innermost: int) -> list[LoopRV]:
    """Cut a loop at sampled divisors; a symbolic loop keeps all of itself in the second part."""
    if static_extent(sch.get(loop).extent) is None:
        unit = [1] * (parts - 2)
        return list(sch.split(loop, [None, *unit, 1]))
    factors: list[ExprRV] = sch.sample_perfect_tile(loop, parts, innermost)
    return list(sch.split(loop, factors))


def _split_rows(
    sch: Schedule, con: TiledContraction, loop: LoopRV, rows_max: int
) -> tuple[LoopRV | None, LoopRV, LoopRV]:
    extent = axis_extent(con.block, con.row) if con.row is not None else 1
    if any(extent % tile == 0 for tile in range(4, rows_max + 1)):
        m0, m1, row = _split_perfect(sch, loop, 3, rows_max)
        return m0, m1, row
    candidates = [tile for tile in ROW_TILES if tile <= min(extent, rows_max)]
    tile = sch.sample_categorical(candidates, [1.0 / len(candidates)] * len(candidates))
    m1, row = sch.split(loop, [None, tile])
    if can_partition_loops(sch):
        sch.annotate(m1, PARTITION_HINT, 1)
    return None, m1, row
