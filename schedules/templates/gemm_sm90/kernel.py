"""The kernel of `template.py` on a page, over the words of `schedules.templates.emit`; the notation is that module's.

::

    producer     for each part (`tiles.py`): for each tile of K: await an empty stage; copy tiles of A and B to it (TMA)
    consumers    for each part: for each tile of K: await a full stage; multiply its tiles (wgmma); release the last one
                                add what other blocks have of the tile's sum; evaluate the epilogue; write
"""

from __future__ import annotations

from contextlib import nullcontext

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.barriers import Barriers, Ring, initialise, meet_cluster, share_roles, uniform
from relaxtune.schedules.templates.emit.kernel_frame import (
    EmitBody,
    bind_rows,
    build_function,
    launch_dependents,
    shared_pool,
    wait_for_predecessor,
)
from relaxtune.schedules.templates.emit.registers import add_all, clear, in_register, repeat
from relaxtune.schedules.templates.emit.tma import order_before_tma
from relaxtune.schedules.templates.emit.wgmma import ROWS, WARPGROUP, wait_for_products
from relaxtune.schedules.templates.gemm_sm90.operand_tiles import OperandTiles
from relaxtune.schedules.templates.gemm_sm90.plan import REGISTERS, GemmPlan
from relaxtune.schedules.templates.gemm_sm90.statistics import TileStatistics
from relaxtune.schedules.templates.gemm_sm90.sums import ClusterSum, StreamSum
from relaxtune.schedules.templates.gemm_sm90.tiles import GridSizes, Part, StreamPart, StreamTiles, Tiles
from relaxtune.schedules.templates.output.output_tile import OutputTile
from relaxtune.schedules.tir.blocks import Size
from relaxtune.schedules.tir.epilogue import MatmulFunction


