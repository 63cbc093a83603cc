"""Row-wise reductions on a CPU: softmax, layer norm, RMS norm, mean, sum, max.

Blocks of the kinds S...SR (reduce a row) and S...SS (walk a row), all over the same leading rows. Softmax is
max (SR), exp (SS), sum (SR), divide (SS).

1. Inline what is elementwise and read once; what is costly and read by several stays.
2. Each reduction whose innermost loop is the reduced one gets one partial result a vector lane: split the reduced axis
   by the lanes, `rfactor` the lanes out, so that LLVM sees a vector accumulator and need not reassociate on its own.
3. Rows are parallel; the row loops of all blocks are merged into one, so that a row stays in L1.
4. Loops along the row are vector loops.

The order of summation differs from the serial one (one partial sum a lane), which for the sums of a row is the more
accurate order. A row whose length is no multiple of the lanes is summed by its whole vectors and a short serial rest.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.ir import TensorRegion
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.base import (
    PARTITION_HINT,
    cpu_limits,
    inline_spatial,
    vectorize_loop,
    work_of,
    worth_parallel,
)
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.blocks import element_bytes, static_extent
from relaxtune.schedules.tir.expressions import is_zero, used_vars
from relaxtune.schedules.tir.scheduled_blocks import (
    ScheduledBlock,
    can_partition_loops,
    has_bound_check,
    is_canonical,
    list_blocks,
)


def row_reduction(func: PrimFunc, target: Target) -> Schedule | None:
    """Return the schedule of blocks that all walk or reduce rows of the same leading axes; None for others."""
    sch = Schedule(func)
    if not all(is_canonical(sch, block) for block in list_blocks(sch)):
        return None
    inline_spatial(sch)
    blocks = list_blocks(sch)
    rows = count_shared_rows(sch, blocks)
    if rows == 0 or not any(block.is_reduction for block in blocks):
        return None
    if [block.name for block in blocks if not sch.get_consumers(block.rv)] != [blocks[-1].name]:
        return None
    limits = cpu_limits(target)
    lanes = [split_lanes(sch, block, limits) for block in blocks if block.is_reduction]
    _merge_rows(sch, rows, limits, [rv for rv in lanes if rv is not None])
    return sch


def count_shared_rows(sch: Schedule, blocks: list[ScheduledBlock]) -> int:
    """Return how many leading data-parallel loops count the same rows in every block; 0 for no blocks.

    The loops have equal extents, and what one block writes and another reads is indexed by them on both sides. Extents
    alone do not tell: a softmax over the first axis of a square reads the sums of other rows than its own.
    """
    if not blocks:
        return 0
    leading = [len(block.kinds) - len(block.kinds.lstrip("S")) for block in blocks]
    extents = [[sch.get(loop).extent for loop in sch.get_loops(block.rv)] for block in blocks]
    shared = 0
    while shared < min(leading) and all(tvm_ffi.structural_equal(row[shared], extents[0][shared]) for row in extents):
        if not _pass_rows_on(blocks, shared):
            break
        shared += 1
    return shared


def _pass_rows_on(blocks: list[ScheduledBlock], place: int) -> bool:
    """Whether what these blocks write and read of one another has their axis at a place as its index there."""
    passed_on = [
        write.source
        for block in blocks
        for write in block.stmt.writes
        if any(read.source.same_as(write.source) for other in blocks for read in other.stmt.reads)
    ]
    return all(
        _is_indexed_by(access, block.stmt.iter_vars[place], place)
        for block in blocks
        for access in (*block.stmt.reads, *block.stmt.writes)
        if any(access.source.same_as(source) for source in passed_on)
    )


def _is_indexed_by(access: TensorRegion, axis: tirx.IterVar, place: int) -> bool:
    if place >= len(access.region):
        return False
    start = access.region[place].min
    return bool(start.same_as(axis.var)) or (static_extent(axis.dom.extent) == 1 and is_zero(start))


def split_lanes(sch: Schedule, block: ScheduledBlock, limits: CpuLimits) -> SBlockRV | None:
    """Give a reduction along a contiguous axis one partial result a lane, and return their block; leave any other.

    A symbolic axis stays serial: it may be shorter than a vector, and then `rfactor` leaves the partial results of the
    lanes past its end without an initial value.
    """
    if block.kinds.count("R") != 1 or not block.kinds.endswith("R"):
        return None
    reduced = block.stmt.iter_vars[-1]
    extent = static_extent(reduced.dom.extent)
    lanes = limits.vector_bytes // element_bytes(str(block.stmt.writes[0].source.dtype))
    contiguous = any(read.region and _steps_by_one(read.region[-1].min, reduced.var) for read in block.stmt.reads)
    if not contiguous or extent is None or extent < 2 * lanes:
        return None
    if extent % lanes and not can_partition_loops(sch):
        return None
    _, lane = sch.split(sch.get_loops(block.rv)[-1], [None, lanes])
    return sch.rfactor(lane, len(block.stmt.writes[0].region))


def _steps_by_one(index: tirx.Expr, axis: tirx.Var) -> bool:
    """Whether an index is an axis, or the axis beside what does not depend on it."""
    return bool(index.same_as(axis)) or (
        isinstance(index, tirx.Add) and index.b.same_as(axis) and axis not in used_vars(index.a)
    )


def _merge_rows(sch: Schedule, rows: int, limits: CpuLimits, in_lanes: list[SBlockRV]) -> None:
    """Put all blocks under one loop over rows, with vector loops along the row and for the results of lanes."""
    blocks = list_blocks(sch)
    works = [work_of(sch, block.rv) for block in blocks]
    known = [work for work in works if work is not None]
    parallel = worth_parallel(sum(known) if len(known) == len(works) else None)
    inner = [sch.get_loops(block.rv)[rows:] for block in blocks]
    row_loops = [sch.fuse(*sch.get_loops(block.rv)[:rows]) for block in blocks]
    # `merge`, not `compute_at`: the latter rebuilds the inner loops and drops the bound check of a split one.
    row = sch.merge(*row_loops) if len(row_loops) > 1 else row_loops[0]
    if parallel:
        sch.parallel(row)
    partial: list[tuple[SBlockRV, LoopRV]] = []
    for block, loops in zip(blocks, inner, strict=True):
        lanes = limits.vector_bytes // element_bytes(str(block.stmt.writes[0].source.dtype))
        if block.is_spatial and loops:
            vectorize_loop(sch, loops[-1], lanes)
        elif any(sch.get(rv).same_as(block.stmt) for rv in in_lanes):
            sch.vectorize(loops[-1])
            if has_bound_check(sch, block):
                # TVM does not see the split axis as affine once the block is taken apart: the initialisation stays.
                sch.annotate(loops[-2], PARTITION_HINT, 1)
            else:
                partial.append((block.rv, loops[-2]))
    # Last of all: a block whose initialisation was split off is no longer one that loops may be changed around.
    for rv, loop in partial:
        sch.decompose_reduction(rv, loop)
