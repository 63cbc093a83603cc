"""Tiles, and parts of the sums of tiles, that blocks of the kernel of `template.py` make.

With `stream_k`, blocks share the sums of all tiles evenly.

The tiles of K of all tiles of C, one tile after another, are cut into as many equal runs as there are blocks, wherever
that falls::

    tiles      |---- 0 ----|---- 1 ----|---- 2 ----|         12 tiles of K each
    blocks     |-- 0 ---|-- 1 ---|-- 2 ---|-- 3 ---|         9 each

A block makes the parts of its run from the last to the first. To a part that has the end of a tile's sum it adds what
the blocks before it have of that tile, the nearest first, and writes the tile (`sums.py`). A part that lacks the end
can only be the one that its block makes first: it goes to global memory.

So a block waits for the first thing that blocks of lower numbers make, before which they wait for none:
`schedules.templates.emit.sums_exchange` says why no wait is for ever, and results repeat.

Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU", PPoPP
2023 (arXiv:2301.03598).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.kernel_frame import tile_place
from relaxtune.schedules.templates.gemm_sm90.plan import GemmPlan
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
