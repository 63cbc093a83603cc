"""The kernel of `schedules.templates.gemm_sm90`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from schedules.fallback import SCHEDULED_ATTR
from schedules.templates.epilogue import MatmulFunction
from schedules.templates.gemm_sm90_multiply import Multiply
from schedules.templates.gemm_sm90_norm import RowStatistics
from schedules.templates.gemm_sm90_plan import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    WARPGROUP,
    GemmPlan,
    tensor_maps,
)
from schedules.templates.hopper import (
    Ring,
    arrive,
    arrive_in_all,
    encode_tensor,
    initialise_barrier,
    load_tile,
    pin,
    uniform,
    wait_for_cluster,
)
from schedules.templates.lowering import KERNEL_ATTR
from schedules.templates.output_tile import OutputTile
from schedules.templates.row_norm import RowNorm

# On a PrimFunc made of blocks, which the kernel is not.
_BLOCKS_ATTR = "s_tir"
# Launch attributes of a PrimFunc; the spelling is TVM's.
_LAUNCH_ATTR = "tirx.kernel_launch_params"
_MIN_BLOCKS_ATTR = "tirx.launch_bounds_min_blocks_per_sm"
_DEPENDENT_LAUNCH = "tirx.use_programtic_dependent_launch"

_CONSUMERS_BARRIER = 1


def build_kernel(func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemmPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""
    made = _Kernel(func, matmul, plan).build()
    for key, value in func.attrs.items() if func.attrs else ():
        if key != _BLOCKS_ATTR:
            made = made.with_attr(key, value)
    if plan.parameters.dependent:
        made = made.with_attr(_LAUNCH_ATTR, [_DEPENDENT_LAUNCH])
    return made.with_attr(SCHEDULED_ATTR, True).with_attr(KERNEL_ATTR, True)


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(self, func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemmPlan) -> None:
        self._func = func
        self._matmul = matmul
        self._plan = plan
        self._p = plan.parameters
        self._block_k = plan.operands.block_k
        self._norm: RowNorm | None = matmul.norm

    def build(self) -> tirx.PrimFunc:
        plan = self._plan
        with IRBuilder() as builder, T.prim_func():
            T.func_name("main")
            self._params = [_declare(param) for param in self._func.params]
            self._output = OutputTile(self._matmul, self._func.params, self._params, plan.shares)
            self._encode_maps()
            T.device_entry()
            block = T.cta_id([plan.blocks * plan.cluster])
            if plan.cluster > 1:
                T.cta_id_in_cluster([plan.cluster])
            self._thread = T.thread_id([plan.threads])
            warpgroup = T.alloc_local([1], "int32")
            T.buffer_store(warpgroup, uniform(self._thread // WARPGROUP), [0])
            self._group = warpgroup[0]
            self._rank = block % plan.cluster
            self._block = block // plan.cluster
            self._allocate()
            self._initialise()
            if self._p.dependent:
                T.evaluate(T.ptx.griddepcontrol.launch_dependents())
            # setmaxnreg takes effect in a kernel whose registers are capped at its start.
            with (
                T.attr({_MIN_BLOCKS_ATTR: 1}),
                T.If(self._group == self._p.consumers),
            ):
                with T.Then():
                    self._take_registers("dec", PRODUCER_REGISTERS)
                    with T.If(self._thread == self._p.consumers * WARPGROUP), T.Then():
                        self._produce()
                with T.Else():
                    self._take_registers("inc", CONSUMER_REGISTERS)
                    self._consume()
            if self._p.multicast > 1:
                # The others may still write to this block's shared memory and arrive at its barriers.
                wait_for_cluster()
        return builder.get()

    def _take_registers(self, change: str, count: int) -> None:
        if self._p.consumers > 1:
            T.evaluate(T.ptx[f"setmaxnreg.{change}.sync.aligned.u32"](count))

    def _encode_maps(self) -> None:
        self._map_a, self._map_b = (
            encode_tensor(
                one.name,
                self._params[one.param],
                self._plan.operands.tensor_map,
                one.sizes,
                one.strides,
                one.box,
                one.swizzle,
            )
            for one in tensor_maps(self._matmul, self._plan)
        )

    def _allocate(self) -> None:
        p, operands = self._p, self._plan.operands
        # It starts at a multiple of 1024 bytes, as swizzle atoms need: on sm_90 the system reserves the first KiB of a
        # block's shared memory, and the kernel has no static shared memory.
        pool = T.SMEMPool()
        self._tile_a = pool.alloc((p.stages, self._plan.rows_a * self._block_k), operands.tensor_map, align=1024)
        self._tile_b = pool.alloc((p.stages, p.block_n * self._block_k), operands.tensor_map, align=1024)
        end = pool.offset
        if p.split_k > 1:
            # The partial sums take the place of the ring, whose tiles are used up by then.
            pool.move_base_to(0)
            groups = p.block_m // 64
            self._partial = pool.alloc((groups, p.block_n // 8, WARPGROUP, 4), operands.register, align=1024)
            pool.move_base_to(max(end, pool.offset))
        self._output.allocate(pool)
        self._full = pool.alloc((p.stages,), "uint64", align=8)
        self._empty = pool.alloc((p.stages,), "uint64", align=8)
        self._turn = pool.alloc((2,), "uint64", align=8)
        pool.commit()

    def _initialise(self) -> None:
        """Emit what comes before the roles; the thread that loads begins with constant tiles of B at once."""
        with T.If(self._thread == self._p.consumers * WARPGROUP), T.Then():
            for tensor_map in (self._map_a, self._map_b):
                T.evaluate(T.ptx.prefetch.tensormap(T.address_of(tensor_map)))
            for stage in range(self._p.stages):
                initialise_barrier(self._full.ptr_to([stage]), 1)
                initialise_barrier(self._empty.ptr_to([stage]), self._plan.groups * self._p.multicast)
            for group in range(2):
                initialise_barrier(self._turn.ptr_to([group]), 1)
            T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
            if self._p.pingpong:
                # The first turn is the first warpgroup's.
                arrive(self._turn.ptr_to([0]))
            if self._p.multicast == 1:
                # Loads are the other proxy's, which has to see the barriers.
                T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
                self._load_early()
        T.evaluate(T.cuda.cta_sync())
        if self._p.multicast > 1:
            wait_for_cluster()

    def _load_early(self) -> None:
        """Emit the loads of those tiles of B that are constant and wanted first."""
        _, column = self._place(self._block)
        start, _ = self._k_range()
        for stage in range(self._plan.early):
            self._expect(stage)
            self._load_b(stage, start + stage, column)

    def _each_tile(
        self, make: Callable[[tirx.Expr, tirx.Expr, tirx.Expr], None], *, first: tirx.Expr | int = 0, every: int = 1
    ) -> None:
        """Emit the loop over this block's tiles.

        Parameters
        ----------
        make : callable
            Gets the tile's number within this block, and its row and column in tiles.
        first, every
            Which of the block's tiles to make.
        """
        plan = self._plan

        def emit(turn: tirx.Expr) -> None:
            tile = self._block + turn * plan.blocks
            row, column = self._place(tile)
            make(turn, row, column)

        if plan.blocks == plan.tiles and every == 1:
            emit(tirx.IntImm("int32", 0))
            return
        # (tiles - block) / blocks tiles are left from this block's first on, rounded up; never negative.
        left = plan.tiles - self._block + (every - first) * plan.blocks - 1
        with T.serial(left // (every * plan.blocks)) as turn:
            emit(turn * every + first)

    def _place(self, tile: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the row and column, in tiles, of this block's part of a cluster's tile."""
        plan, p = self._plan, self._p
        height = min(p.group, plan.tiles_m)
        if height == 1:
            row, column = tile // plan.tiles_n, tile % plan.tiles_n
        else:
            group, inside = tile // (height * plan.tiles_n), tile % (height * plan.tiles_n)
            rows: tirx.Expr | int = height
            if plan.tiles_m % height:
                rows = tirx.min(height, plan.tiles_m - group * height)
            row, column = group * height + inside % rows, inside // rows
        return (row if p.multicast == 1 else row * p.multicast + self._rank), column

    def _k_range(self) -> tuple[tirx.Expr | int, tirx.Expr | int]:
        """Return this block's first tile of K and how many it sums."""
        plan = self._plan
        if self._p.split_k == 1:
            return 0, plan.k_tiles
        start = self._rank * plan.k_share
        if plan.k_tiles % plan.k_share == 0:
            return start, plan.k_share
        return start, tirx.min(plan.k_share, plan.k_tiles - start)

    def _produce(self) -> None:
        plan = self._plan
        ring = Ring(self._p.stages)
        start, count = self._k_range()
        early = plan.early
        if self._p.multicast > 1:
            self._load_early()
        if self._p.dependent:
            T.evaluate(T.ptx.griddepcontrol.wait())
        if early:
            row, _ = self._place(self._block)
            for stage in range(early):
                self._load_a(stage, start + stage, row)
            ring.set(early % self._p.stages, early // self._p.stages)

        def load_tile(turn: tirx.Expr, row: tirx.Expr, column: tirx.Expr) -> None:
            # Tiles of K that are on their way already.
            begun = early if isinstance(turn, tirx.IntImm) else tirx.Select(turn == 0, early, 0)
            with T.serial(count - begun, unroll=False) as step:
                k_tile = start + begun + step
                T.evaluate(T.cuda.mbarrier_wait(self._empty.ptr_to([ring.stage]), ring.phase ^ 1))
                self._expect(ring.stage)
                self._load_a(ring.stage, k_tile, row)
                self._load_b(ring.stage, k_tile, column)
                ring.advance()

        self._each_tile(load_tile)

    def _expect(self, stage: tirx.Expr | int) -> None:
        bytes_per_stage = T.uint32(self._plan.stage_bytes)
        T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(self._full.ptr_to([stage]), bytes_per_stage))

    def _load_a(self, stage: tirx.Expr | int, k_tile: tirx.Expr, row: tirx.Expr) -> None:
        to, full = self._tile_a.ptr_to([stage, 0]), self._full.ptr_to([stage])
        load_tile(to, self._map_a, (k_tile * self._block_k, row * self._p.block_m), full)

    def _load_b(self, stage: tirx.Expr | int, k_tile: tirx.Expr, column: tirx.Expr) -> None:
        """Emit the loads of a tile of B, or of this block's part of it for all of the cluster."""
        p, plan, chunk = self._p, self._plan, self._plan.chunk
        full = self._full.ptr_to([stage])

        def load(offset: tirx.Expr | int, *at: tirx.Expr | int) -> None:
            load_tile(self._tile_b.ptr_to([stage, offset]), self._map_b, at, full, p.multicast)

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

    def _release(self, stage: tirx.Expr) -> None:
        """Emit the arrival that says that this warpgroup is done with a stage."""
        barrier = self._empty.ptr_to([stage])
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
        multiply.describe(self._tile_a.ptr_to([0, first_row * self._block_k]), self._tile_b.ptr_to([0, 0]))
        leader = self._thread % WARPGROUP == 0
        _, count = self._k_range()
        if self._norm is not None:
            partials = self._params[self._norm.partials]
            self._statistics = RowStatistics(self._matmul, self._norm, partials, plan.m_blocks)
        if p.dependent:
            T.evaluate(T.ptx.griddepcontrol.wait())

        # Of 8 bits, as many stages have twice the K: short loops, which the compiler unrolled whole, and spilled for.
        unroll = False if plan.operands.bytes == 1 else None

        def multiply_stage(step: tirx.Expr | int) -> None:
            T.evaluate(T.cuda.mbarrier_wait(self._full.ptr_to([ring.stage]), ring.phase))
            multiply.emit(accumulators, ring.stage, tirx.convert(step) > 0)

        def make_tile(turn: tirx.Expr, row: tirx.Expr, column: tirx.Expr) -> None:
            self._begin_output(row, column)
            if p.pingpong:
                self._take_turn(ring, turn)
            with T.serial(count - 1, unroll=unroll) as step:
                multiply_stage(step)
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
            with T.If(tirx.all(leader, count > 1)), T.Then():
                self._release(ring.previous)
            with T.If(leader), T.Then():
                self._release(ring.stage)
            ring.advance()
            self._finish(accumulators, column)

        def make_tile_of_exact_sums(turn: tirx.Expr, row: tirx.Expr, column: tirx.Expr) -> None:
            self._begin_output(row, column)
            for index in range(held):
                T.buffer_store(totals, tirx.FloatImm("float32", 0.0), [index])
            if p.pingpong:
                self._take_turn(ring, turn)
            with T.serial(count, unroll=False):
                T.evaluate(T.cuda.mbarrier_wait(self._full.ptr_to([ring.stage]), ring.phase))
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
            self._finish(totals, column)

        if plan.operands.exact_sums:
            totals = T.alloc_local([held], "float32")
            make_tile = make_tile_of_exact_sums
        self._each_tile(make_tile, first=group if p.pingpong else 0, every=2 if p.pingpong else 1)

    def _take_turn(self, ring: Ring, turn: tirx.Expr) -> None:
        """Emit, for a tile made by turns, the wait for its turn, and the step to its first stage."""
        done = turn * self._plan.k_tiles
        ring.set(done % self._p.stages, done // self._p.stages % 2)
        T.evaluate(T.cuda.mbarrier_wait(self._turn.ptr_to([self._group]), turn // 2 % 2))

    def _give_turn(self, leader: tirx.Expr) -> None:
        """Emit the beginning of the other warpgroup's turn."""
        with T.If(leader), T.Then():
            arrive(self._turn.ptr_to([1 - self._group]))

    def _begin_output(self, row: tirx.Expr, column: tirx.Expr) -> None:
        p, plan = self._p, self._plan
        warp, lane = self._thread // 32, self._thread % 32
        group_row = 0 if p.pingpong else warp // 4 * (plan.m_blocks * 64)
        first_row = row * p.block_m + group_row + warp % 4 * 16
        first_column = column * (p.block_n // plan.shares.accumulators)
        if p.split_k > 1:
            first_column += self._rank * plan.shares.columns
        if self._norm is not None:
            self._statistics.read(first_row, lane)
            if not plan.hold_partials:
                self._statistics.finish()
        self._output.begin(first_row, first_column, warp, lane, ragged_rows=self._ragged_rows)

    @property
    def _ragged_rows(self) -> bool:
        """Whether a tile may have rows that do not exist."""
        return self._matmul.m % (self._p.block_m * self._p.multicast) != 0

    def _finish(self, accumulators: tirx.Var, column: tirx.Expr) -> None:
        p, matmul = self._p, self._matmul
        ragged_columns = matmul.n % p.block_n != 0
        width = p.block_n // self._plan.shares.accumulators
        end: tirx.Expr | int = matmul.columns
        if p.split_k > 1:
            accumulators = self._reduce(accumulators)
            if width % (self._plan.shares.columns * p.split_k):
                end = tirx.min(matmul.columns, (column + 1) * width)
                ragged_columns = True
        if self._norm is not None:
            if self._plan.hold_partials:
                self._statistics.finish()
            self._output.take_statistics(self._norm.buffer, self._statistics.statistic)
            if self._norm.output is not None:
                first = [column == 0, *([self._rank == 0] if p.split_k > 1 else [])]
                with T.If(tirx.all(*first)), T.Then():
                    self._statistics.write(self._params[self._norm.output])
        self._output.write(accumulators, ragged_columns=ragged_columns, column_end=end)
        if p.split_k > 1:
            # Shared memory stays valid until every block of the cluster has read it.
            T.evaluate(T.ptx.barrier.cluster.wait.acquire())

    def _reduce(self, accumulators: tirx.Var) -> tirx.Var:
        """Emit the sum of the cluster's partial sums, in the order of ranks, and return this block's share of it.

        Each block puts its partial sums where all can read them, and sums what makes `shares.columns` output columns.
        """
        p, plan = self._p, self._plan
        eights, share = p.block_n // 8, plan.shares.columns * plan.shares.accumulators // 8
        register = plan.operands.register
        kind = "u32" if plan.operands.integer else "f32"
        thread = self._thread % WARPGROUP
        first_group = self._thread // WARPGROUP * plan.m_blocks
        if p.consumers > 1:
            T.evaluate(T.ptx.bar.sync(_CONSUMERS_BARRIER, p.consumers * WARPGROUP))
        for block in range(plan.m_blocks):
            with self._output.rows_exist(block):
                for eight in range(eights):
                    at = self._partial.ptr_to([first_group + block, eight, thread, 0])
                    registers = [accumulators[(block * eights + eight) * 4 + index] for index in range(4)]
                    T.evaluate(T.ptx[f"st.shared.v4.{kind}"](at, *registers))
        T.evaluate(T.ptx.barrier.cluster.arrive.release())
        T.evaluate(T.ptx.barrier.cluster.wait.acquire())
        total = T.alloc_local([plan.m_blocks * share * 4], register)
        parts = [T.alloc_local([4], register) for _ in range(p.split_k * share)]
        remote = T.alloc_local([1], "uint32")
        for block in range(plan.m_blocks):
            with self._output.rows_exist(block):
                # All loads before all sums: each takes as long as one from L2.
                for number, part in enumerate(parts):
                    rank, eight = number // share, number % share
                    which = tirx.min(self._rank * share + eight, eights - 1)
                    at = self._partial.ptr_to([first_group + block, which, thread, 0])
                    window = T.cuda.cvta_generic_to_shared(at)
                    T.evaluate(T.ptx.mapa.shared__cluster.u32(remote[0], window, T.uint32(rank)))
                    T.evaluate(T.ptx[f"ld.shared::cluster.v4.{kind}"](*(part[index] for index in range(4)), remote[0]))
                for eight in range(share):
                    for index in range(4):
                        value = parts[eight][index]
                        for rank in range(1, p.split_k):
                            value += parts[rank * share + eight][index]
                        T.buffer_store(total, value, [(block * share + eight) * 4 + index])
        T.evaluate(T.ptx.barrier.cluster.arrive.release())
        return total


def _declare(param: tirx.Var) -> tirx.Var:
    shape = [int(size) for size in param.ty.shape]
    return T.arg(param.name, T.Buffer(shape, str(param.ty.dtype)))
