"""The kernel of `template.py`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions.attention import HeadLayout
from relaxtune.schedules.marks import own_outputs, unwritten_params
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.attention.sizes import bind_sizes, flat_view, most
from relaxtune.schedules.templates.attention.softmax import OnlineSoftmax
from relaxtune.schedules.templates.attention.tiles import ELEMENT_BYTES, Rows, Tile, WholeKeys, each_tile
from relaxtune.schedules.templates.attention_sm90.output import AttentionOutput, NewPositions
from relaxtune.schedules.templates.attention_sm90.plan import CHUNK, REGISTERS, ROWS, WARPGROUP, AttentionPlan
from relaxtune.schedules.templates.attention_sm90.ring import Maps, Memory, Producer, Stages
from relaxtune.schedules.templates.emit.barriers import Ring, arrive_at_cluster, initialise, share_roles, uniform
from relaxtune.schedules.templates.emit.division import Divisor
from relaxtune.schedules.templates.emit.kernel_frame import EmitBody, build_function, launch_dependents
from relaxtune.schedules.templates.emit.registers import all_of, clear
from relaxtune.schedules.templates.emit.tensor_cores import MMA_KINDS
from relaxtune.schedules.templates.emit.tma import encode_tensor, wait_for_stores_to_read
from relaxtune.schedules.templates.emit.wgmma import ROW_UNITS, Descriptor, multiply, wait_for_products

# Named barriers after those of `attention_sm90_output`: one for each warpgroup's turn.
_TURN_BARRIER = 5


def build_kernel(func: tirx.PrimFunc, plan: AttentionPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""
    p = plan.parameters
    return build_function(func, plan.threads, p.dependent, _Kernel(func, plan).begin, p.split)


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(self, func: tirx.PrimFunc, plan: AttentionPlan) -> None:
        self._func = func
        self._plan = plan
        self._spec = plan.spec
        self._p = plan.parameters
        self._dtype = str(func.params[plan.spec.query.param].ty.dtype)

    def begin(self, params: list[tirx.Var]) -> tuple[Size, EmitBody]:
        plan = self._plan
        self._params = params
        self._maps = self._encode_maps()
        if plan.symbolic:
            self._spec = bind_sizes(self._spec, self._func)
            plan = replace(plan, spec=self._spec)
            self._plan = plan = replace(plan, divisor=Divisor.of(plan.head_items))
        return plan.blocks, self._emit

    def _emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p = self._plan, self._p
        self._block, self._thread = block, thread
        if plan.spec.spans is not None:
            self._plan = plan = replace(plan, spans=flat_view(self._params[plan.spec.spans]))
        self._memory = Memory(plan, self._dtype)
        # Before the kernel waits for the one before it.
        with T.If(thread == p.consumers * WARPGROUP), T.Then():
            self._maps.prefetch()
        with T.If(thread == 0), T.Then():
            initialise(*self._memory.rings())
        if p.split > 1:
            arrive_at_cluster()
        T.evaluate(T.cuda.cta_sync())
        launch_dependents(p.dependent)
        is_producer = uniform(self._thread // WARPGROUP) >= p.consumers
        share_roles(is_producer, REGISTERS.get(p.consumers), p.residents, self._produce, self._consume)

    def _produce(self) -> None:
        plan, spec = self._plan, self._spec
        with T.If(self._thread == self._p.consumers * WARPGROUP), T.Then():
            caches = set() if spec.growth is None else {spec.growth.past_key.param, spec.growth.past_value.param}
            loads = caches <= unwritten_params(self._func)
            copies = loads and {spec.key.param, spec.value.param} <= own_outputs(self._func)
            producer = Producer(plan, self._memory, self._maps, early_caches=loads, early_copies=copies)
            producer.produce(self._block)

    def _encode_maps(self) -> Maps:
        spec, plan, p = self._spec, self._plan, self._p
        queries, keys = (CHUNK, plan.group, plan.tile_queries), (CHUNK, 1, p.block_k)
        stored = (CHUNK, plan.group, ROWS // plan.group)
        map_q = self._encode("map_q", "query", spec.query, spec.queries, queries)
        key, value, loaded = spec.key, spec.value, spec.keys
        to_k = to_v = map_o = None
        if spec.growth is not None:
            key, value, loaded = spec.growth.past_key, spec.growth.past_value, spec.growth.past
            to_k = self._encode("to_k", "key", spec.key, loaded, keys)
            to_v = self._encode("to_v", "value", spec.value, loaded, keys)
        map_k = self._encode("map_k", "key", key, loaded, keys)
        map_v = self._encode("map_v", "value", value, loaded, keys)
        if p.split == 1:
            map_o = self._encode("map_o", "output", spec.output, spec.queries, stored)
        return Maps(map_q, map_k, map_v, map_o, to_k, to_v)

    def _encode(self, name: str, role: str, layout: HeadLayout, positions: Size, box: tuple[int, int, int]) -> tirx.Var:
        """Emit the encoding of a tensor map with axes d, head, position, batch."""
        spec = self._spec
        # TMA takes no axis of 0; of a cache without positions, what is loaded is not used.
        sizes = (spec.width(role), spec.heads_of(role), most(positions, 1), spec.batch)
        strides = (layout.head_stride, layout.position_stride, layout.batch_stride)
        # Of an axis of size 1 any stride will do, but TMA takes no 0.
        strides_bytes = [most(stride * ELEMENT_BYTES, 16) for stride in strides]
        tensor, empty = self._params[layout.param], None
        if spec.growth is not None and not isinstance(positions, int):
            # A tensor without elements may have no address.
            empty = positions == 0, self._params[spec.query.param]
        return encode_tensor(
            name, tensor, self._dtype, sizes, strides_bytes, (*box, 1), 3, offset=layout.offset, empty=empty
        )

    def _consume(self) -> None:
        plan, p, spec = self._plan, self._p, self._spec
        lane = self._thread % 32
        group = self._thread // WARPGROUP if p.consumers > 1 else tirx.IntImm("int32", 0)
        self._scores = T.alloc_local([p.block_k // 2], "float32")
        self._weights = T.alloc_local([p.block_k // 4], "uint32")
        self._sums = T.alloc_local([spec.value_dim // 2], "float32")
        bias = None if spec.bias is None else self._params[spec.bias.param]
        self._softmax = OnlineSoftmax(plan, bias, self._dtype, lane)
        self._multiply = AttentionMultiply(plan, self._dtype)
        memory = self._memory
        first_row = memory.tile_q.ptr_to([0, group * (ROWS * CHUNK)])
        self._multiply.describe(first_row, memory.keys.tile.ptr_to([0, 0]), memory.values.tile.ptr_to([0, 0]))
        self._ring_k, self._ring_v = Ring(p.stages), Ring(p.stages)
        self._leader = self._thread % WARPGROUP == 0
        if p.dependent and (bias is not None or spec.growth is not None or spec.spans is not None):
            T.evaluate(T.ptx.griddepcontrol.wait())
        if spec.growth is not None:
            self._new_keys = NewPositions(plan, "key", self._params)
            self._new_values = NewPositions(plan, "value", self._params)
        if p.pingpong:
            # The first turn is the first warpgroup's.
            with T.If(group == 0), T.Then():
                self._pass_turn(tirx.IntImm("int32", 0))
        output = AttentionOutput(plan, self._params[spec.output.param], self._thread)

        def make(tile: Tile) -> None:
            self._tile = tile
            self._query_stage, phase = self._memory.query_ring(tile)
            self._softmax.begin(Rows.of(plan, tile, self._thread // 32 * 16 + lane // 4))
            self._whole = WholeKeys.of(plan, tile, group * ROWS, ROWS)
            clear(self._sums)
            self._memory.full_q.wait(self._query_stage, phase)
            self._sum(group)
            self._softmax.finish()
            if p.split > 1:
                output.combine(self._sums, self._softmax, self._memory.partial, self._block % p.split, tile)
            else:
                stage = self._query_stage
                output.store(self._sums, self._softmax, self._memory.tile_q, stage, self._maps.o, tile)

        each_tile(plan, self._block, make)
        if p.split == 1:
            with T.If(self._leader), T.Then():
                wait_for_stores_to_read()

    def _sum(self, group: tirx.Expr) -> None:
        """Emit the loop over the keys, twice where a tile without anything in its mask is made as if there was none."""
        if self._p.overlap:
            self._begin_scores(tirx.IntImm("int32", 0))
        make = self._sum_overlapped if self._p.overlap else self._sum_in_turn
        nothing = self._softmax.find_nothing()
        if nothing is None:
            make(group)
            return
        with T.If(nothing):
            with T.Then(), self._softmax.without_bias():
                make(group)
            with T.Else():
                make(group)

    def _sum_in_turn(self, _group: tirx.Expr) -> None:
        """Emit the loop over the keys: each block's scores, softmax and values."""
        with T.serial(self._tile.block_count) as step:
            self._begin_scores(step)
            self._softmax.prefetch(self._tile.first_block + step)
            self._release_query(step)
            self._end_scores(0)
            self._weigh(step)
            with T.If(step > 0), T.Then():
                self._softmax.rescale(self._sums, self._spec.value_dim // 2)
            self._softmax.convert(self._scores, self._weights)
            self._begin_values(step)
            self._end_values()

    def _sum_overlapped(self, group: tirx.Expr) -> None:
        """Emit the loop over the keys: the scores of a block run beside the values and the softmax of the last.

        The first block's scores are on their way.
        """
        zero = tirx.IntImm("int32", 0)
        self._softmax.prefetch(self._tile.first_block)
        self._release_query(zero)
        self._end_scores(0)
        self._weigh(zero)
        self._softmax.convert(self._scores, self._weights)
        with T.serial(self._tile.block_count - 1) as step:
            self._wait(self._memory.keys, self._ring_k)
            if self._p.pingpong:
                T.evaluate(T.ptx.bar.sync(tirx.Cast("uint32", group + _TURN_BARRIER), 2 * WARPGROUP))
            self._begin_scores(step + 1, wait=False)
            self._softmax.prefetch(self._tile.first_block + step + 1)
            self._begin_values(step)
            if self._p.pingpong:
                self._pass_turn((group + 1) % self._p.consumers)
            self._end_scores(1)
            self._weigh(step + 1)
            self._end_values()
            self._softmax.rescale(self._sums, self._spec.value_dim // 2)
            self._softmax.convert(self._scores, self._weights)
        self._begin_values(self._tile.block_count - 1)
        self._end_values()

    def _release_query(self, step: tirx.Expr) -> None:
        """Emit, at a tile's first step, the release of the memory of the tile before, once its output is copied."""
        turn, stages = self._tile.turn, self._plan.query_stages
        if stages > 1:
            with T.If(tirx.all(self._leader, turn > 0, step == 0)), T.Then():
                wait_for_stores_to_read()
                self._memory.empty_q.arrive((turn + 1) % stages)

    def _wait(self, stages: Stages, ring: Ring) -> None:
        stages.full.wait(ring.stage, ring.phase)

    def _end(self, registers: tirx.Var, stages: Stages, ring: Ring, pending: int = 0) -> None:
        """Emit the wait for all multiplications but the last `pending`, and the release of what they read."""
        wait_for_products(pending, registers)
        with T.If(self._leader), T.Then():
            stages.empty.arrive(ring.stage)
        ring.advance()

    def _begin_scores(self, step: tirx.Expr, *, wait: bool = True) -> None:
        keys, ring = self._memory.keys, self._ring_k
        if wait:
            self._wait(keys, ring)
        if self._spec.growth is not None:
            block = self._tile.first_block + step
            self._new_keys.put(self._thread, block, keys.tile, ring.stage, self._tile)
        self._multiply.scores(self._scores, self._query_stage, ring.stage)

    def _end_scores(self, pending: int) -> None:
        self._end(self._scores, self._memory.keys, self._ring_k, pending)

    def _weigh(self, step: tirx.Expr) -> None:
        spec, plan, block = self._spec, self._plan, self._tile.first_block + step
        may_mask = spec.causal or spec.hides_earlier or self._p.split > 1 or not plan.whole_blocks
        self._softmax.weigh(self._scores, block, self._whole.exceeded_by(plan, block) if may_mask else None)

    def _begin_values(self, step: tirx.Expr) -> None:
        values, ring = self._memory.values, self._ring_v
        self._wait(values, ring)
        if self._spec.growth is not None:
            block = self._tile.first_block + step
            self._new_values.put(self._thread, block, values.tile, ring.stage, self._tile)
        self._multiply.values(self._sums, self._weights, ring.stage)

    def _end_values(self) -> None:
        self._end(self._sums, self._memory.values, self._ring_v)

    def _pass_turn(self, group: tirx.Expr) -> None:
        T.evaluate(T.ptx.bar.arrive(tirx.Cast("uint32", group + _TURN_BARRIER), 2 * WARPGROUP))


class AttentionMultiply:
    """The wgmma instructions of one block of keys.

    Matrix descriptors hold addresses and byte offsets in units of 16 bytes. Every tile is stored in chunks of 64
    columns, 128-byte rows swizzled 128 bytes. Q and K are read along their rows ("K-major"): 8 rows ("stride") are 1024
    bytes apart, 16 columns 32 bytes further along the row. V is read along its columns ("MN-major"): 8 rows are 1024
    bytes apart ("stride"), chunks of 64 columns `block_k` rows ("leading"), and 16 keys are 16 rows further.
    """

    def __init__(self, plan: AttentionPlan, dtype: str) -> None:
        self._plan = plan
        kind = MMA_KINDS[dtype]
        instruction = "wgmma.mma_async.sync.aligned.m64n{}k16.f32." + f"{kind}.{kind}"
        self._scores = instruction.format(plan.parameters.block_k)
        self._values = instruction.format(plan.spec.value_dim)

    def describe(self, query: tirx.Expr, key: tirx.Expr, value: tirx.Expr) -> None:
        """Emit the descriptors of a warpgroup's first row of Q and of the first stages of K and V."""
        leading = self._plan.parameters.block_k * ROW_UNITS
        self._query, self._key = Descriptor(query), Descriptor(key)
        self._value = Descriptor(value, leading)

    def scores(self, scores: tirx.Var, query_stage: tirx.Expr, stage: tirx.Expr) -> None:
        """Emit `scores = Q K^T` for the keys of a stage, not waited for."""
        plan = self._plan
        rows, keys = plan.rows, plan.parameters.block_k
        first = stage * (plan.chunks * keys * ROW_UNITS)
        first_query = query_stage * (plan.query_chunks * rows * ROW_UNITS)
        products = []
        for step in range(plan.columns // 16):
            chunk, part = divmod(step, CHUNK // 16)
            query = self._query.at(first_query + (chunk * rows * ROW_UNITS + part * 2))
            key = self._key.at(first + (chunk * keys * ROW_UNITS + part * 2))
            products.append([*all_of(scores), query, key, tirx.const(step > 0, "bool")])
        multiply(self._scores, products, (1, 1, 0, 0))

    def values(self, output: tirx.Var, weights: tirx.Var, stage: tirx.Expr) -> None:
        """Emit `output += P V` for the keys of a stage, P in registers, not waited for."""
        plan = self._plan
        keys = plan.parameters.block_k
        first = stage * (plan.value_chunks * keys * ROW_UNITS)
        products = []
        for step in range(keys // 16):
            words = [weights[step * 4 + word] for word in range(4)]
            value = self._value.at(first + step * 16 * ROW_UNITS)
            products.append([*all_of(output), *words, value, tirx.const(True, "bool")])
        multiply(self._values, products, (1, 1, 1))
