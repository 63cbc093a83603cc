"""K and V written besides O, in the kernel of `template.py` (`schedules.functions.attention.CacheGrowth`).

Positions of the caches come through shared memory: each block of them is loaded for the multiplications, and from there
copied by TMA to where K and V are written; the copies end before the first new position. New positions are put by the
consumer's threads into the block in shared memory, swizzled as TMA has it, and into K and V. One thread block works on
each head of K and V (with `split`, on some of its blocks of keys), so that every element is read and written once.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions.attention import HeadLayout
from relaxtune.schedules.templates.attention.sizes import ceil_div, flat_view
from relaxtune.schedules.templates.attention.tiles import Tile
from relaxtune.schedules.templates.attention_sm90.output import GROUP_BARRIER
from relaxtune.schedules.templates.attention_sm90.plan import CHUNK, WARPGROUP, AttentionPlan
from relaxtune.schedules.templates.emit.hopper import store_tile

# Elements of 2 bytes in 16.
_VECTOR = 8


def copy_block(
    plan: AttentionPlan, tensor_map: tirx.Var, chunks: int, block: tirx.Expr, tile: tirx.Var, stage: tirx.Expr, at: Tile
) -> None:
    """Emit the copy of a block of keys, or values, of the caches from shared memory; it is not waited for.

    `tensor_map` is of the caches' positions in what is written; the block lies in a stage of `tile`, in `chunks`.
    """
    block_k = plan.parameters.block_k
    for chunk in range(chunks):
        source = tile.ptr_to([stage, chunk * block_k * CHUNK])
        store_tile(tensor_map, (chunk * CHUNK, at.kv_head, block * block_k, at.batch), source)


class NewPositions:
    """Emits the putting of new keys, or values, where the multiplications and the results want them.

    `role` is "key" or "value"; `params` are the kernel's.
    """

    def __init__(self, plan: AttentionPlan, role: str, params: list[tirx.Var]) -> None:
        assert plan.spec.growth is not None
        layouts = plan.spec.layouts()
        new, result = layouts[f"new {role}"], layouts[role]
        self._plan = plan
        self._width = plan.spec.width(role)
        self._past = plan.spec.growth.past
        self._new, self._result = new, result
        self._from, self._to = (flat_view(params[layout.param]) for layout in (new, result))

    def put(self, thread: tirx.Expr, block: tirx.Expr, tile: tirx.Var, stage: tirx.Expr, at: Tile) -> None:
        """Emit it for one block of keys whose cached positions have arrived, by all of a warpgroup."""
        spec, block_k = self._plan.spec, self._plan.parameters.block_k
        across = self._width // _VECTOR
        items = (spec.keys - self._past) * across
        start = block * block_k
        with T.If(start + block_k > self._past), T.Then():
            with T.serial(ceil_div(items, WARPGROUP)) as turn:
                item = turn * WARPGROUP + thread
                row, vector = item // across, item % across
                line = self._past + row - start
                with T.If(tirx.all(item < items, line >= 0, line < block_k)), T.Then():
                    self._put_vector(row, line, vector, tile, stage, at)
            T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
            T.evaluate(T.ptx.bar.sync(tirx.const(GROUP_BARRIER, "uint32"), WARPGROUP))

    def _put_vector(
        self, row: tirx.Expr, line: tirx.Expr, vector: tirx.Expr, tile: tirx.Var, stage: tirx.Expr, at: Tile
    ) -> None:
        words = T.alloc_local([4], "uint32")
        registers = [words[index] for index in range(4)]
        source = self._from.ptr_to([_element(self._new, row, at) + vector * _VECTOR])
        T.evaluate(T.ptx["ld.global.v4.u32"](*registers, source))
        # The swizzle: 16-byte units of a row change places by the row's number in its 8.
        unit = tirx.bitwise_xor(vector % (CHUNK // _VECTOR), line % 8)
        chunk = vector // (CHUNK // _VECTOR) * (self._plan.parameters.block_k * CHUNK)
        T.evaluate(T.ptx["st.shared.v4.u32"](tile.ptr_to([stage, chunk + line * CHUNK + unit * _VECTOR]), *registers))
        target = self._to.ptr_to([_element(self._result, self._past + row, at) + vector * _VECTOR])
        T.evaluate(T.ptx["st.global.v4.u32"](target, *registers))


def _element(layout: HeadLayout, position: tirx.Expr, at: Tile) -> tirx.Expr:
    steps = (layout.batch_stride, layout.position_stride, layout.head_stride)
    places = (at.batch, position, at.kv_head)
    return sum((place * step for place, step in zip(places, steps, strict=True)), start=layout.offset)
