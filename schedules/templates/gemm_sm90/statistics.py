"""Statistics of the rows of tiles, where a norm is inside the matmul of `template.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.barriers import Barriers
from relaxtune.schedules.templates.emit.kernel_frame import wait_for_predecessor
from relaxtune.schedules.templates.emit.registers import clear, load_vector
from relaxtune.schedules.templates.emit.wgmma import WARPGROUP
from relaxtune.schedules.templates.gemm_sm90.plan import STATISTICS_SLOTS, STATISTICS_WARPS, GemmPlan
from relaxtune.schedules.templates.gemm_sm90.tiles import Part, Tiles
from relaxtune.schedules.templates.output.output_tile import OutputTile
from relaxtune.schedules.templates.output.row_statistics import RowStatistics, store_statistics
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.row_norm import COUNT, SQUARES, SUM, RowNorm

_THREADS = STATISTICS_WARPS * 32
# Registers for what is on its way: a producer's warpgroup has few.
_REGISTERS = 16


class TileStatistics:
    """Makes the statistics of tiles' rows from partial sums, and hands them to the output; nothing without a norm.

    Two warps of the producer's warpgroup make them while others multiply (`plan.statistics_apart`): consumers would
    have to hold partial sums beside their accumulators, and lack registers. A thread has whole rows: neighbouring
    threads read neighbouring rows of the partial sums (`schedules.tir.row_norm`) and add up their groups in order. They
    go to shared memory, in slots that tiles have in turn; a slot has two barriers: its statistics are made, and read.
    Else consumers make them (`schedules.templates.output.row_statistics`).

    `params` are the kernel's; tiles come in the order of `tiles`.
    """

    def __init__(self, matmul: MatmulFunction, plan: GemmPlan, tiles: Tiles, params: Sequence[tirx.Var]) -> None:
        self._matmul, self._plan, self._tiles, self._params = matmul, plan, tiles, params
        self._rows: RowStatistics | None = None

    @property
    def _norm(self) -> RowNorm:
        assert self._matmul.norm is not None
        return self._matmul.norm

    def allocate(self, pool: T.SMEMPool) -> list[tuple[Barriers, ...]]:
        """Take shared memory, if it needs any, and return the barriers."""
        if not self._plan.statistics_apart:
            return []
        shape = STATISTICS_SLOTS, self._plan.parameters.block_m, COUNT
        self._slots = pool.alloc(shape, "float32", align=16)
        self._made = Barriers(pool, STATISTICS_SLOTS, _THREADS)
        self._read = Barriers(pool, STATISTICS_SLOTS, self._plan.groups * WARPGROUP)
        return [(self._made, self._read)]

    def begin(self) -> None:
        """Emit the view of the partial sums for the warps that make statistics."""
        if self._plan.statistics_apart:
            shape, data = (self._norm.groups, self._matmul.extent, COUNT), self._params[self._norm.partials].data
            self._partials = T.decl_buffer(shape, "float32", data=data)

    def make(self, thread: tirx.Expr) -> None:
        """Emit the making of all statistics of the block in the last warps of the producer's, which do not load."""
        if self._plan.statistics_apart:
            making = thread - (self._plan.threads - _THREADS)
            with T.If(making >= 0), T.Then():
                wait_for_predecessor(self._plan.parameters.dependent, launches=False)
                self._tiles.each(lambda part: self._make_part(part, making))

    def begin_rows(self) -> None:
        """Emit what a consumer needs before its first tile."""
        if self._matmul.norm is not None:
            partials = self._params[self._norm.partials]
            self._rows = RowStatistics(self._matmul, self._norm, partials, self._plan.m_blocks)

    def read(self, row: tirx.Expr, lane: tirx.Expr) -> None:
        """Emit what a consumer's warp reads before a tile's sum is made; `row` is the first of its 16 rows."""
        if self._rows is not None and not self._plan.statistics_apart:
            self._rows.read(row, lane)
            if not self._plan.hold_partials:
                self._rows.finish()

    def hand_on(self, output: OutputTile, part: Part, first_row: tirx.Expr, lane: tirx.Expr, rank: tirx.Expr) -> None:
        """Emit the statistics of a warp's rows after the sum, for the output, and their writing where that is wanted.

        `first_row` is the warp's first one among those of the tile, `rank` the block's in its cluster.
        """
        p = self._plan.parameters
        if self._rows is None:
            return
        if self._plan.statistics_apart:
            slot, number = self._slot(part)
            self._made.wait(slot, number % 2)
            row = part.row * p.block_m + first_row
            self._rows.take(row, lane, lambda line: self._slots.ptr_to([slot, first_row + line, 0]))
            self._read.arrive(slot)
        elif self._plan.hold_partials:
            self._rows.finish()
        output.take_statistics(self._norm.buffer, self._rows.statistic)
        if self._norm.output is not None:
            with T.If(tirx.all(part.column == 0, *([rank == 0] if p.split_k > 1 else []))), T.Then():
                self._rows.write(self._params[self._norm.output])

    def _slot(self, part: Part) -> tuple[tirx.Expr, tirx.Expr]:
        """Return a part's slot, and how many parts had it before."""
        return part.turn % STATISTICS_SLOTS, part.turn // STATISTICS_SLOTS

    def _make_part(self, part: Part, thread: tirx.Expr) -> None:
        norm, (slot, number) = self._norm, self._slot(part)
        rows = math.ceil(self._plan.parameters.block_m / _THREADS)
        self._read.wait(slot, (number + 1) % 2)
        sums = T.alloc_local([rows * COUNT], "float32")
        clear(sums)
        step = max(1, _REGISTERS // (rows * COUNT))
        whole = norm.groups // step
        with T.serial(whole, unroll=False) as turn:
            self._add(sums, part, thread, rows, turn * step, step)
        if norm.groups % step:
            self._add(sums, part, thread, rows, whole * step, norm.groups % step)
        made = T.alloc_local([COUNT], "float32")
        for line in range(rows):
            total = sums[line * COUNT + SUM] if norm.centred else None
            store_statistics(norm, total, sums[line * COUNT + SQUARES], made, 0)
            for which in range(COUNT):
                T.buffer_store(self._slots, made[which], [slot, line * _THREADS + thread, which])
        self._made.arrive(slot)

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
