"""Warps of the GEMM kernel that make the statistics of a tile's rows while others multiply, into shared memory.

A thread has whole rows: neighbouring threads read neighbouring rows of the partial sums (`schedules.tir.row_norm`) and
add up their groups in order. Consumers would have to hold partial sums beside their accumulators, and lack registers.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.hopper import arrive
from relaxtune.schedules.templates.emit.registers import clear, load_vector
from relaxtune.schedules.templates.gemm_sm90.plan import STATISTICS_SLOTS, STATISTICS_WARPS, GemmPlan
from relaxtune.schedules.templates.gemm_sm90.ring import Memory
from relaxtune.schedules.templates.gemm_sm90.tiles import Part, Tiles
from relaxtune.schedules.templates.output.row_statistics import RowStatistics, store_statistics
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.row_norm import COUNT, SQUARES, SUM, RowNorm

_THREADS = STATISTICS_WARPS * 32
# Registers for what is on its way: a producer's warpgroup has few.
_REGISTERS = 16


class TileStatistics:
    """Makes and reads the statistics of tiles; the methods emit into the current IRBuilder.

    `partials` is the kernel's parameter; tiles come in the order of `tiles`, and have the slots of `memory` in turn.
    """

    def __init__(
        self, matmul: MatmulFunction, norm: RowNorm, partials: tirx.Var, plan: GemmPlan, tiles: Tiles, memory: Memory
    ) -> None:
        self._matmul, self._norm, self._plan, self._tiles, self._memory = matmul, norm, plan, tiles, memory
        self._partials = T.decl_buffer((norm.groups, matmul.extent, COUNT), "float32", data=partials.data)

    def make(self, thread: tirx.Expr) -> None:
        """Emit the making of all statistics that the block needs; `thread` is a number among those that make them."""
        if self._plan.parameters.dependent:
            T.evaluate(T.ptx.griddepcontrol.wait())
        self._tiles.each(lambda part: self._make_part(part, thread))

    def read(
        self, part: Part, statistics: RowStatistics, first_row: tirx.Expr, row: tirx.Expr, lane: tirx.Expr
    ) -> None:
        """Emit the reading of a tile's statistics by a warp.

        `first_row` is the first of its 16 rows among those of the tile, `row` among those of the output.
        """
        slot, memory = part.turn % STATISTICS_SLOTS, self._memory
        T.evaluate(T.cuda.mbarrier_wait(memory.made.ptr_to([slot]), self._round(part) % 2))
        statistics.take(row, lane, lambda line: memory.statistics.ptr_to([slot, first_row + line, 0]))
        arrive(memory.read.ptr_to([slot]))

    def _make_part(self, part: Part, thread: tirx.Expr) -> None:
        norm, memory, slot = self._norm, self._memory, part.turn % STATISTICS_SLOTS
        block_m = self._plan.parameters.block_m
        rows = math.ceil(block_m / _THREADS)
        T.evaluate(T.cuda.mbarrier_wait(memory.read.ptr_to([slot]), (self._round(part) + 1) % 2))
        sums = T.alloc_local([rows * COUNT], "float32")
        clear(sums)
        step = max(1, _REGISTERS // (rows * COUNT))
        whole = norm.groups // step
        with T.serial(whole, unroll=False) as number:
            self._add(sums, part, thread, rows, number * step, step)
        if norm.groups % step:
            self._add(sums, part, thread, rows, whole * step, norm.groups % step)
        made = T.alloc_local([COUNT], "float32")
        for line in range(rows):
            total = sums[line * COUNT + SUM] if norm.centred else None
            store_statistics(norm, total, sums[line * COUNT + SQUARES], made, 0)
            for which in range(COUNT):
                T.buffer_store(memory.statistics, made[which], [slot, line * _THREADS + thread, which])
        arrive(memory.made.ptr_to([slot]))

    def _add(
        self, sums: tirx.Var, part: Part, thread: tirx.Expr, rows: int, first: tirx.Expr | int, groups: int
    ) -> None:
        """Emit the adding of some groups' partial sums to those of a thread's rows; all are read first."""
        held = T.alloc_local([groups * rows * COUNT], "float32")
        for group in range(groups):
            for line in range(rows):
                row = part.row * self._plan.parameters.block_m + line * _THREADS + thread
                source = self._partials.ptr_to([first + group, tirx.min(row, self._matmul.extent - 1), 0])
                load_vector("global", held, source, COUNT, (group * rows + line) * COUNT)
        for group in range(groups):
            for index in range(rows * COUNT):
                T.buffer_store(sums, sums[index] + held[group * rows * COUNT + index], [index])

    def _round(self, part: Part) -> tirx.Expr:
        return part.turn // STATISTICS_SLOTS
