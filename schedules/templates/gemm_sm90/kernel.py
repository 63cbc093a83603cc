"""The kernel of `template.py`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import MIN_BLOCKS_ATTR
from relaxtune.schedules.templates.emit.hopper import (
    Ring,
    arrive,
    arrive_in_all,
    encode_tensor,
    instruction,
    matrix_descriptor,
    pin,
    uniform,
    wait_for_cluster,
)
from relaxtune.schedules.templates.emit.kernel_frame import EmitBody, bind_rows, build_function, launch_dependents
from relaxtune.schedules.templates.emit.registers import clear, in_register
from relaxtune.schedules.templates.gemm_sm90.plan import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROW_BYTES,
    STATISTICS_WARPS,
    STEP_BYTES,
    SWIZZLES,
    WARPGROUP,
    GemmPlan,
)
from relaxtune.schedules.templates.gemm_sm90.ring import Memory, Producer, TileStatistics
from relaxtune.schedules.templates.gemm_sm90.tiles import (
    ClusterSum,
    GridSizes,
    Part,
    StreamPart,
    StreamSum,
    StreamTiles,
    Tiles,
)
from relaxtune.schedules.templates.output.output_tile import OutputTile
from relaxtune.schedules.templates.output.row_statistics import RowStatistics
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
        self._block_k, self._norm = plan.operands.block_k, matmul.norm

    def begin(self, params: list[tirx.Var]) -> tuple[Size, EmitBody]:
        plan = self._plan
        self._params = params
        self._matmul = matmul = bind_rows(self._matmul)
        self._sizes = GridSizes.of(plan, matmul.extent)
        self._output = OutputTile(self._func, matmul, params, plan.shares, uniform_rows=True)
        self._maps = self._encode_maps()
        return self._sizes.blocks * plan.cluster, self._emit

    def _emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, matmul = self._plan, self._matmul
        self._thread = thread
        warpgroup = T.alloc_local([1], "int32")
        T.buffer_store(warpgroup, uniform(self._thread // WARPGROUP), [0])
        self._group = warpgroup[0]
        self._rank = block % plan.cluster
        if self._p.stream_k:
            self._tiles: Tiles = StreamTiles(plan, block)
            self._stream_sum = StreamSum(plan, self._output, self._thread, block)
        else:
            self._tiles = Tiles(plan, self._sizes, block // plan.cluster, self._rank)
        self._cluster_sum = ClusterSum(plan, self._output, self._thread, self._rank)
        sums = self._cluster_sum if self._p.split_k > 1 else None
        self._memory = Memory(plan, self._output, sums)
        self._producer = Producer(matmul, plan, self._tiles, self._memory, self._maps, self._rank)
        self._tile_statistics: TileStatistics | None = None
        if self._norm is not None and plan.statistics_apart:
            partials = self._params[self._norm.partials]
            self._tile_statistics = TileStatistics(matmul, self._norm, partials, plan, self._tiles, self._memory)
        with T.If(thread == self._p.consumers * WARPGROUP), T.Then():
            self._producer.prefetch_maps()
            self._memory.initialise_barriers()
            if self._p.multicast == 1:
                # Loads are the other proxy's, which has to see the barriers.
                T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
                self._producer.load_early()
        T.evaluate(T.cuda.cta_sync())
        if self._p.multicast > 1:
            wait_for_cluster()
        launch_dependents(self._p.dependent)
        # setmaxnreg takes effect in a kernel whose registers are capped at its start.
        with T.attr({MIN_BLOCKS_ATTR: 1}), T.If(self._group == self._p.consumers):
            with T.Then():
                self._take_registers("dec", PRODUCER_REGISTERS)
                first = self._p.consumers * WARPGROUP
                with T.If(self._thread == first), T.Then():
                    self._producer.produce()
                if self._tile_statistics is not None:
                    # Not those of the warp that loads.
                    making = self._thread - (plan.threads - STATISTICS_WARPS * 32)
                    with T.If(making >= 0), T.Then():
                        self._tile_statistics.make(making)
            with T.Else():
                self._take_registers("inc", CONSUMER_REGISTERS)
                self._consume()
        if self._p.multicast > 1:
            # The others may still write to this block's shared memory and arrive at its barriers.
            wait_for_cluster()

    def _take_registers(self, change: str, count: int) -> None:
        if self._p.consumers > 1:
            T.evaluate(T.ptx[f"setmaxnreg.{change}.sync.aligned.u32"](count))

    def _encode_maps(self) -> tuple[tirx.Var, tirx.Var]:
        """Emit the tensor maps of A and B; the blocks of a `multicast` cluster load parts of B's tile.

        B as [K, N] is seen as chunks of columns, [N / chunk, K, chunk], where they divide it: one load brings all of a
        tile.
        """
        plan, p, matmul = self._plan, self._p, self._matmul
        chunk, size, block_k = plan.chunk, plan.operands.bytes, plan.operands.block_k
        depth, row = (matmul.k * size,), matmul.n * size
        a = (matmul.k, matmul.extent), depth, (block_k, plan.rows_a), 3
        b: tuple[tuple[Size, ...], tuple[int, ...], tuple[int, ...], int]
        if matmul.b_transposed:
            b = (matmul.k, matmul.n), depth, (block_k, p.block_n // p.multicast), 3
        elif plan.chunked:
            box = chunk, plan.rows_b, p.block_n // chunk
            b = (chunk, matmul.k, matmul.n // chunk), (row, chunk * size), box, SWIZZLES[chunk]
        else:
            b = (matmul.n, matmul.k), (row,), (chunk, plan.rows_b), SWIZZLES[chunk]
        dtype = plan.operands.tensor_map
        map_a = encode_tensor("map_a", self._params[matmul.a], dtype, *a)
        return map_a, encode_tensor("map_b", self._params[matmul.b], dtype, *b)

    def _release(self, stage: tirx.Expr) -> None:
        barrier = self._memory.empty.ptr_to([stage])
        if self._p.multicast > 1:
            arrive_in_all(barrier, self._p.multicast)
        else:
            arrive(barrier)

    def _consume(self) -> None:
        p, plan = self._p, self._plan
        ring = Ring(p.stages)
        group = self._group
        held = plan.m_blocks * p.block_n // 2
        accumulators = T.alloc_local([held], plan.operands.register)
        multiply = Multiply(self._matmul, plan)
        first_row = 0 if p.pingpong else group * (plan.m_blocks * 64)
        multiply.describe(
            self._memory.tile_a.ptr_to([0, first_row * self._block_k]), self._memory.tile_b.ptr_to([0, 0])
        )
        leader = self._thread % WARPGROUP == 0
        if self._norm is not None:
            partials = self._params[self._norm.partials]
            self._statistics = RowStatistics(self._matmul, self._norm, partials, plan.m_blocks)
        if p.dependent:
            if plan.one_each:
                first_column = self._first_column(self._tiles.first())
                self._output.copies.begin(first_column, self._thread // 32, self._thread % 32)
            T.evaluate(T.ptx.griddepcontrol.wait())

        # Of 8 bits, as many stages have twice the K: short loops, which the compiler unrolled whole, and spilled for.
        unroll = False if plan.operands.bytes == 1 else None

        def multiply_stage(step: tirx.Expr | int) -> None:
            T.evaluate(T.cuda.mbarrier_wait(self._memory.full.ptr_to([ring.stage]), ring.phase))
            multiply.emit(accumulators, ring.stage, tirx.convert(step) > 0)

        def make_part(part: Part) -> None:
            count = part.count
            self._begin_output(part)
            if p.pingpong:
                self._take_turn(ring, part.turn)
            with T.serial(count - 1, unroll=unroll) as step:
                multiply_stage(step)
                if plan.refills:
                    # The multiplications of the stage before are done: its memory may be overwritten.
                    T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
                    with T.If(tirx.all(leader, step > 0)), T.Then():
                        self._release(ring.previous)
                ring.advance()
            # Not in the loop, where the wait for the stage before would follow: ptxas (13.0, 13.5) takes accumulators
            # for complete at the next wait, whichever it is, and moved their conversion above that for the last stage.
            multiply_stage(count - 1)
            if p.pingpong:
                self._give_turn(leader)
            T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
            pin(accumulators, held, plan.operands.register)
            if plan.refills:
                with T.If(tirx.all(leader, count > 1)), T.Then():
                    self._release(ring.previous)
                with T.If(leader), T.Then():
                    self._release(ring.stage)
            ring.advance()
            self._finish(accumulators, part)

        def make_part_of_exact_sums(part: Part) -> None:
            self._begin_output(part)
            clear(totals)
            if p.pingpong:
                self._take_turn(ring, part.turn)
            with T.serial(part.count, unroll=False):
                T.evaluate(T.cuda.mbarrier_wait(self._memory.full.ptr_to([ring.stage]), ring.phase))
                multiply.emit(accumulators, ring.stage, tirx.const(False, "bool"))
                T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
                pin(accumulators, held)
                with T.If(leader), T.Then():
                    self._release(ring.stage)
                for index in range(held):
                    T.buffer_store(totals, totals[index] + accumulators[index], [index])
                ring.advance()
            if p.pingpong:
                self._give_turn(leader)
            self._finish(totals, part)

        if plan.operands.exact_sums:
            totals = T.alloc_local([held], "float32")
            make_part = make_part_of_exact_sums
        self._tiles.each(make_part, first=group if p.pingpong else 0, every=2 if p.pingpong else 1)

    def _take_turn(self, ring: Ring, turn: tirx.Expr) -> None:
        """Emit, where warpgroups take turns, the wait for a tile's turn, and the step to its first stage."""
        done = turn * self._plan.k_tiles
        ring.set(done % self._p.stages, done // self._p.stages % 2)
        T.evaluate(T.cuda.mbarrier_wait(self._memory.turn.ptr_to([self._group]), turn // 2 % 2))

    def _give_turn(self, leader: tirx.Expr) -> None:
        with T.If(leader), T.Then():
            arrive(self._memory.turn.ptr_to([1 - self._group]))

    def _first_row(self) -> tirx.Expr:
        warp = self._thread // 32
        group_row = 0 if self._p.pingpong else warp // 4 * (self._plan.m_blocks * 64)
        return group_row + warp % 4 * 16

    def _begin_output(self, part: Part) -> None:
        p, plan = self._p, self._plan
        warp, lane = self._thread // 32, self._thread % 32
        first_row = part.row * p.block_m + self._first_row()
        if self._norm is not None and self._tile_statistics is None:
            self._statistics.read(first_row, lane)
            if not plan.hold_partials:
                self._statistics.finish()
        # A tile may have rows that do not exist.
        rows = self._matmul.extent
        ragged = not isinstance(rows, int) or rows % (p.block_m * p.multicast) != 0
        self._output.begin(first_row, self._first_column(part), warp, lane, ragged_rows=ragged)

    def _first_column(self, part: Part) -> tirx.Expr:
        first = part.column * (self._p.block_n // self._plan.shares.accumulators)
        return first + self._rank * self._plan.shares.columns if self._p.split_k > 1 else first

    def _finish(self, accumulators: tirx.Var, part: Part) -> None:
        if not isinstance(part, StreamPart):
            self._write(accumulators, part)
            return
        with T.If(part.ends):
            with T.Then():
                self._stream_sum.collect(accumulators, part)
                self._write(accumulators, part)
            with T.Else():
                self._stream_sum.publish(accumulators)

    def _write(self, accumulators: tirx.Var, part: Part) -> None:
        p, matmul = self._p, self._matmul
        ragged_columns = matmul.n % p.block_n != 0
        width = p.block_n // self._plan.shares.accumulators
        end: tirx.Expr | int = matmul.columns
        if p.split_k > 1:
            accumulators = self._cluster_sum.total(accumulators)
            if width % (self._plan.shares.columns * p.split_k):
                end = tirx.min(matmul.columns, (part.column + 1) * width)
                ragged_columns = True
        if self._norm is not None:
            if self._tile_statistics is not None:
                first = self._first_row()
                row, lane = part.row * p.block_m + first, self._thread % 32
                self._tile_statistics.read(part, self._statistics, first, row, lane)
            elif self._plan.hold_partials:
                self._statistics.finish()
            self._output.take_statistics(self._norm.buffer, self._statistics.statistic)
            if self._norm.output is not None:
                writes = [part.column == 0, *([self._rank == 0] if p.split_k > 1 else [])]
                with T.If(tirx.all(*writes)), T.Then():
                    self._statistics.write(self._params[self._norm.output])
        self._output.write(accumulators, ragged_columns=ragged_columns, column_end=end)
        if p.split_k > 1:
            self._cluster_sum.wait_for_readers()


class Multiply:
    """The wgmma instructions of one stage.

    Matrix descriptors hold addresses and byte offsets in units of 16 bytes. With rows of K swizzled 128 bytes, 8 rows
    ("stride") are 1024 bytes apart, and an instruction's elements of K (16, or 32 of 8 bits) are 32 bytes further along
    the row. With rows of N swizzled 2*w bytes (16-bit operands), 8 rows of K are 16*w bytes apart ("stride"), chunks of
    w columns 64 such rows ("leading"), and 16 elements of K are 16 rows further; what each block of a `multicast`
    cluster loads, 64 / `multicast` rows of all columns, is laid out so by itself.
    Where no instruction has all of a tile's columns, two have half of them each.
    """

    def __init__(self, matmul: MatmulFunction, plan: GemmPlan) -> None:
        self._plan = plan
        self._transposed = matmul.b_transposed
        operands = plan.operands
        self._instruction = operands.instruction(plan.columns)
        self._modifiers = operands.modifiers(transposed=matmul.b_transposed)

    def describe(self, address_a: tirx.Expr, address_b: tirx.Expr) -> None:
        """Emit the descriptors of A's and B's tiles in stage 0."""
        self._low_a, self._with_low_a = self._described(address_a, 1, 64, 3)
        if self._transposed:
            self._low_b, self._with_low_b = self._described(address_b, 1, 64, 3)
            return
        chunk = self._plan.chunk
        row_units = chunk * self._plan.operands.bytes // 16
        fields = (self._plan.rows_b * row_units, 8 * row_units, SWIZZLES[chunk])
        self._low_b, self._with_low_b = self._described(address_b, *fields)

    @staticmethod
    def _described(
        address: tirx.Expr, leading: int, stride: int, swizzle: int
    ) -> tuple[tirx.Expr, Callable[[tirx.Expr], tirx.Expr]]:
        low, with_low = matrix_descriptor(address, leading, stride, swizzle)
        return in_register(low), with_low

    def _units_b(self, part: int, column: int) -> int:
        """Return the offset of an instruction's rows of K, from a column on, in B's tile, in units of 16 bytes."""
        if self._transposed:
            return (part * STEP_BYTES + column * ROW_BYTES) // 16
        rows, chunk, size = self._plan.rows_b, self._plan.chunk, self._plan.operands.bytes
        k = part * STEP_BYTES // size
        return (k // rows * rows * self._plan.parameters.block_n + k % rows * chunk) * size // 16

    def emit(self, accumulators: tirx.Var, stage: tirx.Expr, adds: tirx.Expr) -> None:
        """Emit one stage's products, which are added to the accumulators or overwrite them."""
        plan, block_n = self._plan, self._plan.parameters.block_n
        units_a, units_b = (size * ROW_BYTES // 16 for size in (plan.rows_a, block_n))
        lanes = plan.columns // 2
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        for part in range(ROW_BYTES // STEP_BYTES):
            for block in range(plan.m_blocks):
                for column in range(0, block_n, plan.columns):
                    first = (block * block_n + column) // 2
                    offset_a = stage * units_a + block * (64 * ROW_BYTES // 16) + part * (STEP_BYTES // 16)
                    offset_b = stage * units_b + self._units_b(part, column)
                    T.evaluate(
                        instruction(self._instruction)(
                            *(accumulators[first + lane] for lane in range(lanes)),
                            self._with_low_a(self._low_a + offset_a),
                            self._with_low_b(self._low_b + offset_b),
                            tirx.const(True, "bool") if part else adds,
                            *self._modifiers,
                        )
                    )
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
