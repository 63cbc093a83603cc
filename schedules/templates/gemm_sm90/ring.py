"""The ring of tiles of the GEMM kernel in shared memory, its barriers, and the warps that load and make statistics."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.hopper import Ring, arrive, expect_bytes, initialise_barrier, load_tile
from relaxtune.schedules.templates.emit.kernel_frame import shared_pool, wait_for_predecessor
from relaxtune.schedules.templates.emit.registers import clear, load_vector
from relaxtune.schedules.templates.gemm_sm90.plan import STATISTICS_SLOTS, STATISTICS_WARPS, WARPGROUP, GemmPlan
from relaxtune.schedules.templates.gemm_sm90.tiles import ClusterSum, Part, Tiles
from relaxtune.schedules.templates.output.output_tile import OutputTile
from relaxtune.schedules.templates.output.row_statistics import RowStatistics, store_statistics
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.row_norm import COUNT, SQUARES, SUM, RowNorm


class Memory:
    """A block's shared memory; creating it emits the allocation.

    `tile_a` and `tile_b` are stages of tiles, swizzled as wgmma takes them. `full` and `empty` have a barrier for each
    stage: its tiles have arrived; their consumers are done with them. `turn` has a barrier for each of two warpgroups
    that take turns to multiply. `statistics` has those of the rows of tiles, where warps make them; of each of its
    slots, `made` and `read` have a barrier: statistics are there; their readers are done with them.
    What the cluster's sum, if there is one, and the output need lies between tiles and barriers.
    """

    def __init__(self, plan: GemmPlan, output: OutputTile, cluster_sum: ClusterSum | None) -> None:
        self._plan = plan
        p, operands = plan.parameters, plan.operands
        # It starts at a multiple of 1024 bytes, as swizzle atoms need: on sm_90 the system reserves the first KiB of a
        # block's shared memory, and the kernel has no static shared memory.
        pool = shared_pool()
        self.tile_a = pool.alloc((p.stages, plan.rows_a * operands.block_k), operands.tensor_map, align=1024)
        self.tile_b = pool.alloc((p.stages, p.block_n * operands.block_k), operands.tensor_map, align=1024)
        if cluster_sum is not None:
            cluster_sum.allocate(pool)
        output.allocate(pool)
        self.full = pool.alloc((p.stages,), "uint64", align=8)
        self.empty = pool.alloc((p.stages,), "uint64", align=8)
        self.turn = pool.alloc((2,), "uint64", align=8)
        if plan.statistics_apart:
            self.statistics = pool.alloc((STATISTICS_SLOTS, p.block_m, COUNT), "float32", align=16)
            self.made = pool.alloc((STATISTICS_SLOTS,), "uint64", align=8)
            self.read = pool.alloc((STATISTICS_SLOTS,), "uint64", align=8)
        pool.commit()

    def initialise_barriers(self) -> None:
        """Emit, for one thread, the initialisation of all barriers."""
        plan, p = self._plan, self._plan.parameters
        for stage in range(p.stages):
            initialise_barrier(self.full.ptr_to([stage]), 1)
            initialise_barrier(self.empty.ptr_to([stage]), plan.groups * p.multicast)
        for group in range(2):
            initialise_barrier(self.turn.ptr_to([group]), 1)
        if plan.statistics_apart:
            for slot in range(STATISTICS_SLOTS):
                initialise_barrier(self.made.ptr_to([slot]), STATISTICS_WARPS * 32)
                initialise_barrier(self.read.ptr_to([slot]), plan.groups * WARPGROUP)
        T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
        if p.pingpong:
            # The first turn is the first warpgroup's.
            arrive(self.turn.ptr_to([0]))


class Producer:
    """Loads what a plan's consumers multiply; the methods emit into the current IRBuilder.

    It loads what the tensor maps of A and B give, in the order of `tiles`, into `memory`; `rank` is the block's number
    in its cluster.
    """

    def __init__(
        self,
        matmul: MatmulFunction,
        plan: GemmPlan,
        tiles: Tiles,
        memory: Memory,
        maps: tuple[tirx.Var, tirx.Var],
        rank: tirx.Expr,
    ) -> None:
        self._matmul, self._plan, self._p, self._block_k = matmul, plan, plan.parameters, plan.operands.block_k
        self._tiles, self._memory, self._rank = tiles, memory, rank
        self._map_a, self._map_b = maps

    def prefetch_maps(self) -> None:
        """Emit the fetching of the tensor maps."""
        for tensor_map in (self._map_a, self._map_b):
            T.evaluate(T.ptx.prefetch.tensormap(T.address_of(tensor_map)))

    def load_early(self) -> None:
        """Emit the loads of those tiles of B that are constant and wanted first."""
        first = self._tiles.first()

        def load(stage: tirx.Expr | int) -> None:
            self._expect(stage)
            self._load_b(stage, first.start + stage, first.column)

        self._each_early(first, load)

    def produce(self) -> None:
        """Emit the loads of all tiles of the block, those of `load_early` too where a cluster shares B."""
        ring = Ring(self._p.stages)
        early: tirx.Expr | int = 0
        if self._p.multicast > 1:
            self.load_early()
        wait_for_predecessor(self._p.dependent, launches=False)
        if self._plan.early:
            first = self._tiles.first()
            early = self._begun(first)
            self._each_early(first, lambda stage: self._load_a(stage, first.start + stage, first.row))
            ring.set(early % self._p.stages, early // self._p.stages)

        def load_part(part: Part) -> None:
            # Tiles of K that are on their way already.
            begun = early if isinstance(part.turn, tirx.IntImm) else tirx.Select(part.turn == 0, early, 0)
            with T.serial(part.count - begun, unroll=False) as step:
                k_tile = part.start + begun + step
                T.evaluate(T.cuda.mbarrier_wait(self._memory.empty.ptr_to([ring.stage]), ring.phase ^ 1))
                self._expect(ring.stage)
                self._load_a(ring.stage, k_tile, part.row)
                self._load_b(ring.stage, k_tile, part.column)
                ring.advance()

        self._tiles.each(load_part)

    def _each_early(self, first: Part, load: Callable[[tirx.Expr | int], None]) -> None:
        begun = self._begun(first)
        if isinstance(begun, int):
            for stage in range(begun):
                load(stage)
            return
        with T.serial(begun, unroll=False) as stage:
            load(stage)

    def _begun(self, first: Part) -> tirx.Expr | int:
        """Return how many stages are loaded early: no more than the first part has."""
        early = self._plan.early
        return tirx.min(early, first.count) if self._p.stream_k and early else early

    def _expect(self, stage: tirx.Expr | int) -> None:
        expect_bytes(self._memory.full.ptr_to([stage]), self._plan.stage_bytes)

    def _load_a(self, stage: tirx.Expr | int, k_tile: tirx.Expr, row: tirx.Expr) -> None:
        to, full = self._memory.tile_a.ptr_to([stage, 0]), self._memory.full.ptr_to([stage])
        load_tile(to, self._map_a, (k_tile * self._block_k, row * self._p.block_m), full)

    def _load_b(self, stage: tirx.Expr | int, k_tile: tirx.Expr, column: tirx.Expr) -> None:
        """Emit the loads of a tile of B, or of this block's part of it for all of the cluster."""
        p, plan, chunk = self._p, self._plan, self._plan.chunk
        full = self._memory.full.ptr_to([stage])

        def load(offset: tirx.Expr | int, *at: tirx.Expr | int) -> None:
            load_tile(self._memory.tile_b.ptr_to([stage, offset]), self._map_b, at, full, p.multicast)

        if self._matmul.b_transposed:
            first = self._part(p.block_n // p.multicast)
            load(first * self._block_k, k_tile * self._block_k, column * p.block_n + first)
            return
        first = self._part(plan.rows_b)
        row = k_tile * self._block_k + first
        if plan.chunked:
            load(first * p.block_n, 0, row, column * (p.block_n // chunk))
            return
        for start in range(0, p.block_n, chunk):
            load(first * p.block_n + start * plan.rows_b, column * p.block_n + start, row)

    def _part(self, size: int) -> tirx.Expr | int:
        """Return where this block's part of `size` of what the cluster loads starts."""
        return self._rank * size if self._p.multicast > 1 else 0


_THREADS = STATISTICS_WARPS * 32
# Registers for what is on its way: a producer's warpgroup has few.
_REGISTERS = 16


class TileStatistics:
    """Makes and reads the statistics of tiles' rows in warps of the producer's warpgroup, while others multiply.

    A thread has whole rows: neighbouring threads read neighbouring rows of the partial sums (`schedules.tir.row_norm`)
    and add up their groups in order. Consumers would have to hold partial sums beside their accumulators, and lack
    registers.

    `partials` is the kernel's parameter; tiles come in the order of `tiles`, and have the slots of `memory` in turn.
    """

    def __init__(
        self, matmul: MatmulFunction, norm: RowNorm, partials: tirx.Var, plan: GemmPlan, tiles: Tiles, memory: Memory
    ) -> None:
        self._matmul, self._norm, self._plan, self._tiles, self._memory = matmul, norm, plan, tiles, memory
        self._partials = T.decl_buffer((norm.groups, matmul.extent, COUNT), "float32", data=partials.data)

    def make(self, thread: tirx.Expr) -> None:
        """Emit the making of all statistics that the block needs; `thread` is a number among those that make them."""
        wait_for_predecessor(self._plan.parameters.dependent, launches=False)
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
