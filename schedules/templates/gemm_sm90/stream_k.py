"""Stream-K for the kernel of `template.py`: blocks share the sums of all tiles evenly.

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

from relaxtune.schedules.templates.emit.sums_exchange import SumsExchange
from relaxtune.schedules.templates.gemm_sm90.plan import WARPGROUP, GemmPlan
from relaxtune.schedules.templates.gemm_sm90.tiles import GridSizes, Part, Tiles
from relaxtune.schedules.templates.output.output_tile import OutputTile


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
        helpers = self._block - self._block_of(tile * k_tiles)
        return StreamPart(turn, *self.place(tile), start, stop - start, stop == k_tiles, helpers)

    def _begin(self, block: tirx.Expr) -> tirx.Expr:
        """Return the first tile of K of a block's run."""
        return block * self._share + tirx.min(block, self._longer)

    def _block_of(self, position: tirx.Expr) -> tirx.Expr:
        """Return the block in whose run a tile of K is."""
        share, longer = self._share, self._longer
        beyond = position - longer * (share + 1)
        return tirx.Select(beyond < 0, position // (share + 1), longer + beyond // share)


class StreamSum:
    """Emits the exchange of sums between blocks, through global memory, into the current IRBuilder.

    `output` knows which rows exist; `thread` is the thread's number in its block, `block` the block's in the grid.
    """

    def __init__(self, plan: GemmPlan, output: OutputTile, thread: tirx.Expr, block: tirx.Expr) -> None:
        p = plan.parameters
        self._plan, self._output, self._thread, self._block = plan, output, thread, block
        self._groups, self._eights, self._warps = p.block_m // 64, p.block_n // 8, 4 * p.consumers
        sums, flags = plan.blocks * self._groups * self._eights * WARPGROUP, plan.blocks * self._warps
        self._exchange = SumsExchange(plan.operands.register, sums, flags)

    def publish(self, accumulators: tirx.Var) -> None:
        """Emit the handing over of a part without its end to the block that has it."""
        self._move("put", self._block, accumulators)
        self._exchange.call("set", self._flag(self._block))

    def collect(self, accumulators: tirx.Var, part: StreamPart) -> None:
        """Emit the adding of what other blocks have of a part's tile to its sums."""
        with T.serial(part.helpers, unroll=False) as number:
            helper = self._block - 1 - number
            self._exchange.call("await", self._flag(helper))
            self._move("add", helper, accumulators)
            self._exchange.call("clear", self._flag(helper))

    def _move(self, function: str, block: tirx.Expr, accumulators: tirx.Var) -> None:
        """Emit a call for every 4 accumulators of rows that exist, at their place among a block's sums."""
        first = block * self._groups + self._thread // WARPGROUP * self._plan.m_blocks
        for group in range(self._plan.m_blocks):
            with self._output.rows_exist(group):
                for eight in range(self._eights):
                    at = ((first + group) * self._eights + eight) * WARPGROUP + self._thread % WARPGROUP
                    held = (group * self._eights + eight) * 4
                    self._exchange.call(function, at, *(accumulators[held + index] for index in range(4)))

    def _flag(self, block: tirx.Expr) -> tirx.Expr:
        return block * self._warps + self._thread // 32
