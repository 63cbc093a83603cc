"""Sums that several blocks of the kernel of `template.py` share.

With `split_k`, the blocks of a cluster exchange their partial sums through shared memory (`ClusterSum`). With
`stream_k`, blocks hand over the parts of sums that `tiles.py` cuts, through global memory (`StreamSum`): for each part,
[block_m/64, block_n/8, 128] of 4 accumulators, in the place of its block (`schedules.templates.emit.sums_exchange`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.barriers import arrive_at_cluster, await_cluster, find_in_block, meet_cluster
from relaxtune.schedules.templates.emit.sums_exchange import SumsExchange
from relaxtune.schedules.templates.emit.wgmma import WARPGROUP
from relaxtune.schedules.templates.gemm_sm90.plan import GemmPlan
from relaxtune.schedules.templates.gemm_sm90.tiles import StreamPart
from relaxtune.schedules.templates.output.output_tile import OutputTile

_CONSUMERS_BARRIER = 1


class ClusterSum:
    """Emits the sum over a cluster's blocks, through their shared memory, into the current IRBuilder.

    `output` knows which rows exist; `thread` is the thread's number in its block, `rank` the block's in its cluster.
    """

    def __init__(self, plan: GemmPlan, output: OutputTile, thread: tirx.Expr, rank: tirx.Expr) -> None:
        self._plan, self._output, self._thread, self._rank = plan, output, thread, rank

    def allocate(self, pool: T.SMEMPool) -> None:
        """Take shared memory for the partial sums: the place of the ring, whose tiles are used up by then."""
        p, end = self._plan.parameters, pool.offset
        pool.move_base_to(0)
        shape = (p.block_m // 64, p.block_n // 8, WARPGROUP, 4)
        self._partial = pool.alloc(shape, self._plan.operands.register, align=1024)
        pool.move_base_to(max(end, pool.offset))

    def total(self, accumulators: tirx.Var) -> tirx.Var:
        """Emit the sum of the cluster's partial sums, in the order of ranks, and return this block's share of it.

        Each block puts its partial sums where all can read them, and sums what makes `shares.columns` output columns.
        """
        plan, p = self._plan, self._plan.parameters
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
        meet_cluster()
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
                    find_in_block(remote, 0, at, T.uint32(rank))
                    T.evaluate(T.ptx[f"ld.shared::cluster.v4.{kind}"](*(part[index] for index in range(4)), remote[0]))
                for eight in range(share):
                    for index in range(4):
                        value = parts[eight][index]
                        for rank in range(1, p.split_k):
                            value += parts[rank * share + eight][index]
                        T.buffer_store(total, value, [(block * share + eight) * 4 + index])
        arrive_at_cluster()
        return total

    def wait_for_readers(self) -> None:
        """Emit the wait until every block of the cluster has read: shared memory stays valid so long."""
        await_cluster()


class StreamSum:
    """Emits the exchange of sums between blocks, through global memory, into the current IRBuilder.

    `output` knows which rows exist; `thread` is the thread's number in its block, `block` the block's in the grid.
    """

    def __init__(self, plan: GemmPlan, output: OutputTile, thread: tirx.Expr, block: tirx.Expr) -> None:
        p = plan.parameters
        self._plan, self._output, self._thread, self._block = plan, output, thread, block
        self._groups, self._eights = p.block_m // 64, p.block_n // 8
        sums = plan.blocks * self._groups * self._eights * WARPGROUP
        self._exchange = SumsExchange(plan.operands.register, sums, plan.blocks, 4 * p.consumers, thread)

    @contextmanager
    def of_the_last(self, accumulators: tirx.Var, part: StreamPart) -> Iterator[None]:
        """Emit the handing over of a part's sums to the block that has its tile's end, which runs the body with all."""

        def move(function: str, block: tirx.Expr) -> None:
            """Emit a call for every 4 accumulators of rows that exist, at their place among a block's sums."""
            first = block * self._groups + self._thread // WARPGROUP * self._plan.m_blocks
            for group in range(self._plan.m_blocks):
                with self._output.rows_exist(group):
                    for eight in range(self._eights):
                        at = ((first + group) * self._eights + eight) * WARPGROUP + self._thread % WARPGROUP
                        held = (group * self._eights + eight) * 4
                        self._exchange.call(function, at, *(accumulators[held + index] for index in range(4)))

        with T.If(part.ends):
            with T.Then():
                self._exchange.add(self._block, part.helpers, move)
                yield
            with T.Else():
                self._exchange.publish(self._block, move)
