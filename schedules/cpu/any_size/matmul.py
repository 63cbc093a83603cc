"""Matrix products of symbolic size on a CPU: packed weights, batches of two activations, any epilogue.

    C[b..., m..., n] = epilogue(sum over k of L[b..., m..., k] * R[b..., k, n])

Rows `m` of all axes are counted by one number M, which is known when the kernel is called; so may be columns and k.
A tile of rows x vectors of C is kept in vector registers over the whole reduction:

    parallel b..., part of M, job of column tiles  one tile, or panels of packed weights: `cut` says how many
      group of row tiles                           one tile, or several
        part of k
          column tile                              the last one begins early enough to be whole
            block of k
              row tile in M // rows:  rows         the last one begins early enough to be whole
              the rest of M:          one tile of fewer rows, or two where one would have few (16 rows: 8 and 8)
                acc[rows, vectors] = 0 or sums[column tile, row tile]
                k: acc += L[row] (broadcast) * R[vector];  tiles fetch the next block of weights
                sums[column tile, row tile] = acc  constant indices, so that the accumulators are registers
            C = epilogue(sums)                     after the last part

A part of M is all of it, or the rows of one core: see `row_tiles`. Rows and columns that two tiles share are computed
twice, to the same value. Where a tile of fewer rows ends past the last row, that one is computed again. Columns of
fewer than a tile run through a plain loop, which LLVM makes vectors of.

Bytes, where a core adds four products in one step, are the same loops over words: a lane's step takes four bytes along
k of a row, and of a column, that lie side by side (AVX-512 or AVX VNNI, VPDPBUSD: uint8 times int8, exact in int32).

Where a core has a tile unit, many rows of packed weights are computed on it, also where all sizes are known: see
`tile_kernel`.
"""

from __future__ import annotations

import tvm
from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.any_size.matmul_kernel import ProductKernel
from relaxtune.schedules.cpu.any_size.product import ELEMENT_BYTES, SET_STRIDE_BYTES, Product, find_cut
from relaxtune.schedules.cpu.any_size.tile_kernel import fills_tiles
from relaxtune.schedules.cpu.base import cpu_limits, inline_spatial
from relaxtune.schedules.cpu.contraction import MAX_ROWS, TiledContraction, find_matmul, lanes_of
from relaxtune.schedules.cpu.tiling import find_epilogue
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.blocks import position_of, written_params
from relaxtune.schedules.tir.contraction import are_axes
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock, block_facts, find_only_reduction, list_blocks

# Vectors of columns that no panel and no size gives: two hide the latency of the multiply-add behind 14 rows.
_VECTORS = 2
_VECTORS_MAX = 4
# The second cache of every processor with a tile unit so far, from Sapphire Rapids to Granite Rapids.
_TILES_L2_BYTES = 2 << 20


def any_size_matmul(func: PrimFunc, target: Target) -> Schedule | None:
    """Return the kernel of a float32 matmul of a symbolic size, or that fills tiles, or of bytes; None for others."""
    found = find_product(func, cpu_limits(target))
    if found is None or not (found.is_symbolic or fills_tiles(found) or found.con.group > 1):
        return None
    return Schedule(tvm.IRModule({"main": ProductKernel(found).build()}))


def find_product(func: PrimFunc, limits: CpuLimits) -> Product | None:
    """Return the product that a function is, cut by the caches; None where its kernel would not make it."""
    sch = Schedule(func)
    block = find_only_reduction(sch)
    if block is None:
        return None
    inline_spatial(sch)
    con = find_matmul(block_facts(sch, block.rv))
    epilogue = None if con is None else find_epilogue(sch, con.block.rv)
    if con is None or len(list_blocks(sch)) != (1 if epilogue is None else 2):
        return None
    return _find(sch.mod["main"], con, None if epilogue is None else block_facts(sch, epilogue), limits)


def _find(func: PrimFunc, con: TiledContraction, epilogue: ScheduledBlock | None, limits: CpuLimits) -> Product | None:
    block = con.block
    operands = (con.left.source, con.right.source)
    if len(con.reduce) != 1 or not con.contiguous or block.init is None:
        return None
    dtypes = tuple(str(buffer.dtype) for buffer in (*operands, block.store.buffer))
    if dtypes != (("float32",) * 3 if con.group == 1 else ("uint8", "int8", "int32")):
        return None
    if con.group > 1 and not (limits.has_byte_dot and are_axes(con.left.indices[-1:], [block.axes[con.reduce[0]]])):
        return None
    # Neither operand is made inside the function, and C is its only result.
    written = written_params(func)
    if any(position_of(func, buffer) is None or position_of(func, buffer) in written for buffer in operands):
        return None
    if [position_of(func, (epilogue or block).store.buffer)] != [*written]:
        return None
    lanes = lanes_of("float32", limits)
    columns = block.extents[con.column]
    vectors = _VECTORS if con.panel is None else con.panel // lanes
    if con.panel is None and columns is not None:
        fitting = [count for count in range(1, _VECTORS_MAX + 1) if columns % (count * lanes) == 0]
        vectors = max(fitting, default=min(_VECTORS, columns // lanes))
    if vectors < 1 or vectors > _VECTORS_MAX or vectors * lanes != (con.panel or vectors * lanes):
        return None
    rows = min(MAX_ROWS, (limits.vector_registers - 1 - vectors) // vectors)
    length = con.steps
    if limits.l1_bytes is not None and length is not None and length * ELEMENT_BYTES % SET_STRIDE_BYTES == 0:
        rows = min(rows, max(1, limits.l1_bytes // SET_STRIDE_BYTES))
    tiles = limits.l2_bytes or _TILES_L2_BYTES if limits.has_tiles and con.group == 1 else 0
    return Product(func, con, epilogue, vectors, lanes, rows, find_cut(con, limits, rows), tiles)
