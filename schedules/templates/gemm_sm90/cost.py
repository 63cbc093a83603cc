"""A time to order the candidates of `template.py` by: the first is taken where nothing was measured.

It is what each of four things would take alone, in a sum that leans to the longest, and what comes on top::

    (arithmetic^4 + memory^4 + L2^4 + chain^4)^(1/4) + tiles, one after another + blocks + writing + reduction

With `stream_k`, a block's run counts as one sum, its parts as tiles, and what blocks hand over as the reduction.

`chain` is one stage of the ring after another; L2 is what all tiles load. B that several rows of tiles read at about
the same time takes longer than once. Of 8-bit operands, a stage has twice the elements of K and takes as long;
the constants are those of 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import DataType

from relaxtune.schedules.templates.emit.wgmma import ROW_BYTES
from relaxtune.schedules.templates.gemm_sm90.plan import GemmPlan
from relaxtune.schedules.templates.gemm_sm90.tiles import GridSizes
from relaxtune.schedules.tir.epilogue import MatmulFunction

_NORM = 4
# Clusters stay within a group of multiprocessors, whose numbers differ: blocks of a cluster -> clusters that an H200's
# 132 hold at a time, one block each (cuOccupancyMaxActiveClusters).
_CLUSTERS = {2: 66, 3: 39, 4: 30, 6: 17, 8: 15}
_CLUSTERS_OF = 132
# Of sizes that are not listed, the part of the multiprocessors that is used.
_PART_USED = 0.77
# Loading parts of B for each other costs 0 to 5 % more than it saves of L2; kernels that run into the power limit gain
# 2 %.
_MULTICAST = 1.03
_MULTICAST_LONG = 0.98
_LONG_US = 50.0
# With symbolic rows, where partial sums of rows are written, blocks that make one tile after another without turns are
# slower in a model than blocks of one tile each: BERT-base of 8 x 512 tokens took 1.05 times as long on an H100.
_TILES_IN_TURN = 1.15
# And where residuals are read after the sum, for want of registers.
_LATE_RESIDUAL = 1.05
# Bytes of an element of C as the fit counted them, whatever the dtype, and of the operands that it is of.
_FITTED_BYTES = 2
# Of 8 bits, set by 214 medians of those shapes: what adding up a stage's sums apart takes an accumulator, and makes of
# turns, in which nothing else multiplies meanwhile; and how much longer an epilogue of integers takes.
_ADDING_US = 0.0015
_ADDING_IN_TURN = 1.5
_INTEGER_WRITE = 2.0
# Of sums that are handed over through global memory, and of an element of each that a warpgroup moves: a fit to 31
# medians. And how much faster than others such a kernel has to look to come before them.
_STREAM_US = 3.75
_STREAM_SUM_US = 1.02e-4
_STREAM_DOUBT = 1.13
# Starting a second warpgroup that has no tile.
_IDLE_US = 1.0
# Columns of B in a row of shared memory of 128 bytes.
_CHUNK_MAX = 64
# Up to this many, a matmul waits for its weights, not for arithmetic.
_FEW_ROWS = 64
# Saved besides by a projection of few rows that rotates heads on half of the multiprocessors: attention over caches
# that grow comes next, and reads and writes them on the other half meanwhile (4 % of Llama-1B's decode step of 16
# rows).
_BESIDE_ATTENTION_US = 0.5
_SHARED_BYTES = 233_472
_RESERVED_BYTES = 1024
_REGISTERS = 65_536
# Beside the accumulators, and threads of a block with one consumer.
_REGISTERS_BESIDE = 56
_SMALL_BLOCK_THREADS = 160


# The constants from here on are those of an H200: a least-squares fit (9 % root mean square) to 1092 medians, cold L2,
# of kernels of the shapes of benchmarks/kernels/bench_gemm_sm90.py. The first kernel of a shape takes 1 % longer than
# its fastest one (geometric mean; at most 13 %).
# In a microsecond: multiply-adds of a multiprocessor, of 16-bit operands; bytes of the GPU from memory.
_MULTIPLY_ADDS, _MEMORY_BYTES = 2.805e6, 4.103e6
# From L2 to all multiprocessors; by 604 medians of an H100 (benchmarks/results/h100-model-matmuls.json).
_L2_BYTES = 13.5e6
# Of a load, which a ring hides as far as it is deep; of one stage of the ring at least.
_LATENCY_US, _STEP_US = 1.532, 0.1383
# Of beginning and ending a tile; of each block that a multiprocessor gets.
_TILE_US, _BLOCK_US = 1.214, 0.3693
# Of an element of a tile, evaluated and written by a warpgroup (hidden with `pingpong`).
_WRITE_US = 5.223e-5
# Of a reduction by a cluster, of each of its blocks, and of an element of each.
_CLUSTER_US, _SHARE_US, _SUM_US = 0.4387, 0.1201, 1.581e-4
# Part of B's bytes that every doubling of the rows of tiles adds.
_REREAD = 0.1958
# Factor of the arithmetic of many rows where B as [K, N] lies in chunks of less than 64 columns of a wider tile; the
# latter where one warpgroup multiplies at a time.
_NARROW, _NARROW_ALONE = 1.211, 1.8
# Saved by a kernel on half of the multiprocessors, which begins beside the one before it.
_BESIDE_US = 0.1683
# Part of `_TILE_US` that `pingpong` does not hide behind the other warpgroup's sum, by 674 medians.
_SHOWN = 0.5


def predicted_us(matmul: MatmulFunction, plan: GemmPlan, sm_count: int) -> float:
    """Return a kernel's time in microseconds as the model has it."""
    return predictor(matmul, plan, sm_count)(matmul.m)


