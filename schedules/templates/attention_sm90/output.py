"""From the output in registers to memory, in the kernel of `template.py`."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.attention.mask import MINUS_INFINITY
from relaxtune.schedules.templates.attention.sizes import ceil_div, flat_view
from relaxtune.schedules.templates.attention.softmax import OnlineSoftmax, exp2, inverse_total, pack
from relaxtune.schedules.templates.attention.tiles import Tile
from relaxtune.schedules.templates.attention_sm90.plan import CHUNK, AttentionPlan, partial_columns
from relaxtune.schedules.templates.emit.barriers import await_cluster, find_in_block, meet_cluster
from relaxtune.schedules.templates.emit.registers import load_vector
from relaxtune.schedules.templates.emit.tma import end_stores, order_before_tma, store_tile
from relaxtune.schedules.templates.emit.wgmma import ROWS, WARPGROUP

# Named barriers: 0 is the whole block's, then one for each warpgroup.
GROUP_BARRIER = 1
VECTOR = 8


class AttentionOutput:
    """Emits the writing of a tile into the current IRBuilder.

    A thread's two rows are `line` and `line + 8` of the tile, in which row r is query `r // group`, head `r % group`.
    """

    def __init__(self, plan: AttentionPlan, param: tirx.Var, thread: tirx.Expr) -> None:
        self._plan, self._param, self._dtype = plan, param, str(param.ty.dtype)
        self._thread, self._lane = thread, thread % 32
        self._line = thread // 32 * 16 + self._lane // 4

    def store(
        self, output: tirx.Var, softmax: OnlineSoftmax, tile: tirx.Var, stage: tirx.Expr, tensor_map: tirx.Var, at: Tile
    ) -> None:
        """Emit the writing of a whole tile: swizzled into the memory of Q's tile, then by the copy engine.

        The copy is not waited for; a warpgroup's first thread commits it, if there is any. `output` are registers,
        weighted sums of V. The tile is a `stage` of `tile`, the memory of Q, which this warpgroup's instructions have
        read. `tensor_map` has boxes of one warpgroup's rows of a chunk of the output.
        """
        plan = self._plan
        group = self._thread // WARPGROUP if plan.parameters.consumers > 1 else tirx.IntImm("int32", 0)
        scales = T.alloc_local([2], "float32")
        for row in range(2):
            T.buffer_store(scales, inverse_total(plan.spec, softmax.total[row]), [row])
        barrier = tirx.Cast("uint32", group + GROUP_BARRIER)
        T.evaluate(T.ptx.bar.sync(barrier, WARPGROUP))
        for eight in range(math.ceil(plan.spec.value_dim / 8)):
            chunk, unit = divmod(eight, CHUNK // 8)
            for row in range(2):
                # The swizzle: 16-byte units of a row change places by the row's number in its 8.
                place = tirx.bitwise_xor(self._lane // 4, tirx.IntImm("int32", unit)) * 8 + self._lane % 4 * 2
                element = chunk * plan.rows * CHUNK + (self._line + row * 8) * CHUNK + place
                low, high = (output[eight * 4 + row * 2 + index] * scales[row] for index in range(2))
                T.evaluate(T.ptx["st.shared.u32"](tile.ptr_to([stage, element]), pack(low, high, self._dtype)))
        order_before_tma()
        T.evaluate(T.ptx.bar.sync(barrier, WARPGROUP))
        first = at.query + group * (ROWS // plan.group)
        with T.If(tirx.all(self._thread % WARPGROUP == 0, first < plan.spec.queries)), T.Then():
            for chunk in range(plan.value_chunks):
                source = tile.ptr_to([stage, chunk * plan.rows * CHUNK + group * (ROWS * CHUNK)])
                store_tile(tensor_map, (chunk * CHUNK, at.head, first, at.batch), source)
            end_stores()

    def combine(self, output: tirx.Var, softmax: OnlineSoftmax, memory: tirx.Var, rank: tirx.Expr, at: Tile) -> None:
        """Emit the sum of the parts of a cluster's blocks, in the order of ranks, and its writing.

        Every block sends each row of its part to the block that sums that row. `memory` is shared, float32, of `split`
        parts of `share_rows` rows of `partial_columns` elements, and as many pairs of the row's largest score and sum;
        nothing else is kept there.
        """
        p = self._plan.parameters
        # Every block of the cluster has started.
        await_cluster()
        for row in range(2):
            with T.If(self._line + row * 8 < self._plan.used_rows), T.Then():
                self._send_row(output, softmax, memory, rank, row)
        meet_cluster()
        across = self._plan.spec.value_dim // VECTOR
        items, threads = self._plan.share_rows * across, p.consumers * WARPGROUP
        lines = tirx.min(self._plan.spec.queries - at.query, self._plan.tile_queries) * self._plan.group
        with T.serial(ceil_div(items, threads)) as turn:
            item = turn * threads + self._thread
            line = rank * self._plan.share_rows + item // across
            with T.If(tirx.all(item < items, line < lines)), T.Then():
                self._sum_vector(memory, softmax.unit, item // across, line, item % across * VECTOR, at)

    def _send_row(self, output: tirx.Var, softmax: OnlineSoftmax, memory: tirx.Var, rank: tirx.Expr, row: int) -> None:
        plan = self._plan
        line = self._line + row * 8
        owner = tirx.Cast("uint32", line // plan.share_rows)
        place = rank * plan.share_rows + line % plan.share_rows
        remote = T.alloc_local([2], "uint32")
        for index, element in enumerate(
            (place * partial_columns(plan.spec) + self._lane % 4 * 2, plan.statistics_start + place * 2)
        ):
            find_in_block(remote, index, memory.ptr_to([element]), owner)
        store = T.ptx["st.shared::cluster.v2.f32"]
        for eight in range(plan.spec.value_dim // 8):
            pair = [output[eight * 4 + row * 2 + index] for index in range(2)]
            T.evaluate(store(remote[0] + tirx.const(eight * 32, "uint32"), *pair))
        with T.If(self._lane % 4 == 0), T.Then():
            T.evaluate(store(remote[1], softmax.highest[row], softmax.total[row]))

    def _sum_vector(
        self, memory: tirx.Var, unit: float, place: tirx.Expr, line: tirx.Expr, column: tirx.Expr, at: Tile
    ) -> None:
        plan, split = self._plan, self._plan.parameters.split
        statistics = T.alloc_local([2 * split], "float32")
        parts = T.alloc_local([VECTOR * split], "float32")
        for rank in range(split):
            row = rank * plan.share_rows + place
            load_vector("shared", statistics, memory.ptr_to([plan.statistics_start + row * 2]), 2, rank * 2)
            for half in range(2):
                start = row * partial_columns(plan.spec) + column + half * 4
                load_vector("shared", parts, memory.ptr_to([start]), first=rank * VECTOR + half * 4)
        highest = T.alloc_local([1], "float32")
        T.buffer_store(highest, statistics[0], [0])
        for rank in range(1, split):
            T.buffer_store(highest, tirx.max(highest[0], statistics[rank * 2]), [0])
        zero = tirx.FloatImm("float32", 0.0)
        T.buffer_store(highest, tirx.Select(highest[0] == MINUS_INFINITY, zero, highest[0]), [0])
        total, share = T.alloc_local([1], "float32"), T.alloc_local([1], "float32")
        sums = T.alloc_local([VECTOR], "float32")
        for rank in range(split):
            T.buffer_store(share, exp2((statistics[rank * 2] - highest[0]) * tirx.FloatImm("float32", unit)), [0])
            added = share[0] * statistics[rank * 2 + 1]
            T.buffer_store(total, added if rank == 0 else total[0] + added, [0])
            for index in range(VECTOR):
                added = share[0] * parts[rank * VECTOR + index]
                T.buffer_store(sums, added if rank == 0 else sums[index] + added, [index])
        T.buffer_store(total, inverse_total(plan.spec, total[0]), [0])
        words = [pack(sums[at] * total[0], sums[at + 1] * total[0], self._dtype) for at in range(0, VECTOR, 2)]
        layout = plan.spec.output
        flat = flat_view(self._param)
        element = (
            at.batch * layout.batch_stride
            + (at.query + line // plan.group) * layout.position_stride
            + (at.head + line % plan.group) * layout.head_stride
            + column
        )
        T.evaluate(T.ptx["st.global.v4.u32"](flat.ptr_to([element]), *words))
