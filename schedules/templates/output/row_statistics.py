"""Statistics of rows in registers, for the epilogue of a GEMM template's kernel.

They are read from shared memory where other warps made them. Else the partial sums of `schedules.tir.row_norm` are read
before the matmul's sum is made and used after it, which hides their latency, or at once where registers are short. A
lane needs the statistics of rows `lane / 4` and 8 below, of the 16 of its warp in each block; the four lanes of a row
read every fourth group each and add up what they have. The order of sums is fixed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.device_function import device_call
from relaxtune.schedules.templates.emit.registers import load_vector, tree
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.row_norm import COUNT, SCALE, SHIFT, SQUARES, SUM, RowNorm

_HALVES = 2
_LANES = 4

_QUAD_SUM = """
__forceinline__ __device__ float relaxtune_sum_of_four_lanes(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
"""
_QUAD_SHARE = """
__forceinline__ __device__ float relaxtune_share_of_four_sums(int lane, float a, float b, float c, float d) {
  bool second = lane & 2, odd = lane & 1;
  float even_sum = (second ? c : a) + __shfl_xor_sync(~0u, second ? a : c, 2);
  float odd_sum = (second ? d : b) + __shfl_xor_sync(~0u, second ? b : d, 2);
  return (odd ? odd_sum : even_sum) + __shfl_xor_sync(~0u, odd ? even_sum : odd_sum, 1);
}
"""


def share_of_four_sums(lane: tirx.Expr, values: Sequence[tirx.Expr]) -> tirx.Expr:
    """Return, in each of four neighbouring lanes, the sum over them of the value of its number; all have to ask."""
    return device_call(_QUAD_SHARE, lane, *values)


def statistics_registers(norm: RowNorm, m_blocks: int) -> int:
    """Return the registers a thread needs to hold what `RowStatistics` reads."""
    return m_blocks * _HALVES * _reads(norm) * COUNT


def _reads(norm: RowNorm) -> int:
    return math.ceil(norm.groups / _LANES)


def store_statistics(
    norm: RowNorm, total: tirx.Expr | None, squares: tirx.Expr, target: tirx.Var, first: tirx.Expr | int
) -> None:
    """Emit a row's statistics from its sums, into two elements of a buffer of registers."""
    zero, size = tirx.FloatImm("float32", 0.0), tirx.FloatImm("float32", 1.0 / norm.size)
    scale, shift = (target[first + which] for which in (SCALE, SHIFT))
    variance = squares * size
    if total is not None:
        T.buffer_store(target, total * size, [first + SHIFT])
        variance = tirx.max(variance - shift * shift, zero)
    T.buffer_store(target, tirx.rsqrt(variance + tirx.FloatImm("float32", norm.epsilon)), [first + SCALE])
    T.buffer_store(target, zero if total is None else zero - shift * scale, [first + SHIFT])


class RowStatistics:
    """Emits the statistics of a lane's rows into the current IRBuilder.

    `partials` is the kernel's parameter; a warp has 16 rows in each of `m_blocks` blocks, which are `row_step` apart.
    """

    def __init__(
        self, matmul: MatmulFunction, norm: RowNorm, partials: tirx.Var, m_blocks: int, row_step: int = 64
    ) -> None:
        self._matmul, self._norm, self._m_blocks, self._step = matmul, norm, m_blocks, row_step
        shape = (norm.groups, matmul.extent, COUNT)
        self._partials = T.decl_buffer(shape, "float32", data=partials.data)

    def read(self, row: tirx.Expr, lane: tirx.Expr) -> None:
        """Emit the reads for a tile; `row` is the first of this warp's 16 rows."""
        self._row, self._lane = row, lane
        self._read(range(self._rows))

    def finish(self) -> None:
        """Emit the statistics from what was read."""
        self._statistics = T.alloc_local([self._rows * COUNT], "float32")
        self._finish(range(self._rows))

    def make(self, row: tirx.Expr, lane: tirx.Expr, registers: int) -> None:
        """Emit the statistics for a tile at once, from as many rows at a time as so many registers hold."""
        self._row, self._lane = row, lane
        self._statistics = T.alloc_local([self._rows * COUNT], "float32")
        step = max(1, registers // (_reads(self._norm) * COUNT))
        for first in range(0, self._rows, step):
            numbers = range(first, min(first + step, self._rows))
            self._read(numbers)
            self._finish(numbers)

    @property
    def _rows(self) -> int:
        return self._m_blocks * _HALVES

    def _read(self, numbers: range) -> None:
        reads = _reads(self._norm)
        self._first, self._held = numbers.start, T.alloc_local([len(numbers) * reads * COUNT], "float32")
        for number in numbers:
            at_row = tirx.min(self._row_of(number), self._matmul.extent - 1)
            for turn in range(reads):
                group = tirx.min(self._group(turn), self._norm.groups - 1)
                source = self._partials.ptr_to([group, at_row, 0])
                load_vector("global", self._held, source, COUNT, self._place(number, turn, 0))

    def _place(self, number: int, turn: int, which: int) -> int:
        return ((number - self._first) * _reads(self._norm) + turn) * COUNT + which

    def _finish(self, numbers: range) -> None:
        for number in numbers:
            total = self._total(number, SUM) if self._norm.centred else None
            store_statistics(self._norm, total, self._total(number, SQUARES), self._statistics, number * COUNT)

    def take(self, row: tirx.Expr, lane: tirx.Expr, made: Callable[[tirx.Expr], tirx.Expr]) -> None:
        """Emit the reading of statistics that others made; `made` gives the address of those of one of the tile's rows.

        `row` is the first of this warp's 16 rows of the output; what `made` takes counts from there.
        """
        self._row, self._lane = row, lane
        self._statistics = T.alloc_local([self._rows * COUNT], "float32")
        for number in range(self._rows):
            block, half = divmod(number, _HALVES)
            address = made(block * self._step + half * 8 + lane // _LANES)
            load_vector("shared", self._statistics, address, COUNT, number * COUNT)

    def statistic(self, block: int, half: int, which: int) -> tirx.Expr:
        """Return a register: a statistic of a lane's row, of a block, in its first or second half of 16."""
        return self._statistics[(block * _HALVES + half) * COUNT + which]

    def write(self, param: tirx.Var) -> None:
        """Emit the writing of the statistics to a parameter [rows..., COUNT]."""
        target = T.decl_buffer((self._matmul.extent, COUNT), "float32", data=param.data)
        for number in range(self._rows):
            row = self._row_of(number)
            with T.If(tirx.all(self._lane % _LANES == 0, row < self._matmul.extent)), T.Then():
                for which in range(COUNT):
                    T.buffer_store(target, self._statistics[number * COUNT + which], [row, which])

    def _total(self, number: int, which: int) -> tirx.Expr:
        reads, groups = _reads(self._norm), self._norm.groups
        parts: list[tirx.Expr] = []
        for turn in range(reads):
            value = self._held[self._place(number, turn, which)]
            if (turn + 1) * _LANES > groups:
                value = tirx.Select(self._group(turn) < groups, value, tirx.FloatImm("float32", 0.0))
            parts.append(value)
        return device_call(_QUAD_SUM, tree(operator.add, parts))

    def _group(self, turn: int) -> tirx.Expr:
        return turn * _LANES + self._lane % _LANES

    def _row_of(self, number: int) -> tirx.Expr:
        block, half = divmod(number, _HALVES)
        return self._row + block * self._step + half * 8 + self._lane // _LANES