def build_kernel(func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemmPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""
    begin = _Kernel(func, matmul, plan).begin
    return build_function(func, plan.threads, plan.parameters.dependent, begin, plan.cluster)


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(self, func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemmPlan) -> None:
        self._func, self._matmul, self._plan, self._p = func, matmul, plan, plan.parameters

    def begin(self, params: list[tirx.Var]) -> tuple[Size, EmitBody]:
        """Emit the host's part: the sizes of the grid, and tensor maps."""
        plan, self._params = self._plan, params
        self._matmul = matmul = bind_rows(self._matmul)
        self._sizes = GridSizes.of(plan, matmul.extent)
        self._output = OutputTile(self._func, matmul, params, plan.shares, uniform_rows=True)
        self._operands = OperandTiles(matmul, plan, params)
        return self._sizes.blocks * plan.cluster, self._emit

    def _emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p = self._plan, self._p
        self._thread, self._warp, self._lane = thread, thread // 32, thread % 32
        self._group, self._rank = in_register(uniform(thread // WARPGROUP)), block % plan.cluster
        self._tiles: Tiles = Tiles(plan, self._sizes, block // plan.cluster, self._rank)
        if p.stream_k:
            self._tiles, self._stream_sum = StreamTiles(plan, block), StreamSum(plan, self._output, thread, block)
        self._cluster_sum = ClusterSum(plan, self._output, thread, self._rank) if p.split_k > 1 else None
        self._statistics = TileStatistics(self._matmul, plan, self._tiles, self._params)
        rings = self._allocate()
        with T.If(thread == p.consumers * WARPGROUP), T.Then():
            self._operands.prefetch()
            initialise(*rings)
            if p.pingpong:
                # The first turn is the first warpgroup's.
                self._turn.arrive(0)
            if p.multicast == 1:
                order_before_tma()
                self._load_early()
        T.evaluate(T.cuda.cta_sync())
        if p.multicast > 1:
            meet_cluster()
        launch_dependents(p.dependent)
        share_roles(self._group == p.consumers, REGISTERS.get(p.consumers), 1, self._produce, self._consume)
        if p.multicast > 1:
            # The others may still write to this block's shared memory and arrive at its barriers.
            meet_cluster()

    def _allocate(self) -> list[tuple[Barriers, ...]]:
        """Emit the allocation of shared memory; return the barriers."""
        p, pool = self._p, shared_pool()
        self._operands.allocate(pool)
        if self._cluster_sum is not None:
            self._cluster_sum.allocate(pool)
        self._output.allocate(pool)
        self._full = Barriers(pool, p.stages, 1)
        self._empty = Barriers(pool, p.stages, self._plan.groups * p.multicast)
        self._turn = Barriers(pool, 2, 1)
        rings = [(self._full, self._empty), (self._turn,), *self._statistics.allocate(pool)]
        pool.commit()
        self._statistics.begin()
        return rings

    def _produce(self) -> None:
        with T.If(self._thread == self._p.consumers * WARPGROUP), T.Then():
            self._load()
        self._statistics.make(self._thread)

    def _load(self) -> None:
        """Emit the loads of all tiles of the block, those of `_load_early` too where a cluster shares B."""
        p, ring = self._p, Ring(self._p.stages)
        early: tirx.Expr | int = 0
        if p.multicast > 1:
            self._load_early()
        wait_for_predecessor(p.dependent, launches=False)
        if self._plan.early:
            first = self._tiles.first()
            early = self._early(first)
            repeat(early, lambda at: self._operands.load_a(at, first.start + at, first.row, self._full))
            ring.set(early % p.stages, early // p.stages)

        def load_part(part: Part) -> None:
            # Tiles of K that are on their way already.
            begun = early if isinstance(part.turn, tirx.IntImm) else tirx.Select(part.turn == 0, early, 0)
            with T.serial(part.count - begun, unroll=False) as step:
                k_tile = part.start + begun + step
                self._empty.wait(ring.stage, ring.phase ^ 1)
                self._full.expect(ring.stage, self._plan.stage_bytes)
                self._operands.load_a(ring.stage, k_tile, part.row, self._full)
                self._operands.load_b(ring.stage, k_tile, part.column, self._rank, self._full)
                ring.advance()

        self._tiles.each(load_part)

    def _load_early(self) -> None:
        """Emit the loads of the first tiles of a constant B, before the wait for the kernel before this one."""
        first = self._tiles.first()

        def load(stage: tirx.Expr | int) -> None:
            self._full.expect(stage, self._plan.stage_bytes)
            self._operands.load_b(stage, first.start + stage, first.column, self._rank, self._full)

        repeat(self._early(first), load)

    def _early(self, first: Part) -> tirx.Expr | int:
        """Return how many stages are loaded early: no more than the first part has."""
        early = self._plan.early
        return tirx.min(early, first.count) if self._p.stream_k and early else early

    def _consume(self) -> None:
        p, plan = self._p, self._plan
        self._ring, count = Ring(p.stages), plan.m_blocks * p.block_n // 2
        self._sums = T.alloc_local([count], plan.operands.register)
        self._operands.describe(0 if p.pingpong else self._group * (plan.m_blocks * ROWS))
        self._leader = self._thread % WARPGROUP == 0
        self._statistics.begin_rows()
        if p.dependent:
            if plan.one_each:
                self._output.copies.begin(self._first_column(self._tiles.first()), self._warp, self._lane)
            T.evaluate(T.ptx.griddepcontrol.wait())
        if plan.operands.exact_sums:
            self._totals = T.alloc_local([count], "float32")
        self._tiles.each(self._make, first=self._group if p.pingpong else 0, every=2 if p.pingpong else 1)

    def _make(self, part: Part) -> None:
        """Emit a tile, or a part of its sum: what the output reads before, the sum over K, the output."""
        p, plan, exact = self._p, self._plan, self._plan.operands.exact_sums
        row = part.row * p.block_m + self._first_row()
        self._statistics.read(row, self._lane)
        # A tile may have rows that do not exist.
        rows = self._matmul.extent
        ragged = not isinstance(rows, int) or rows % (p.block_m * p.multicast) != 0
        self._output.begin(row, self._first_column(part), self._warp, self._lane, ragged_rows=ragged)
        if exact:
            clear(self._totals)
        if p.pingpong:
            # The wait for the tile's turn, and the step to its first stage.
            done = part.turn * plan.k_tiles
            self._ring.set(done % p.stages, done // p.stages % 2)
            self._turn.wait(self._group, part.turn // 2 % 2)
        sums = self._sum_exactly(part.count) if exact else self._sum(part.count)
        with self._stream_sum.of_the_last(sums, part) if isinstance(part, StreamPart) else nullcontext():
            self._write(sums, part)

    def _sum(self, count: tirx.Expr | int) -> tirx.Var:
        """Emit the sum over some tiles of K; return its registers."""
        # Of 8 bits, as many stages have twice the K: short loops, which the compiler unrolled whole, and spilled for.
        with T.serial(count - 1, unroll=False if self._plan.operands.bytes == 1 else None) as step:
            self._multiply(step > 0)
            if self._plan.refills:
                # The multiplications of the stage before are done: its memory may be overwritten.
                wait_for_products(1)
                self._release(self._ring.previous, step > 0)
            self._ring.advance()
        # Not in the loop, where the wait for the stage before would follow: ptxas (13.0, 13.5) takes accumulators for
        # complete at the next wait, whichever it is, and moved their conversion above that for the last stage.
        self._multiply(tirx.convert(count - 1) > 0)
        self._give_turn()
        wait_for_products(0, self._sums)
        if self._plan.refills:
            self._release(self._ring.previous, count > 1)
            self._release(self._ring.stage)
        self._ring.advance()
        return self._sums

    def _sum_exactly(self, count: tirx.Expr | int) -> tirx.Var:
        """Emit the sum of float8: those of stages are added up in float32 (`plan.Operands`)."""
        with T.serial(count, unroll=False):
            self._multiply(tirx.const(False, "bool"))
            wait_for_products(0, self._sums)
            self._release(self._ring.stage)
            add_all(self._totals, self._sums)
            self._ring.advance()
        self._give_turn()
        return self._totals

    def _multiply(self, adds: tirx.Expr) -> None:
        self._full.wait(self._ring.stage, self._ring.phase)
        self._operands.multiply(self._sums, self._ring.stage, adds)

    def _release(self, stage: tirx.Expr, *only: tirx.Expr) -> None:
        with T.If(tirx.all(self._leader, *only)), T.Then():
            self._empty.arrive(stage, self._p.multicast)

    def _give_turn(self) -> None:
        if self._p.pingpong:
            with T.If(self._leader), T.Then():
                self._turn.arrive(1 - self._group)

    def _first_row(self) -> tirx.Expr:
        return (0 if self._p.pingpong else self._warp // 4 * (self._plan.m_blocks * ROWS)) + self._warp % 4 * 16

    def _first_column(self, part: Part) -> tirx.Expr:
        first = part.column * (self._p.block_n // self._plan.shares.accumulators)
        return first + self._rank * self._plan.shares.columns if self._p.split_k > 1 else first

    def _write(self, sums: tirx.Var, part: Part) -> None:
        """Emit the epilogue and the writing of a tile, or of a block's share of the cluster's."""
        p, matmul = self._p, self._matmul
        ragged, end = matmul.n % p.block_n != 0, tirx.convert(matmul.columns)
        if self._cluster_sum is not None:
            sums = self._cluster_sum.total(sums)
            width = p.block_n // self._plan.shares.accumulators
            if width % (self._plan.shares.columns * p.split_k):
                ragged, end = True, tirx.min(matmul.columns, (part.column + 1) * width)
        self._statistics.hand_on(self._output, part, self._first_row(), self._lane, self._rank)
        self._output.write(sums, ragged_columns=ragged, column_end=end)
        if self._cluster_sum is not None:
            self._cluster_sum.wait_for_readers()
