"""Caches that grow, in the kernel of `template.py`: what was cached and what is new go to K and V, and are multiplied.

The producer loads the caches and copies each block from shared memory to K and V once it has arrived; consumers put new
positions into the blocks, and into K and V.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions.attention import HeadLayout
from relaxtune.schedules.marks import own_outputs, unwritten_params
from relaxtune.schedules.templates.attention.sizes import ceil_div, flat_view
from relaxtune.schedules.templates.attention.tiles import Tile
from relaxtune.schedules.templates.attention_sm90.output import GROUP_BARRIER, VECTOR
from relaxtune.schedules.templates.attention_sm90.plan import CHUNK, AttentionPlan
from relaxtune.schedules.templates.attention_sm90.tiles import KeyRing
from relaxtune.schedules.templates.emit.barriers import Ring
from relaxtune.schedules.templates.emit.registers import load_vector, store_vector, when
from relaxtune.schedules.templates.emit.tma import end_stores, order_before_tma, store_tile, wait_for_stores_to_read
from relaxtune.schedules.templates.emit.wgmma import WARPGROUP


def load_and_copy(
    func: tirx.PrimFunc,
    plan: AttentionPlan,
    rings: tuple[KeyRing, KeyRing],
    at: Tile,
    load_query: Callable[[], None],
    load: Callable[[tirx.Expr], None],
) -> None:
    """Emit the loads of the only tile, each block of its keys and values copied to K and V once it has arrived.

    `load` emits the loads of a block of keys and of values. Blocks that fit are loaded before `load_query` waits for
    the kernel before this one if no kernel writes the caches. They are copied then, too, if no other kernel reads or
    writes K and V.
    """
    spec, stages, count, growth = plan.spec, plan.parameters.stages, at.block_count, plan.spec.growth
    assert growth is not None
    past = growth.past
    early_loads = {growth.past_key.param, growth.past_value.param} <= unwritten_params(func)
    early_copies = early_loads and {spec.key.param, spec.value.param} <= own_outputs(func)
    ring, ahead, first = Ring(stages), stages - 1, tirx.min(count, stages)

    def copy(step: tirx.Expr) -> None:
        """Emit the copies of a block of keys and of values as one group."""
        for blocks in rings:
            assert blocks.target is not None
            blocks.full.wait(ring.stage, ring.phase)
            # A block of new positions alone has nothing to be copied; of a cache without positions, that is the first.
            with when([] if isinstance(past, int) else [(at.first_block + step) * blocks.block_k < past]):
                for source, place in blocks.places(ring, at, step):
                    store_tile(blocks.target, place, source)
        end_stores()
        ring.advance()

    if not early_loads:
        load_query()
    with T.serial(first) as step:
        load(step)
    if early_loads and not early_copies:
        load_query()
    with T.serial(first) as step:
        copy(step)
    if early_copies:
        load_query()
    left = count - first
    with T.serial(left) as step:
        # The next loads take the place of the blocks that were copied.
        wait_for_stores_to_read()
        load(stages + step)
        with T.If(step >= ahead), T.Then():
            copy(stages + step - ahead)
    late = tirx.min(left, ahead)
    with T.serial(late) as step:
        copy(count - late + step)
    wait_for_stores_to_read()


class NewPositions:
    """Emits the putting of new keys, or values, where the multiplications and the results want them.

    The consumer's threads put them into the block in shared memory, swizzled as TMA has it, and into K and V. Cached
    positions are copied by TMA; one thread block works on each head of K and V (with `split`, on some of its blocks of
    keys), so that every element is read and written once.

    `role` is "key" or "value"; `params` are the kernel's.
    """

    def __init__(self, plan: AttentionPlan, role: str, params: list[tirx.Var]) -> None:
        assert plan.spec.growth is not None
        layouts = plan.spec.layouts()
        self._plan, self._width, self._past = plan, plan.spec.width(role), plan.spec.growth.past
        self._new, self._result = layouts[f"new {role}"], layouts[role]
        self._from, self._to = (flat_view(params[layout.param]) for layout in (self._new, self._result))

    def put(self, thread: tirx.Expr, block: tirx.Expr, tile: tirx.Var, stage: tirx.Expr, at: Tile) -> None:
        """Emit it for one block of keys whose cached positions have arrived, by all of a warpgroup."""
        spec, block_k = self._plan.spec, self._plan.parameters.block_k
        across, start = self._width // VECTOR, block * block_k
        items = (spec.keys - self._past) * across
        with T.If(start + block_k > self._past), T.Then():
            with T.serial(ceil_div(items, WARPGROUP)) as turn:
                item = turn * WARPGROUP + thread
                row, vector = item // across, item % across
                line = self._past + row - start
                with T.If(tirx.all(item < items, line >= 0, line < block_k)), T.Then():
                    words = T.alloc_local([4], "uint32")
                    load_vector("global", words, self._from.ptr_to([_element(self._new, row, at) + vector * VECTOR]))
                    # The swizzle: 16-byte units of a row change places by the row's number in its 8.
                    unit = tirx.bitwise_xor(vector % (CHUNK // VECTOR), line % 8)
                    chunk = vector // (CHUNK // VECTOR) * (block_k * CHUNK)
                    store_vector("shared", tile.ptr_to([stage, chunk + line * CHUNK + unit * VECTOR]), words)
                    target = _element(self._result, self._past + row, at) + vector * VECTOR
                    store_vector("global", self._to.ptr_to([target]), words)
            order_before_tma()
            T.evaluate(T.ptx.bar.sync(tirx.const(GROUP_BARRIER, "uint32"), WARPGROUP))


def _element(layout: HeadLayout, position: tirx.Expr, at: Tile) -> tirx.Expr:
    steps = (layout.batch_stride, layout.position_stride, layout.head_stride)
    places = (at.batch, position, at.kv_head)
    return sum((place * step for place, step in zip(places, steps, strict=True)), start=layout.offset)
