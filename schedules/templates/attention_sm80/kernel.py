"""The kernel of `template.py` on a page, over the words of `schedules.templates.emit`; the notation is that module's.

::

    all threads    copy the tile of Q, and the first blocks of K and V to the stages of two rings (cp.async)
                   for each block of keys: await K; copy the next blocks; scores = Q K^T (mma); mask; weights = softmax
                                           await V; output = output * change + weights V (mma)
                   add what other blocks have of the tile; divide by the sum of weights; write whole rows
"""

from __future__ import annotations

import math
from contextlib import nullcontext

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions.attention import HeadLayout
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.attention.sizes import flat_view
from relaxtune.schedules.templates.attention.softmax import OnlineSoftmax, inverse_total, pack
from relaxtune.schedules.templates.attention.tiles import Rows, Tile, WholeKeys, each_tile
from relaxtune.schedules.templates.attention_sm80.copies import KeyBlocks, RowCopies
from relaxtune.schedules.templates.attention_sm80.multiply import AttentionMultiply
from relaxtune.schedules.templates.attention_sm80.plan import ROWS, WARP, AttentionPlan
from relaxtune.schedules.templates.attention_sm80.sums import SplitKeys
from relaxtune.schedules.templates.emit.async_copy import Stages, end_copies, wait_for_copies_of_block
from relaxtune.schedules.templates.emit.kernel_frame import EmitBody, build_function, shared_pool, wait_for_predecessor
from relaxtune.schedules.templates.emit.registers import clear, in_register, load_vector, store_vector, when
from relaxtune.schedules.templates.emit.tensor_cores import CHUNK, chunk_place


