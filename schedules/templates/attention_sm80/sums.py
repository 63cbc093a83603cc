"""Sums of blocks that share the keys of a tile, in the kernel of `template.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.attention.mask import MINUS_INFINITY
from relaxtune.schedules.templates.attention.softmax import OnlineSoftmax, exp2
from relaxtune.schedules.templates.attention_sm80.plan import WARP, AttentionPlan
from relaxtune.schedules.templates.emit.registers import in_register
from relaxtune.schedules.templates.emit.sums_exchange import SumsExchange


class SplitKeys:
    """Emits the exchange of blocks that share the keys of a tile: each has a run of them, the last one writes.

    The others hand their sums over (`schedules.templates.emit.sums_exchange`), with the largest score and the sum of
    weights of each row. The last block brings them to the largest score of all, and adds them up in the order of their
    numbers. There are [blocks, exchanged, threads] sums of 4 numbers. `thread` is of the block, `block` of the grid;
    `sums` and `softmax` have 16 rows each.
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
        zero = tirx.FloatImm("float32", 0.0)
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
                used = in_register(tirx.Select(highest == MINUS_INFINITY, zero, highest), "float32")
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
