"""The kernel of `template.py`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions.attention import HeadLayout
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.attention.sizes import flat_view
from relaxtune.schedules.templates.attention.softmax import OnlineSoftmax, exp2, inverse_total, pack
from relaxtune.schedules.templates.attention.tiles import Rows, Tile, WholeKeys, each_tile, named
from relaxtune.schedules.templates.attention_sm80.copies import KeyBlocks, RowCopies
from relaxtune.schedules.templates.attention_sm80.multiply import AttentionMultiply
from relaxtune.schedules.templates.attention_sm80.plan import ROWS, WARP, AttentionPlan
from relaxtune.schedules.templates.emit.async_copy import end_copies, wait_for_copies_of_block
from relaxtune.schedules.templates.emit.kernel_frame import EmitBody, build_function, shared_pool, wait_for_predecessor
from relaxtune.schedules.templates.emit.registers import clear, in_register, load_vector, store_vector, when
from relaxtune.schedules.templates.emit.sums_exchange import SumsExchange
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
        self._params = params
        return self._plan.blocks, self._emit

    def _emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p = self._plan, self._p
        self._thread = thread
        self._warp, self._lane = self._thread // WARP, self._thread % WARP
        pool = shared_pool()
        self._tile_q = pool.alloc((plan.query_elements,), self._dtype, align=1024)
        self._tile_k = pool.alloc((p.stages, p.block_k * plan.width * CHUNK), self._dtype, align=1024)
        self._tile_v = pool.alloc((p.stages, p.block_k * plan.value_width * CHUNK), self._dtype, align=1024)
        pool.commit()
        wait_for_predecessor(p.dependent)
        self._block = block
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
        start = named("query_start", self._start(spec.query, at.head) + at.query * spec.query.position_stride)
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
            with when([stage < at.block_count] if stage else []):
                self._keys.load(tirx.IntImm("int32", stage), stage)
            end_copies()
            with when([stage < at.block_count] if stage else []):
                self._values.load(tirx.IntImm("int32", stage), stage)
            end_copies()

    def _start(self, layout: HeadLayout, head: tirx.Expr) -> tirx.Expr:
        return self._tile.batch * layout.batch_stride + head * layout.head_stride + layout.offset

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
        read, written = T.alloc_local([1], "int32"), T.alloc_local([1], "int32")
        T.buffer_store(read, 0, [0])
        T.buffer_store(written, ahead, [0])
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
            with T.If(following < at.block_count), T.Then():
                self._keys.load(following, written[0])
            end_copies()
            with T.If(following < at.block_count), T.Then():
                self._values.load(following, written[0])
            end_copies()
            self._keys.keep(step, read[0])
            for softmax in self._softmax:
                softmax.prefetch(at.first_block + step)
            self._multiply.scores(self._scores, read[0])
            for number, softmax in enumerate(self._softmax):
                block = at.first_block + step
                masked = whole[number].exceeded_by(plan, block) if may_mask else None
                softmax.weigh(self._scores[number], block, masked)
                softmax.rescale(self._sums[number], plan.value_pairs * 8)
                softmax.convert(self._scores[number], self._weights[number])
            wait_for_copies_of_block(2 * ahead)
            self._values.keep(step, read[0])
            self._multiply.values(self._sums, self._weights, read[0])
            for stage in (read, written):
                next_one = stage[0] + 1
                T.buffer_store(stage, tirx.Select(next_one == p.stages, tirx.IntImm("int32", 0), next_one), [0])

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
        start = named("output_start", self._start(spec.output, at.head) + at.query * spec.output.position_stride)
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


class SplitKeys:
    """Emits the exchange of blocks that share the keys of a tile: each has a run of them, the last one writes.

    The others hand their sums over through global memory, with the largest score and the sum of weights of each row.
    The last block brings them to the largest score of all, and adds them up in the order of their numbers, so that
    results are the same in every bit from run to run. It waits for blocks of lower numbers alone, which wait for none,
    and blocks start in the order of their numbers. There are [blocks, exchanged, threads] sums of 4 numbers, and
    [blocks, warps] flags. `thread` is of the block, `block` of the grid; `sums` and `softmax` have 16 rows each.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        thread: tirx.Expr,
        block: tirx.Expr,
        sums: Sequence[tirx.Var],
        softmax: Sequence[OnlineSoftmax],
    ) -> None:
        self._plan, self._thread, self._block = plan, thread, block
        self._sums, self._softmax = sums, softmax
        fours, warps = int(plan.blocks) * plan.exchanged * plan.threads, plan.threads // WARP
        self._exchange = SumsExchange("float32", fours, int(plan.blocks), warps, thread)

    @contextmanager
    def of_the_last(self) -> Iterator[None]:
        """Emit the handing over of this block's sums; what is emitted inside is done by the last, with all sums."""
        split = self._plan.parameters.split
        with T.If(self._block % split < split - 1):
            with T.Then():
                for four, numbers in enumerate(self._held()):
                    self._exchange.call("put", self._place(self._block, four), *numbers)
                self._exchange.flag("set", self._block)
            with T.Else():
                helpers = [self._block - (split - 1) + number for number in range(split - 1)]
                for helper in helpers:
                    self._exchange.flag("await", helper)
                for helper in helpers:
                    self._add(helper)
                for helper in helpers:
                    self._exchange.flag("clear", helper)
                yield

    def _held(self) -> Iterator[list[tirx.Expr]]:
        """Yield what a thread hands over, 4 numbers at a time: of 16 rows, their sums, then their statistics."""
        for sums, softmax in zip(self._sums, self._softmax, strict=True):
            for four in range(self._plan.value_pairs * 2):
                yield [sums[4 * four + index] for index in range(4)]
            yield [softmax.highest[0], softmax.highest[1], softmax.total[0], softmax.total[1]]

    def _add(self, helper: tirx.Expr) -> None:
        fours = self._plan.value_pairs * 2
        lowest, zero = tirx.FloatImm("float32", -math.inf), tirx.FloatImm("float32", 0.0)
        for number, (sums, softmax) in enumerate(zip(self._sums, self._softmax, strict=True)):
            first = number * (fours + 1)
            found = T.alloc_local([4 * (fours + 1)], "float32")
            for four in range(fours + 1):
                registers = [found[4 * four + index] for index in range(4)]
                self._exchange.call("get", self._place(helper, first + four), *registers)
            own, other = T.alloc_local([2], "float32"), T.alloc_local([2], "float32")
            unit = tirx.FloatImm("float32", softmax.unit)
            for row in range(2):
                theirs = found[4 * fours + row]
                highest = in_register(tirx.max(softmax.highest[row], theirs), "float32")
                # Neither has seen a key.
                used = in_register(tirx.Select(highest == lowest, zero, highest), "float32")
                T.buffer_store(own, exp2((softmax.highest[row] - used) * unit), [row])
                T.buffer_store(other, exp2((theirs - used) * unit), [row])
                total = softmax.total[row] * own[row] + found[4 * fours + 2 + row] * other[row]
                T.buffer_store(softmax.total, total, [row])
                T.buffer_store(softmax.highest, highest, [row])
            for index in range(4 * fours):
                row = index // 2 % 2
                T.buffer_store(sums, sums[index] * own[row] + found[index] * other[row], [index])

    def _place(self, block: tirx.Expr, four: int) -> tirx.Expr:
        return (block * self._plan.exchanged + four) * self._plan.threads + self._thread