def build_kernel(func: tirx.PrimFunc, plan: AttentionPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""
    return build_function(func, plan.threads, plan.parameters.dependent, _Kernel(func, plan).begin)


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(self, func: tirx.PrimFunc, plan: AttentionPlan) -> None:
        self._func = func
        self._plan, self._spec, self._p = plan, plan.spec, plan.parameters
        self._dtype = str(func.params[plan.spec.query.param].ty.dtype)

    def begin(self, params: list[tirx.Var]) -> tuple[Size, EmitBody]:
        """Return the blocks of the grid, and what emits the body."""
        self._params = params
        return self._plan.blocks, self._emit

    def _emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p = self._plan, self._p
        self._block, self._thread, self._warp, self._lane = block, thread, thread // WARP, thread % WARP
        pool = shared_pool()
        self._tile_q = pool.alloc((plan.query_elements,), self._dtype, align=1024)
        self._tile_k = pool.alloc((p.stages, p.block_k * plan.width * CHUNK), self._dtype, align=1024)
        self._tile_v = pool.alloc((p.stages, p.block_k * plan.value_width * CHUNK), self._dtype, align=1024)
        pool.commit()
        wait_for_predecessor(p.dependent)
        each_tile(plan, block, self._make)

    def _make(self, tile: Tile) -> None:
        plan, p, spec = self._plan, self._p, self._spec
        self._tile = tile
        self._begin_copies()
        bias = None if spec.bias is None else self._params[spec.bias.param]
        numbers = range(p.m_steps)
        self._scores = [T.alloc_local([p.block_k // 2], "float32") for _ in numbers]
        self._weights = [T.alloc_local([p.block_k // 4], "uint32") for _ in numbers]
        self._sums = [T.alloc_local([plan.value_pairs * 8], "float32") for _ in numbers]
        self._softmax = [OnlineSoftmax(plan, bias, self._dtype, self._lane, searches=False) for _ in numbers]
        tiles = self._tile_q, self._tile_k, self._tile_v
        self._multiply = AttentionMultiply(plan, self._dtype, tiles, self._thread)
        for number in numbers:
            line = (self._warp * p.m_steps + number) * ROWS + self._lane // 4
            self._softmax[number].begin(Rows.of(plan, self._tile, line))
            clear(self._sums[number])
        self._sum()
        split = SplitKeys(plan, self._thread, self._block, self._sums, self._softmax) if p.split > 1 else None
        with nullcontext() if split is None else split.of_the_last():
            for softmax in self._softmax:
                softmax.finish()
            self._write()

    def _begin_copies(self) -> None:
        plan, p, spec, at = self._plan, self._p, self._spec, self._tile
        threads, thread = plan.threads, self._thread
        self._keys = KeyBlocks(plan, "key", self._tile_k, at, thread, self._params)
        self._values = KeyBlocks(plan, "value", self._tile_v, at, thread, self._params)
        memory = flat_view(self._params[spec.query.param])
        start = self._start(spec.query, "query_start")
        queries = RowCopies(
            lambda _, place: self._tile_q.ptr_to([place]),
            memory,
            lambda row: start + self._row_offset(spec.query, row),
            (plan.rows, plan.width, spec.head_dim),
            threads,
            thread,
        )
        ragged = spec.queries % plan.tile_queries != 0
        queries.load(0, 0, (spec.queries - at.query) * plan.group if ragged else None)
        for stage in range(p.stages - 1):
            self._copy_block(tirx.IntImm("int32", stage), stage, [stage < at.block_count] if stage else [])

    def _copy_block(self, step: tirx.Expr, stage: tirx.Expr | int, exists: list[tirx.Expr]) -> None:
        """Emit the copies of a block of keys, where it exists, and of its values: two groups."""
        for blocks in (self._keys, self._values):
            with when(exists):
                blocks.load(step, stage)
            end_copies()

    def _start(self, layout: HeadLayout, name: str) -> tirx.Expr:
        """Emit the place of the tile's first query in a register."""
        at = self._tile
        start = at.batch * layout.batch_stride + at.head * layout.head_stride + layout.offset
        return in_register(start + at.query * layout.position_stride, name=name)

    def _row_offset(self, layout: HeadLayout, row: tirx.Expr) -> tirx.Expr:
        """Return the offset of a tile's row from its first: r is query `r // group`, head `r % group`."""
        group = self._plan.group
        if group == 1:
            return row * layout.position_stride
        return row // group * layout.position_stride + row % group * layout.head_stride

    def _sum(self) -> None:
        """Emit the loop over the keys: each block's scores, softmax and values, while the next ones are copied."""
        plan, p, at = self._plan, self._p, self._tile
        ahead = p.stages - 1
        ring = Stages(p.stages, 0, ahead)
        read, written = ring.at
        tops = [(self._warp * p.m_steps + number) * ROWS for number in range(p.m_steps)]
        whole = [WholeKeys.of(plan, at, top, ROWS) for top in tops]
        may_mask = self._spec.causal or self._spec.window or not plan.whole_blocks
        if plan.holds_queries:
            wait_for_copies_of_block(2 * ahead - 1)
            self._multiply.load_queries()
        with T.serial(at.block_count, unroll=False) as step:
            # Of the groups that were ended: the values of this block, then keys and values of the next ones.
            wait_for_copies_of_block(2 * ahead - 1)
            following = step + ahead
            # All warps are done with the block before.
            self._copy_block(following, written, [following < at.block_count])
            self._keys.keep(step, read)
            for softmax in self._softmax:
                softmax.prefetch(at.first_block + step)
            self._multiply.scores(self._scores, read)
            for number, softmax in enumerate(self._softmax):
                block = at.first_block + step
                masked = whole[number].exceeded_by(plan, block) if may_mask else None
                softmax.weigh(self._scores[number], block, masked)
                softmax.rescale(self._sums[number])
                softmax.convert(self._scores[number], self._weights[number])
            wait_for_copies_of_block(2 * ahead)
            self._values.keep(step, read)
            self._multiply.values(self._sums, self._weights, read)
            ring.advance()

    def _write(self) -> None:
        """Emit the writing of a warp's rows, through the memory of Q's tile: whole rows, 16 bytes a lane."""
        plan, spec, at, m_steps = self._plan, self._spec, self._tile, self._p.m_steps
        # Rows of O may be longer than those of Q, which other warps read.
        T.evaluate(T.cuda.cta_sync())
        first = self._warp * (m_steps * ROWS)
        for number in range(m_steps):
            softmax, sums = self._softmax[number], self._sums[number]
            for row in range(2):
                scale = in_register(inverse_total(spec, softmax.total[row]), "float32")
                line = first + number * ROWS + self._lane // 4 + row * 8
                for eight in range(math.ceil(spec.value_dim / 8)):
                    place = chunk_place(line, tirx.IntImm("int32", eight), plan.value_width) + self._lane % 4 * 2
                    low, high = (sums[eight * 4 + row * 2 + index] * scale for index in range(2))
                    T.evaluate(T.ptx["st.shared.u32"](self._tile_q.ptr_to([place]), pack(low, high, self._dtype)))
        T.evaluate(T.cuda.warp_sync())
        across = spec.value_dim // CHUNK
        flat = flat_view(self._params[spec.output.param])
        start = self._start(spec.output, "output_start")
        count = m_steps * ROWS * across
        for turn in range(math.ceil(count / WARP)):
            item = turn * WARP + self._lane
            line, chunk = first + item // across, item % across
            inside = [at.query + line // plan.group < spec.queries]
            if (turn + 1) * WARP > count:
                inside.insert(0, item < count)
            words = T.alloc_local([4], "uint32")
            with when(inside):
                load_vector("shared", words, self._tile_q.ptr_to([chunk_place(line, chunk, plan.value_width)]))
                target = flat.ptr_to([start + self._row_offset(spec.output, line) + chunk * CHUNK])
                store_vector("global", target, words)
