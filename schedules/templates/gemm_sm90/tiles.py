"""Tiles that blocks of the kernel of `template.py` make, and sums that they share.

With `split_k`, the blocks of a cluster exchange their partial sums through shared memory (`ClusterSum`).

With `stream_k`, blocks share the sums of all tiles evenly.

The tiles of K of all tiles of C, one tile after another, are cut into as many equal runs as there are blocks, wherever
that falls::

    tiles      |---- 0 ----|---- 1 ----|---- 2 ----|         12 tiles of K each
    blocks     |-- 0 ---|-- 1 ---|-- 2 ---|-- 3 ---|         9 each

A block makes the parts of its run from the last to the first. To a part that has the end of a tile's sum it adds what
the blocks before it have of that tile, the nearest first, and writes the tile. A part that lacks the end can only be
the one that its block makes first: it goes to global memory.

So a block waits for blocks of lower numbers alone, and for the first thing that they make, before which they wait for
none. Blocks start in the order of their numbers, so no wait is for ever, however few run at a time. (CUDA promises no
order; where all blocks run at a time, as with a block for each multiprocessor, none is needed.) The order of sums
follows from the plan: results are the same in every bit from run to run.

    sums       [blocks, block_m/64, block_n/8, 128] of 4 accumulators: those of each thread, by the part's block
    flags      [blocks, warps]: set where a warp has written its sums

Both lie as `schedules.templates.emit.sums_exchange` says.

Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU", PPoPP
2023 (arXiv:2301.03598).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.kernel_frame import tile_place
from relaxtune.schedules.templates.emit.sums_exchange import SumsExchange
from relaxtune.schedules.templates.gemm_sm90.plan import WARPGROUP, GemmPlan
from relaxtune.schedules.templates.output.output_tile import OutputTile
from relaxtune.schedules.tir.blocks import Size


@dataclass(frozen=True)
class Part:
    """A tile, or a part of the sum of one, that a block makes at a time.

    `turn` is its number among the block's parts; `row` and `column` are the tile's, in tiles; `start` is the first tile
    of K, and `count` says how many are summed, at least one.
    """

    turn: tirx.Expr
    row: tirx.Expr
    column: tirx.Expr
    start: tirx.Expr | int
    count: tirx.Expr | int


@dataclass(frozen=True)
class GridSizes:
    """Sizes of the grid for a number of rows, as code: numbers, or int32 expressions of the host.

    `tiles_m` are rows of tiles (with `multicast`, of clusters of them), `blocks` the clusters of the grid, and a block
    makes every `step`-th tile.
    """

    tiles_m: Size
    tiles: Size
    blocks: Size
    step: Size

    @classmethod
    def of(cls, plan: GemmPlan, rows: Size) -> GridSizes:
        """Return the sizes for a number of rows; those planned for a known one. As many rows are loaded at a time."""
        if not plan.symbolic:
            return cls(plan.tiles_m, plan.tiles, plan.blocks, plan.blocks)
        p = plan.parameters
        height = p.block_m * p.multicast
        tiles_m = (rows + (height - 1)) // height
        tiles_m = tiles_m if isinstance(tiles_m, int) else T.Bind(tiles_m)
        tiles = tiles_m * plan.tiles_n
        most = p.blocks or tiles
        return cls(tiles_m, tiles, min(tiles, most) if isinstance(tiles, int) else tirx.min(tiles, most), most)


class Tiles:
    """The tiles of a block (with a cluster, of its blocks together), every `plan.blocks`-th; emits loops over them.

    `block` is the number of the block's cluster in the grid, `rank` the block's number in its cluster.
    """

    def __init__(self, plan: GemmPlan, sizes: GridSizes, block: tirx.Expr, rank: tirx.Expr) -> None:
        self._plan, self._sizes, self._block, self._rank = plan, sizes, block, rank

    def first(self) -> Part:
        """Return the first part, which every block has."""
        return self._part(tirx.IntImm("int32", 0), self._block)

    def each(self, make: Callable[[Part], None], *, first: tirx.Expr | int = 0, every: int = 1) -> None:
        """Emit the loop over the block's parts, from `first` on every `every`-th; `make` emits the making of one."""
        sizes = self._sizes
        if self._plan.one_each and every == 1:
            make(self.first())
            return
        # (tiles - block) / blocks tiles are left from this block's first on, rounded up; never negative.
        left = sizes.tiles - self._block + (every - first) * sizes.step - 1
        with T.serial(left // (every * sizes.step)) as number:
            turn = number * every + first
            make(self._part(turn, self._block + turn * sizes.step))

    def place(self, tile: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the row and column, in tiles, of this block's part of a cluster's tile."""
        plan, p = self._plan, self._plan.parameters
        row, column = tile_place(tile, self._sizes.tiles_m, plan.tiles_n, p.group)
        return (row if p.multicast == 1 else row * p.multicast + self._rank), column

    def _part(self, turn: tirx.Expr, tile: tirx.Expr) -> Part:
        """Return the part of a tile: all of its sum, or with `split_k` the share of the block's rank."""
        plan = self._plan
        row, column = self.place(tile)
        if plan.parameters.split_k == 1:
            return Part(turn, row, column, 0, plan.k_tiles)
        start = self._rank * plan.k_share
        if plan.k_tiles % plan.k_share == 0:
            return Part(turn, row, column, start, plan.k_share)
        return Part(turn, row, column, start, tirx.min(plan.k_share, plan.k_tiles - start))


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

    def wait_for_readers(self) -> None:
        """Emit the wait until every block of the cluster has read: shared memory stays valid so long."""
        T.evaluate(T.ptx.barrier.cluster.wait.acquire())


@dataclass(frozen=True)
class StreamPart(Part):
    """A part of a block's run.

    `ends` is whether it has the last of its tile's sum; if so, `helpers` blocks before this one have the others.
    """

    ends: tirx.Expr
    helpers: tirx.Expr


class StreamTiles(Tiles):
    """The parts of a block's run, from the last to the first."""

    def __init__(self, plan: GemmPlan, block: tirx.Expr) -> None:
        super().__init__(plan, GridSizes.of(plan, plan.tiles_m), block, tirx.IntImm("int32", 0))
        # The first `_longer` blocks have one tile of K more.
        self._share, self._longer = divmod(plan.tiles * plan.k_tiles, plan.blocks)

    def first(self) -> StreamPart:
        """Return the first part, which every block has."""
        return self.part(tirx.IntImm("int32", 0))

    def each(self, make: Callable[[Part], None], *, first: tirx.Expr | int = 0, every: int = 1) -> None:
        """Emit the loop over the parts; `make` gets a `StreamPart`, and all are made."""
        with T.serial(self.count(), unroll=False) as turn:
            make(self.part(turn))

    def count(self) -> tirx.Expr:
        """Return how many parts the block makes."""
        k_tiles = self._plan.k_tiles
        last = (self._begin(self._block + 1) - 1) // k_tiles
        return last - self._begin(self._block) // k_tiles + 1

    def part(self, turn: tirx.Expr) -> StreamPart:
        """Return a part; what it is made of is bound to variables where the IRBuilder stands."""
        k_tiles = self._plan.k_tiles
        begin, end = self._begin(self._block), self._begin(self._block + 1)
        tile = T.Bind((end - 1) // k_tiles - turn)
        start = T.Bind(tirx.max(begin - tile * k_tiles, 0))
        stop = T.Bind(tirx.min(end - tile * k_tiles, k_tiles))
        # The block in whose run the tile begins.
        share, longer = self._share, self._longer
        beyond = tile * k_tiles - longer * (share + 1)
        first = tirx.Select(beyond < 0, tile * k_tiles // (share + 1), longer + beyond // share)
        helpers = self._block - first
        return StreamPart(turn, *self.place(tile), start, stop - start, stop == k_tiles, helpers)

    def _begin(self, block: tirx.Expr) -> tirx.Expr:
        return block * self._share + tirx.min(block, self._longer)


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

    def publish(self, accumulators: tirx.Var) -> None:
        """Emit the handing over of a part without its end to the block that has it."""
        self._move("put", self._block, accumulators)
        self._exchange.flag("set", self._block)

    def collect(self, accumulators: tirx.Var, part: StreamPart) -> None:
        """Emit the adding of what other blocks have of a part's tile to its sums."""
        self._exchange.add(self._block, part.helpers, lambda how, block: self._move(how, block, accumulators))

    def _move(self, function: str, block: tirx.Expr, accumulators: tirx.Var) -> None:
        """Emit a call for every 4 accumulators of rows that exist, at their place among a block's sums."""
        first = block * self._groups + self._thread // WARPGROUP * self._plan.m_blocks
        for group in range(self._plan.m_blocks):
            with self._output.rows_exist(group):
                for eight in range(self._eights):
                    at = ((first + group) * self._eights + eight) * WARPGROUP + self._thread % WARPGROUP
                    held = (group * self._eights + eight) * 4
                    self._exchange.call(function, at, *(accumulators[held + index] for index in range(4)))