def predictor(matmul: MatmulFunction, plan: GemmPlan, sm_count: int) -> Callable[[int], float]:
    """Return the function that gives the time of a plan's kernel for a number of rows.

    Tables ask for dozens of numbers: what does not depend on it is done once.
    """
    p = plan.parameters
    resident = 1
    if p.consumers == 1:
        registers = plan.m_blocks * p.block_n // 2 + _REGISTERS_BESIDE
        by_memory = _SHARED_BYTES // (plan.shared_bytes + _RESERVED_BYTES)
        resident = max(1, min(by_memory, _REGISTERS // (_SMALL_BLOCK_THREADS * registers)))
    slots: float = sm_count * resident
    if p.split_k > 1:
        held = _CLUSTERS.get(p.split_k)
        slots *= _PART_USED if held is None else held * p.split_k / _CLUSTERS_OF
    # Instructions of few columns take as long as those of 64.
    work = p.block_m * max(p.block_n, 64) * ROW_BYTES // _FITTED_BYTES
    narrow = plan.chunk < _CHUNK_MAX < p.block_n and not matmul.b_transposed
    size = plan.operands.bytes
    written = _FITTED_BYTES if size == _FITTED_BYTES else DataType(matmul.output_dtype).bits // 8
    step_us, in_turn_factor = _STEP_US, 1.0
    if plan.operands.exact_sums:
        step_us += plan.m_blocks * p.block_n // 2 * _ADDING_US
        in_turn_factor = _ADDING_IN_TURN if p.pingpong else 1.0
    rotates = bool(matmul.epilogue.head)
    columns, accumulators = plan.shares.columns, plan.shares.accumulators
    warpgroups = 1 if p.pingpong else p.consumers
    integer_factor = _INTEGER_WRITE if plan.operands.integer else 1.0
    k_share, k_tiles, cluster = plan.k_share, plan.k_tiles, plan.cluster
    tile_bytes = (p.multicast * plan.rows_a + p.block_n) * ROW_BYTES

    def predicted(rows: int) -> float:
        grid = GridSizes.of(plan, rows)
        tiles_m, tiles, made_by = int(grid.tiles_m), int(grid.tiles), int(grid.blocks)
        blocks = made_by * cluster
        # With `stream_k`, `k_share` is of all that a block makes.
        tiles_each = 1 if p.stream_k else math.ceil(tiles / made_by)
        in_turn = math.ceil(blocks / slots) * tiles_each
        on_one = math.ceil(blocks / sm_count) * tiles_each
        if resident > 1 and blocks > sm_count:
            on_one = math.ceil(blocks * tiles_each / sm_count)
        arithmetic = on_one * k_share * work / _MULTIPLY_ADDS
        if narrow and rows > _FEW_ROWS:
            arithmetic *= _NARROW_ALONE if plan.groups == 1 else _NARROW
        arithmetic *= in_turn_factor
        of_b = matmul.n * matmul.k * (1 + _REREAD * math.log2(tiles_m))
        memory = ((rows * matmul.k + of_b) * size + rows * matmul.n * written) / _MEMORY_BYTES
        from_l2 = tiles * k_tiles * tile_bytes / _L2_BYTES
        chain = in_turn * k_share * step_us
        if k_share > p.stages:
            chain = max(chain, in_turn * k_share * _LATENCY_US / p.stages)
        beside = _BESIDE_US if 2 * blocks <= sm_count else 0.0
        if beside and rotates and rows <= _FEW_ROWS:
            beside += _BESIDE_ATTENTION_US
        longest: float = sum(one**_NORM for one in (arithmetic, memory, from_l2, chain)) ** (1 / _NORM)
        # A block with one tile has nothing to hide it behind.
        in_turns = p.pingpong and tiles > made_by
        write = 0.0 if in_turns else on_one * p.block_m * columns / warpgroups * _WRITE_US
        write *= integer_factor
        reduce = 0.0
        if p.split_k > 1:
            # Of shares as they would be, were they not rounded up to whole groups of sums.
            elements = min(p.block_m, rows) * p.block_n / accumulators / p.split_k
            reduce = _CLUSTER_US + p.split_k * (_SHARE_US + elements * _SUM_US)
        idle = _IDLE_US if p.pingpong and not in_turns else 0.0
        tiles_us = in_turn * _TILE_US * (_SHOWN if in_turns else 1.0)
        if p.stream_k:
            tiles_us *= max(1.0, k_share / plan.k_tiles)
            write *= math.ceil(k_share / plan.k_tiles)
            # A block hands over one part, and adds up the other parts of its tile.
            parts = 1 + max(1.0, plan.k_tiles / k_share)
            reduce = _STREAM_US + parts * min(p.block_m, rows) * p.block_n / p.consumers * _STREAM_SUM_US
        total = longest + tiles_us + blocks / sm_count * _BLOCK_US + write + reduce + idle - beside
        if p.stream_k:
            total *= _STREAM_DOUBT
        if matmul.rows is not None and matmul.partials is not None:
            total *= _TILES_IN_TURN if p.blocks and not p.pingpong else 1.0
            total *= 1.0 if plan.shares.prefetched else _LATE_RESIDUAL
        if p.multicast == 1:
            return total
        return total * (_MULTICAST if total < _LONG_US or size < _FITTED_BYTES else _MULTICAST_LONG)

    return predicted
