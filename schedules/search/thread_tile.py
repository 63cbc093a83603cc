"""The search space of a contraction on a GPU's ordinary lanes: tiles in shared memory and in registers.

    blockIdx.x    batch..., row blocks, column blocks
      threadIdx.x   threads along the rows x threads along the columns
        acc[r, c] = 0
        k0          the operands' tiles to shared memory, by all threads, some elements at once
          k1, r, c  acc += left * right
        epilogue on the thread's tile

Sampled are threads along rows and columns, the tile of a thread (r, c), the part of the reduction that is in shared
memory at a time, the elements of a copy, and how far loops are unrolled. The choices are such that any of them together
keep to the limits of a block (threads, shared memory, registers), so that no candidate is drawn in vain: of those of
MetaSchedule's multi-level tiling, whose sizes are cut from the extents at random, 90 to 97 of 100 exceed a limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir.expr import TensorLoad
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, SBlockRV
from tvm.tirx import PrimFunc

from relaxtune.schedules.targets import CudaLimits
from relaxtune.schedules.tir.blocks import element_bytes, static_extent
from relaxtune.schedules.tir.contraction import find_operands
from relaxtune.schedules.tir.scheduled_blocks import (
    ScheduledBlock,
    block_facts,
    can_inline,
    find_only_reduction,
    list_blocks,
)

THREADS_DOWN = (2, 4, 8, 16)
THREADS_ACROSS = (8, 16, 32)
TILE_DOWN = (1, 2, 4, 8)
TILE_ACROSS = (1, 2, 4, 8)
DEPTHS = (4, 8, 16, 32)
UNROLL_STEPS = (0, 16, 64, 512)
# Bytes of one load.
LOAD_BYTES = 16


def thread_tile_designs(func: PrimFunc, limits: CudaLimits) -> list[Schedule]:
    """Return the sampled schedule of a function with one contraction and what is elementwise around it, or nothing."""
    sch = Schedule(func)
    isolated = isolate_contraction(sch)
    if isolated is None:
        return []
    contraction, epilogue = isolated
    operands = find_operands(contraction.store)
    if operands is None:
        return []
    sch.set_scope(contraction.rv, 0, "local")
    _tile(sch, contraction, epilogue, operands, limits)
    return [sch]


def isolate_contraction(sch: Schedule) -> tuple[ScheduledBlock, SBlockRV] | None:
    """Return the only contraction of a function, and the only block after it: a copy where there was none.

    Elementwise blocks are inlined first. None for a function with other blocks, or whose last block reads the sums in
    another order than it writes its own output.
    """
    reduction = find_only_reduction(sch)
    if reduction is None:
        return None
    for block in list_blocks(sch):
        if can_inline(sch, block):
            sch.compute_inline(block.rv)
    contraction = block_facts(sch, reduction.rv)
    spatial = contraction.kinds.count("S")
    first, *others = list_blocks(sch)
    if first.name != contraction.name or spatial < 1 or contraction.kinds != "S" * spatial + "R":
        return None
    if not others:
        return contraction, sch.cache_write(contraction.rv, 0, "global")
    if len(others) != 1 or not others[0].is_spatial:
        return None
    written = contraction.stmt.writes[0].source
    iterators = [one.var for one in others[0].stmt.iter_vars]
    for read in others[0].stmt.reads:
        indices = [region.min for region in read.region]
        if read.source.same_as(written) and len(indices) == len(iterators) == spatial:
            same = all(index.same_as(var) for index, var in zip(indices, iterators, strict=True))
            return (contraction, others[0].rv) if same else None
    return None


def _tile(
    sch: Schedule,
    contraction: ScheduledBlock,
    epilogue: SBlockRV,
    operands: tuple[TensorLoad, TensorLoad],
    limits: CudaLimits,
) -> None:
    loops = sch.get_loops(epilogue)
    *batch, column = loops
    row = batch.pop() if batch else None
    columns = static_extent(sch.get(column).extent) or 1
    rows = 1 if row is None else static_extent(sch.get(row).extent) or 1
    across = sample(sch, _up_to(THREADS_ACROSS, columns))
    wide = sample(sch, _up_to(TILE_ACROSS, columns // THREADS_ACROSS[-1]))
    column_blocks, column_thread, column_tile = sch.split(column, [None, across, wide])
    outer, threads, tile = [*batch, column_blocks], [column_thread], [column_tile]
    if row is not None:
        down = sample(sch, _up_to(THREADS_DOWN, rows))
        high = sample(sch, _up_to(TILE_DOWN, rows // THREADS_DOWN[-1]))
        row_blocks, row_thread, row_tile = sch.split(row, [None, down, high])
        outer, threads, tile = [*batch, row_blocks, column_blocks], [row_thread, column_thread], [row_tile, column_tile]
    sch.reorder(*outer, *threads, *tile)
    block, thread = sch.fuse(*outer), sch.fuse(*threads)
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    sch.compute_at(contraction.rv, thread, preserve_unit_loops=True)
    *_, reduce = sch.get_loops(contraction.rv)
    depth = static_extent(sch.get(reduce).extent) or 1
    inner = sch.get_loops(contraction.rv)[2:-1]
    chunks, steps = sch.split(reduce, [None, sample(sch, _up_to(DEPTHS, depth))])
    sch.reorder(chunks, steps, *inner)
    for load in operands:
        reads = sch.get(contraction.rv).reads
        position = next(at for at, read in enumerate(reads) if read.source.same_as(load.source))
        copy = sch.cache_read(contraction.rv, position, "shared")
        sch.compute_at(copy, chunks, preserve_unit_loops=True)
        sch.fuse(*sch.get_loops(copy)[len(sch.get_loops(contraction.rv)) - 2 - len(inner) + 1 :])
        lanes = [1 << bit for bit in range((LOAD_BYTES // element_bytes(str(load.source.dtype))).bit_length())]
        sch.annotate(copy, "meta_schedule.cooperative_fetch", sample(sch, lanes))
    root = sch.get_sblock("root")
    sch.annotate(root, "meta_schedule.unroll_explicit", sample(sch, UNROLL_STEPS))


def sample(sch: Schedule, choices: Sequence[int]) -> ExprRV:
    """Return one of some numbers, each as likely."""
    return sch.sample_categorical(list(choices), [1.0 / len(choices)] * len(choices))


def _up_to(choices: Sequence[int], extent: int) -> Sequence[int]:
    """Return the choices that an axis can fill, at least the first."""
    return [choice for choice in choices if choice <= extent] or choices[:1]
