"""The kernel of `schedules.templates.gemm_sm90`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from schedules.fallback import SCHEDULED_ATTR
from schedules.templates.epilogue import MatmulFunction
from schedules.templates.gemm_sm90_multiply import Multiply
from schedules.templates.gemm_sm90_plan import (
    BLOCK_K,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    SWIZZLES,
    WARPGROUP,
    GemmPlan,
)
from schedules.templates.hopper import Ring, arrive, encode_map, initialise_barrier, load_box, pin
from schedules.templates.lowering import KERNEL_ATTR
from schedules.templates.output_tile import OutputTile

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

    def build(self) -> tirx.PrimFunc:
        plan = self._plan
        with IRBuilder() as builder, T.prim_func():
            T.func_name("main")
            self._params = [_declare(param) for param in self._func.params]
            self._output = OutputTile(self._matmul, self._func.params, self._params, plan.shares)
            self._encode_maps()
            T.device_entry()
            block = T.cta_id([plan.blocks * self._p.split_k])
            if self._p.split_k > 1:
                T.cta_id_in_cluster([self._p.split_k])
            self._thread = T.thread_id([plan.threads])
            self._rank = block % self._p.split_k
            self._block = block // self._p.split_k
            self._allocate()
            self._initialise()
            if self._p.dependent:
                T.evaluate(T.ptx.griddepcontrol.launch_dependents())
            # setmaxnreg takes effect in a kernel whose registers are capped at its start.
            with (
                T.attr({_MIN_BLOCKS_ATTR: 1}),
                T.If(self._thread >= self._p.consumers * WARPGROUP),
            ):
                with T.Then():
                    self._take_registers("dec", PRODUCER_REGISTERS)
                    with T.If(self._thread == self._p.consumers * WARPGROUP), T.Then():
                        self._produce()
                with T.Else():
                    self._take_registers("inc", CONSUMER_REGISTERS)
                    self._consume()
        return builder.get()

    def _take_registers(self, change: str, count: int) -> None:
        if self._p.consumers > 1:
            T.evaluate(T.ptx[f"setmaxnreg.{change}.sync.aligned.u32"](count))

    def _encode_maps(self) -> None:
        matmul, p, plan = self._matmul, self._p, self._plan
        a, b, dtype = self._params[matmul.a], self._params[matmul.b], matmul.input_dtype
        self._map_a = encode_map("map_a", a, dtype, (matmul.m, matmul.k), (p.block_m, BLOCK_K), 3)
        if matmul.b_transposed:
            self._map_b = encode_map("map_b", b, dtype, (matmul.n, matmul.k), (p.block_n, BLOCK_K), 3)
        else:
            box = (BLOCK_K, plan.chunk)
            self._map_b = encode_map("map_b", b, dtype, (matmul.k, matmul.n), box, SWIZZLES[plan.chunk])

    def _allocate(self) -> None:
        p, dtype = self._p, self._matmul.input_dtype
        # It starts at a multiple of 1024 bytes, as swizzle atoms need: on sm_90 the system reserves the first KiB of a
        # block's shared memory, and the kernel has no static shared memory.
        pool = T.SMEMPool()
        self._tile_a = pool.alloc((p.stages, p.block_m * BLOCK_K), dtype, align=1024)
        self._tile_b = pool.alloc((p.stages, p.block_n * BLOCK_K), dtype, align=1024)
        end = pool.offset
        if p.split_k > 1:
            # The partial sums take the place of the ring, whose tiles are used up by then.
            pool.move_base_to(0)
            groups = p.block_m // 64
            self._partial = pool.alloc((groups, p.block_n // 8, WARPGROUP, 4), "float32", align=1024)
            pool.move_base_to(max(end, pool.offset))
        self._output.allocate(pool)
        self._full = pool.alloc((p.stages,), "uint64", align=8)
        self._empty = pool.alloc((p.stages,), "uint64", align=8)
        self._turn = pool.alloc((2,), "uint64", align=8)
        pool.commit()

    def _initialise(self) -> None:
        with T.If(self._thread == 0), T.Then():
            for stage in range(self._p.stages):
                initialise_barrier(self._full.ptr_to([stage]), 1)
                initialise_barrier(self._empty.ptr_to([stage]), self._plan.groups)
            for group in range(2):
                initialise_barrier(self._turn.ptr_to([group]), 1)
            T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
            if self._p.pingpong:
                # The first turn is the first warpgroup's.
                arrive(self._turn.ptr_to([0]))
        T.evaluate(T.cuda.cta_sync())

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
            make(turn, tile // plan.tiles_n, tile % plan.tiles_n)

        if plan.blocks == plan.tiles and every == 1:
            emit(tirx.IntImm("int32", 0))
            return
        # (tiles - block) / blocks tiles are left from this block's first on, rounded up; never negative.
        left = plan.tiles - self._block + (every - first) * plan.blocks - 1
        with T.serial(left // (every * plan.blocks)) as turn:
            emit(turn * every + first)

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
        if self._p.dependent and not early:
            T.evaluate(T.ptx.griddepcontrol.wait())

        def load_tile(_turn: tirx.Expr, row: tirx.Expr, column: tirx.Expr) -> None:
            if early:
                for stage in range(early):
                    self._expect(stage)
                    self._load_b(stage, start + stage, column)
                T.evaluate(T.ptx.griddepcontrol.wait())
                for stage in range(early):
                    self._load_a(stage, start + stage, row)
                ring.set(early % self._p.stages, early // self._p.stages)
            with T.serial(count - early) as step:
                k_tile = start + early + step
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
        self._load(self._tile_a.ptr_to([stage, 0]), self._map_a, k_tile * BLOCK_K, row * self._p.block_m, stage)

    def _load_b(self, stage: tirx.Expr | int, k_tile: tirx.Expr, column: tirx.Expr) -> None:
        p, chunk = self._p, self._plan.chunk
        if self._matmul.b_transposed:
            self._load(self._tile_b.ptr_to([stage, 0]), self._map_b, k_tile * BLOCK_K, column * p.block_n, stage)
            return
        for start in range(0, p.block_n, chunk):
            destination = self._tile_b.ptr_to([stage, start * BLOCK_K])
            self._load(destination, self._map_b, column * p.block_n + start, k_tile * BLOCK_K, stage)

    def _load(
        self, to: tirx.Expr, source: tirx.Var, inner: tirx.Expr, outer: tirx.Expr, stage: tirx.Expr | int
    ) -> None:
        load_box(to, source, inner, outer, self._full.ptr_to([stage]))

    def _consume(self) -> None:
        p, plan = self._p, self._plan
        ring = Ring(p.stages)
        group = self._thread // WARPGROUP
        accumulators = T.alloc_local([plan.m_blocks * p.block_n // 2], "float32")
        multiply = Multiply(self._matmul, plan)
        base_a, base_b = (T.alloc_local([1], "uint64")[0] for _ in range(2))
        first_row = 0 if p.pingpong else group * (plan.m_blocks * 64)
        multiply.describe_a(base_a, self._tile_a.ptr_to([0, first_row * BLOCK_K]))
        multiply.describe_b(base_b, self._tile_b.ptr_to([0, 0]))
        leader = self._thread % WARPGROUP == 0
        _, count = self._k_range()
        if p.dependent:
            T.evaluate(T.ptx.griddepcontrol.wait())

        def make_tile(turn: tirx.Expr, row: tirx.Expr, column: tirx.Expr) -> None:
            self._begin_output(row, column)
            if p.pingpong:
                done = turn * plan.k_tiles
                ring.set(done % p.stages, done // p.stages % 2)
                T.evaluate(T.cuda.mbarrier_wait(self._turn.ptr_to([group]), turn // 2 % 2))
            with T.serial(count) as step:
                T.evaluate(T.cuda.mbarrier_wait(self._full.ptr_to([ring.stage]), ring.phase))
                multiply.emit(accumulators, base_a, base_b, ring.stage, step)
                # The multiplications of the stage before are done: its memory may be overwritten.
                T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
                with T.If(tirx.all(leader, step > 0)), T.Then():
                    arrive(self._empty.ptr_to([ring.previous]))
                ring.advance()
            if p.pingpong:
                with T.If(leader), T.Then():
                    arrive(self._turn.ptr_to([1 - group]))
            T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
            pin(accumulators, plan.m_blocks * p.block_n // 2)
            with T.If(leader), T.Then():
                arrive(self._empty.ptr_to([ring.previous]))
            self._finish(accumulators, column)

        self._each_tile(make_tile, first=group if p.pingpong else 0, every=2 if p.pingpong else 1)

    def _begin_output(self, row: tirx.Expr, column: tirx.Expr) -> None:
        p, plan = self._p, self._plan
        warp, lane = self._thread // 32, self._thread % 32
        group_row = 0 if p.pingpong else warp // 4 * (plan.m_blocks * 64)
        first_row = row * p.block_m + group_row + warp % 4 * 16
        first_column = column * p.block_n + self._rank * plan.shares.columns
        self._output.begin(first_row, first_column, warp, lane)

    def _finish(self, accumulators: tirx.Var, column: tirx.Expr) -> None:
        p, matmul = self._p, self._matmul
        ragged = [matmul.m % p.block_m != 0, matmul.n % p.block_n != 0]
        end: tirx.Expr | int = matmul.n
        if p.split_k > 1:
            accumulators = self._reduce(accumulators)
            if p.block_n // 8 % p.split_k:
                end = tirx.min(matmul.n, (column + 1) * p.block_n)
                ragged[1] = True
        self._output.write(accumulators, ragged=(ragged[0], ragged[1]), column_end=end)
        if p.split_k > 1:
            # Shared memory stays valid until every block of the cluster has read it.
            T.evaluate(T.ptx.barrier.cluster.wait.acquire())

    def _reduce(self, accumulators: tirx.Var) -> tirx.Var:
        """Emit the sum of the cluster's partial sums, in the order of ranks, and return this block's share of it.

        Each block puts its partial sums where all can read them, and sums `shares.columns` columns of the tile.
        """
        p, plan = self._p, self._plan
        eights, share = p.block_n // 8, plan.shares.columns // 8
        thread = self._thread % WARPGROUP
        first_group = self._thread // WARPGROUP * plan.m_blocks
        if p.consumers > 1:
            T.evaluate(T.ptx.bar.sync(_CONSUMERS_BARRIER, p.consumers * WARPGROUP))
        for block in range(plan.m_blocks):
            for eight in range(eights):
                at = self._partial.ptr_to([first_group + block, eight, thread, 0])
                registers = [accumulators[(block * eights + eight) * 4 + index] for index in range(4)]
                T.evaluate(T.ptx["st.shared.v4.f32"](at, *registers))
        T.evaluate(T.ptx.barrier.cluster.arrive.release())
        T.evaluate(T.ptx.barrier.cluster.wait.acquire())
        total = T.alloc_local([plan.m_blocks * share * 4], "float32")
        part = T.alloc_local([4], "float32")
        remote = T.alloc_local([1], "uint32")
        for index in range(plan.m_blocks * share * 4):
            T.buffer_store(total, tirx.FloatImm("float32", 0.0), [index])
        for rank in range(p.split_k):
            for block in range(plan.m_blocks):
                for eight in range(share):
                    which = tirx.min(self._rank * share + eight, eights - 1)
                    at = self._partial.ptr_to([first_group + block, which, thread, 0])
                    window = T.cuda.cvta_generic_to_shared(at)
                    T.evaluate(T.ptx.mapa.shared__cluster.u32(remote[0], window, T.uint32(rank)))
                    T.evaluate(T.ptx["ld.shared::cluster.v4.f32"](*(part[index] for index in range(4)), remote[0]))
                    for index in range(4):
                        position = (block * share + eight) * 4 + index
                        T.buffer_store(total, total[position] + part[index], [position])
        T.evaluate(T.ptx.barrier.cluster.arrive.release())
        return total


def _declare(param: tirx.Var) -> tirx.Var:
    shape = [int(size) for size in param.ty.shape]
    return T.arg(param.name, T.Buffer(shape, str(param.ty.dtype)))
