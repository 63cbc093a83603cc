"""Blocks that share the sum of a tile of a matmul: each has a run of K, the last one of them writes.

The others hand their sums over through global memory; the last one adds them to its own, the nearest first, so that
results are the same in every bit from run to run. It waits for blocks of lower numbers alone, which wait for none, and
blocks start in the order of their numbers: no wait is for ever, however few run at a time.

    sums       [blocks, accumulators / 4, threads] of 4 accumulators
    flags      [blocks, warps]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.sums_exchange import SumsExchange

_WARP = 32


class SplitSum:
    """Emits the exchange of sums into the current IRBuilder.

    `split` neighbours of the grid's `blocks` blocks share a sum; `thread` is one of a block's `threads`.
    """

    def __init__(self, split: int, blocks: int, threads: int, thread: tirx.Expr, block: tirx.Expr) -> None:
        self._split, self._blocks, self._threads = split, blocks, threads
        self._thread, self._block, self._warps = thread, block, threads // _WARP

    @contextmanager
    def of_the_last(self, accumulators: tirx.Var, count: int) -> Iterator[None]:
        """Emit the handing over of a thread's `count` accumulators, a multiple of 4.

        What the block emits is done by the last one, with all sums.
        """
        self._fours = count // 4
        register, sums = str(accumulators.ty.dtype), self._blocks * self._fours * self._threads
        self._exchange = SumsExchange(register, sums, self._blocks * self._warps)
        with T.If(self._block % self._split < self._split - 1):
            with T.Then():
                self._move("put", self._block, accumulators)
                self._exchange.call("set", self._flag(self._block))
            with T.Else():
                with T.serial(self._split - 1, unroll=False) as number:
                    helper = self._block - 1 - number
                    self._exchange.call("await", self._flag(helper))
                    self._move("add", helper, accumulators)
                    self._exchange.call("clear", self._flag(helper))
                yield

    def _move(self, function: str, block: tirx.Expr, accumulators: tirx.Var) -> None:
        for four in range(self._fours):
            at = (block * self._fours + four) * self._threads + self._thread
            self._exchange.call(function, at, *(accumulators[4 * four + index] for index in range(4)))

    def _flag(self, block: tirx.Expr) -> tirx.Expr:
        return block * self._warps + self._thread // _WARP
