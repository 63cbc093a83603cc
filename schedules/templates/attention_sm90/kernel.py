"""The kernel of `template.py` on a page, over the words of `schedules.templates.emit`; the notation is that module's.

::

    producer     for each tile: load Q; for each block of keys: await empty stages; load K and V to them (TMA)
    consumers    for each tile: await Q; for each block of keys: await K; scores = Q K^T (wgmma); mask; softmax
                                                                 await V; output = output * change + weights V (wgmma)
                                divide by the sum of weights; write, through the memory of Q or that of other blocks
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.attention.sizes import bind_sizes, flat_view
from relaxtune.schedules.templates.attention.softmax import OnlineSoftmax
from relaxtune.schedules.templates.attention.tiles import Rows, Tile, WholeKeys, each_tile
from relaxtune.schedules.templates.attention_sm90.growth import NewPositions, load_and_copy
from relaxtune.schedules.templates.attention_sm90.output import AttentionOutput
from relaxtune.schedules.templates.attention_sm90.plan import CHUNK, REGISTERS, AttentionPlan
from relaxtune.schedules.templates.attention_sm90.tiles import KeyRing, Maps, QueryTiles, TileMultiply
from relaxtune.schedules.templates.emit.barriers import (
    Barriers,
    Ring,
    arrive_at_cluster,
    initialise,
    share_roles,
    uniform,
)
from relaxtune.schedules.templates.emit.division import Divisor
from relaxtune.schedules.templates.emit.kernel_frame import (
    EmitBody,
    build_function,
    launch_dependents,
    shared_pool,
    wait_for_predecessor,
)
from relaxtune.schedules.templates.emit.registers import clear
from relaxtune.schedules.templates.emit.tma import prefetch_maps, wait_for_stores_to_read
from relaxtune.schedules.templates.emit.wgmma import ROWS, WARPGROUP, wait_for_products

# Named barriers after those of `output.py`: one for each warpgroup's turn.
_TURN_BARRIER = 5


def build_kernel(func: tirx.PrimFunc, plan: AttentionPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""
    p = plan.parameters
    return build_function(func, plan.threads, p.dependent, _Kernel(func, plan).begin, p.split)


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(self, func: tirx.PrimFunc, plan: AttentionPlan) -> None:
        self._func, self._plan, self._spec, self._p = func, plan, plan.spec, plan.parameters
        self._dtype = str(func.params[plan.spec.query.param].ty.dtype)

    def begin(self, params: list[tirx.Var]) -> tuple[Size, EmitBody]:
        """Emit the host's part: tensor maps, and symbolic sizes."""
        plan, self._params = self._plan, params
        self._maps = Maps.encode(plan, params, self._dtype)
        if plan.symbolic:
            self._spec = bind_sizes(self._spec, self._func)
            plan = replace(plan, spec=self._spec)
            self._plan = plan = replace(plan, divisor=Divisor.of(plan.head_items))
        return plan.blocks, self._emit

    def _emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p, maps = self._plan, self._p, self._maps
        self._block, self._thread = block, thread
        if plan.spec.spans is not None:
            self._plan = plan = replace(plan, spans=flat_view(self._params[plan.spec.spans]))
        rings = self._allocate()
        # Before the kernel waits for the one before it.
        with T.If(thread == p.consumers * WARPGROUP), T.Then():
            prefetch_maps(maps.q, maps.k, maps.v, *([] if maps.o is None else [maps.o]))
        with T.If(thread == 0), T.Then():
            initialise(*rings)
        if p.split > 1:
            arrive_at_cluster()
        T.evaluate(T.cuda.cta_sync())
        launch_dependents(p.dependent)
        is_producer = uniform(thread // WARPGROUP) >= p.consumers
        share_roles(is_producer, REGISTERS.get(p.consumers), p.residents, self._produce, self._consume)

    def _allocate(self) -> list[tuple[Barriers, ...]]:
        """Emit the allocation of shared memory; return the barriers.

        Tiles start at multiples of 1024 bytes (`emit.wgmma`). `partial` has what blocks of a cluster exchange.
        """
        plan, p, maps, pool = self._plan, self._p, self._maps, shared_pool()
        shape = plan.query_stages, plan.rows * plan.query_chunks * CHUNK
        tile_q = pool.alloc(shape, self._dtype, align=1024)
        tile_k = pool.alloc((p.stages, p.block_k * plan.chunks * CHUNK), self._dtype, align=1024)
        tile_v = pool.alloc((p.stages, p.block_k * plan.value_chunks * CHUNK), self._dtype, align=1024)
        if p.split > 1:
            self._partial = pool.alloc((plan.partial_floats,), "float32", align=128)
        full_q, empty_q = (Barriers(pool, plan.query_stages, count) for count in (1, p.consumers))
        full_k, full_v, empty_k, empty_v = (Barriers(pool, p.stages, n) for n in (1, 1, p.consumers, p.consumers))
        pool.commit()
        self._queries = QueryTiles(plan, tile_q, full_q, empty_q, maps.q)
        self._keys = KeyRing(tile_k, full_k, empty_k, plan.chunks, p.block_k, maps.k, maps.to_k)
        self._values = KeyRing(tile_v, full_v, empty_v, plan.value_chunks, p.block_k, maps.v, maps.to_v)
        return [(full_q, empty_q), (full_k, full_v, empty_k, empty_v)]

    def _produce(self) -> None:
        with T.If(self._thread == self._p.consumers * WARPGROUP), T.Then():
            self._load()

    def _load(self) -> None:
        """Emit the loads of all tiles of a block, by one thread."""
        p, growth = self._p, self._spec.growth
        ring_k, ring_v = Ring(p.stages), Ring(p.stages)
        wait_for_predecessor(p.dependent and growth is None, launches=False)

        def load(tile: Tile) -> None:
            def load_block(step: tirx.Expr) -> None:
                self._keys.load(ring_k, tile, step)
                self._values.load(ring_v, tile, step)

            def load_query() -> None:
                wait_for_predecessor(p.dependent, launches=False)
                self._queries.load(tile)

            if growth is not None:
                load_and_copy(self._func, self._plan, (self._keys, self._values), tile, load_query, load_block)
                return
            self._queries.load(tile)
            self._keys.load(ring_k, tile, 0)
            with T.serial(tile.block_count - 1) as step:
                self._keys.load(ring_k, tile, step + 1)
                self._values.load(ring_v, tile, step)
            self._values.load(ring_v, tile, tile.block_count - 1)

        each_tile(self._plan, self._block, load)

    def _consume(self) -> None:
        plan, p, spec, thread = self._plan, self._p, self._spec, self._thread
        self._group = group = thread // WARPGROUP if p.consumers > 1 else tirx.IntImm("int32", 0)
        self._scores = T.alloc_local([p.block_k // 2], "float32")
        self._weights = T.alloc_local([p.block_k // 4], "uint32")
        self._sums = T.alloc_local([spec.value_dim // 2], "float32")
        bias = None if spec.bias is None else self._params[spec.bias.param]
        self._softmax = OnlineSoftmax(plan, bias, self._dtype, thread % 32)
        first_row = self._queries.tile.ptr_to([0, group * (ROWS * CHUNK)])
        self._multiply = TileMultiply(plan, self._dtype, first_row, self._keys, self._values)
        self._ring_k, self._ring_v = Ring(p.stages), Ring(p.stages)
        self._leader = thread % WARPGROUP == 0
        if p.dependent and (bias is not None or spec.growth is not None or spec.spans is not None):
            T.evaluate(T.ptx.griddepcontrol.wait())
        if spec.growth is not None:
            self._new_keys, self._new_values = (NewPositions(plan, role, self._params) for role in ("key", "value"))
        if p.pingpong:
            # The first turn is the first warpgroup's.
            with T.If(group == 0), T.Then():
                self._pass_turn(tirx.IntImm("int32", 0))
        self._output = AttentionOutput(plan, self._params[spec.output.param], thread)
        each_tile(plan, self._block, self._make)
        if p.split == 1:
            with T.If(self._leader), T.Then():
                wait_for_stores_to_read()

    def _make(self, tile: Tile) -> None:
        """Emit a tile: the sum over its keys, twice where one without anything in its mask is made as if without."""
        plan, thread, softmax = self._plan, self._thread, self._softmax
        self._tile, (self._query_stage, phase) = tile, self._queries.stage(tile)
        softmax.begin(Rows.of(plan, tile, thread // 32 * 16 + thread % 32 // 4))
        self._whole = WholeKeys.of(plan, tile, self._group * ROWS, ROWS)
        clear(self._sums)
        self._queries.full.wait(self._query_stage, phase)
        if self._p.overlap:
            self._begin_scores(tirx.IntImm("int32", 0))
        sum_up = self._sum_overlapped if self._p.overlap else self._sum_in_turn
        nothing = softmax.find_nothing()
        if nothing is None:
            sum_up()
        else:
            with T.If(nothing):
                with T.Then(), softmax.without_bias():
                    sum_up()
                with T.Else():
                    sum_up()
        softmax.finish()
        if self._p.split > 1:
            self._output.combine(self._sums, softmax, self._partial, self._block % self._p.split, tile)
        else:
            self._output.store(self._sums, softmax, self._queries.tile, self._query_stage, self._maps.o, tile)

    def _sum_in_turn(self) -> None:
        """Emit the loop over the keys: each block's scores, softmax and values."""
        with T.serial(self._tile.block_count) as step:
            self._begin_scores(step)
            self._softmax.prefetch(self._tile.first_block + step)
            self._queries.release(self._tile, tirx.all(self._leader, self._tile.turn > 0, step == 0))
            self._end(self._scores, self._keys, self._ring_k)
            self._weigh(step)
            with T.If(step > 0), T.Then():
                self._softmax.rescale(self._sums)
            self._softmax.convert(self._scores, self._weights)
            self._begin_values(step)
            self._end(self._sums, self._values, self._ring_v)

    def _sum_overlapped(self) -> None:
        """Emit the loop over the keys: the scores of a block run beside the values and the softmax of the last.

        The first block's scores are on their way.
        """
        zero, group, pingpong = tirx.IntImm("int32", 0), self._group, self._p.pingpong
        self._softmax.prefetch(self._tile.first_block)
        self._queries.release(self._tile, tirx.all(self._leader, self._tile.turn > 0, zero == 0))
        self._end(self._scores, self._keys, self._ring_k)
        self._weigh(zero)
        self._softmax.convert(self._scores, self._weights)
        with T.serial(self._tile.block_count - 1) as step:
            self._keys.full.wait(self._ring_k.stage, self._ring_k.phase)
            if pingpong:
                T.evaluate(T.ptx.bar.sync(tirx.Cast("uint32", group + _TURN_BARRIER), 2 * WARPGROUP))
            self._begin_scores(step + 1, wait=False)
            self._softmax.prefetch(self._tile.first_block + step + 1)
            self._begin_values(step)
            if pingpong:
                self._pass_turn((group + 1) % self._p.consumers)
            self._end(self._scores, self._keys, self._ring_k, pending=1)
            self._weigh(step + 1)
            self._end(self._sums, self._values, self._ring_v)
            self._softmax.rescale(self._sums)
            self._softmax.convert(self._scores, self._weights)
        self._begin_values(self._tile.block_count - 1)
        self._end(self._sums, self._values, self._ring_v)

    def _begin_scores(self, step: tirx.Expr, *, wait: bool = True) -> None:
        stage = self._ring_k.stage
        if wait:
            self._keys.full.wait(stage, self._ring_k.phase)
        if self._spec.growth is not None:
            self._new_keys.put(self._thread, self._tile.first_block + step, self._keys.tile, stage, self._tile)
        self._multiply.scores(self._scores, self._query_stage, stage)

    def _begin_values(self, step: tirx.Expr) -> None:
        stage = self._ring_v.stage
        self._values.full.wait(stage, self._ring_v.phase)
        if self._spec.growth is not None:
            self._new_values.put(self._thread, self._tile.first_block + step, self._values.tile, stage, self._tile)
        self._multiply.values(self._sums, self._weights, stage)

    def _end(self, registers: tirx.Var, blocks: KeyRing, ring: Ring, pending: int = 0) -> None:
        """Emit the wait for all multiplications but the last `pending`, and the release of what they read."""
        wait_for_products(pending, registers)
        with T.If(self._leader), T.Then():
            blocks.empty.arrive(ring.stage)
        ring.advance()

    def _weigh(self, step: tirx.Expr) -> None:
        spec, plan, block = self._spec, self._plan, self._tile.first_block + step
        may_mask = spec.causal or spec.hides_earlier or self._p.split > 1 or not plan.whole_blocks
        self._softmax.weigh(self._scores, block, self._whole.exceeded_by(plan, block) if may_mask else None)

    def _pass_turn(self, group: tirx.Expr) -> None:
        T.evaluate(T.ptx.bar.arrive(tirx.Cast("uint32", group + _TURN_BARRIER), 2 * WARPGROUP))
