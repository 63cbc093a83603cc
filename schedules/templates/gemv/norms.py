"""Norms of rows in kernels for few rows (`schedules.tir.row_norm`): statistics that are made, partial sums written.

Every block needs the statistics of all rows. It copies their partial sums to shared memory while its loads of W are on
their way, and adds them up when it has its sums: a warp makes a row at a time, its lanes every 32nd group. A block that
holds x in registers makes them of that. The order of sums is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.async_copy import copy_async, end_copies
from relaxtune.schedules.templates.emit.device_function import device_call, load_bytes
from relaxtune.schedules.templates.emit.kernel_frame import flat_view
from relaxtune.schedules.templates.emit.registers import in_register, when
from relaxtune.schedules.templates.gemv.plan import COLUMNS, LANES, WARP
from relaxtune.schedules.tir.row_norm import COUNT, SCALE, SHIFT, SQUARES, SUM, RowNorm

# Partial sums in a copy of 16 bytes, float32.
_COPIED = 4
_LANES_SUM = """
__forceinline__ __device__ float relaxtune_sum_of_{lanes}_lanes(float x) {{
#pragma unroll
  for (int step = 1; step < {lanes}; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}}
"""


def sum_of_lanes(value: tirx.Expr, lanes: int) -> tirx.Expr:
    """Return the sum over as many neighbouring lanes, a power of 2; all lanes of a warp have to ask."""
    return device_call(_LANES_SUM.format(lanes=lanes), value)


_ROW_SUMS = """
__forceinline__ __device__ void relaxtune_row_sums_{kind}_{columns}_{words}(float* sums, const unsigned* x) {{
#pragma unroll
  for (int c = 0; c < {columns}; ++c) {{
    float sum = 0, squares = 0;
#pragma unroll
    for (int w = 0; w < {words}; ++w) {{
      unsigned word = x[w / 4 * 4 * {columns} + 4 * c + w % 4];
      float low = {low}, high = {high};
      sum += low + high;
      squares = fmaf(low, low, fmaf(high, high, squares));
    }}
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {{
      sum += __shfl_xor_sync(~0u, sum, step);
      squares += __shfl_xor_sync(~0u, squares, step);
    }}
    sums[2 * c] = sum;
    sums[2 * c + 1] = squares;
  }}
}}
"""
# Both numbers of a word, in float32.
_NUMBERS = {
    "f16": ("__half2float(__ushort_as_half(word & 0xffff))", "__half2float(__ushort_as_half(word >> 16))"),
    "bf16": ("__uint_as_float(word << 16)", "__uint_as_float(word & 0xffff0000u)"),
}


class Statistics:
    """The statistics of all `m` rows in shared memory; `params` are the kernel's."""

    def __init__(self, norm: RowNorm, m: int, params: list[tirx.Var], pool: T.SMEMPool) -> None:
        self.norm = norm
        self._m = m
        self._result = None if norm.output is None else flat_view(params[norm.output])
        self._statistics = pool.alloc((m, COUNT), "float32", align=16)

    def statistic(self, row: tirx.Expr, which: int) -> tirx.Expr:
        """Return a statistic of a row."""
        return self._statistics[row, which]

    def _write(
        self, row: tirx.Expr, total: Callable[[int], tirx.Expr], block: tirx.Expr, writes: list[tirx.Expr]
    ) -> None:
        """Emit the statistics of a row from its sums, and their writing where `writes` hold; all lanes take part."""
        zero, length = tirx.FloatImm("float32", 0.0), tirx.FloatImm("float32", 1.0 / self.norm.size)
        variance, shift = total(SQUARES) * length, zero
        if self.norm.centred:
            mean = in_register(total(SUM) * length, "float32")
            variance = tirx.max(variance - mean * mean, zero)
        scale = in_register(tirx.rsqrt(variance + tirx.FloatImm("float32", self.norm.epsilon)), "float32")
        if self.norm.centred:
            shift = in_register(zero - mean * scale, "float32")
        with when(writes):
            for which, value in ((SCALE, scale), (SHIFT, shift)):
                T.buffer_store(self._statistics, value, [row, which])
        if self._result is not None:
            with when([*writes, block == 0]):
                for which, value in ((SCALE, scale), (SHIFT, shift)):
                    T.buffer_store(self._result, value, [row * COUNT + which])


class StatisticsOfRegisters(Statistics):
    """Emits statistics of rows that the `warps` warps of a block hold parts of."""

    def __init__(self, norm: RowNorm, m: int, params: list[tirx.Var], pool: T.SMEMPool, warps: int) -> None:
        super().__init__(norm, m, params, pool)
        self._sums = pool.alloc((warps, m, COUNT), "float32", align=16)
        self._warps = warps

    def make(self, words: tirx.Var, count: int, kind: str, block: tirx.Expr, thread: tirx.Expr) -> None:
        """Emit the statistics; the first block writes them.

        `words` are `count` words of each 8 rows, 4 of one after 4 of another, and `kind` is "f16" or "bf16".
        """
        lane, columns = thread % WARP, math.ceil(self._m / COLUMNS)
        low, high = _NUMBERS[kind]
        source = _ROW_SUMS.format(kind=kind, columns=columns, words=count, low=low, high=high)
        sums = T.alloc_local([COUNT * columns], "float32")
        T.evaluate(device_call(source, sums.ptr_to([0]), words.ptr_to([0])))
        for column in range(columns):
            row = column * COLUMNS + lane // LANES
            with when([lane % LANES == 0, row < self._m]):
                for which in (SUM, SQUARES):
                    T.buffer_store(self._sums, sums[COUNT * column + which], [thread // WARP, row, which])
        T.evaluate(T.cuda.cta_sync())
        with when([thread < self._m]):
            self._write(thread, lambda which: self._total(thread, which), block, [])

    def _total(self, row: tirx.Expr, which: int) -> tirx.Expr:
        total: tirx.Expr = self._sums[0, row, which]
        for warp in range(1, self._warps):
            total = total + self._sums[warp, row, which]
        return in_register(total, "float32")


class SharedStatistics(Statistics):
    """Emits statistics from the partial sums that the kernel is given."""

    def __init__(self, norm: RowNorm, m: int, params: list[tirx.Var], pool: T.SMEMPool) -> None:
        super().__init__(norm, m, params, pool)
        self._source = flat_view(params[norm.partials])
        self._partials = pool.alloc((norm.groups * m * COUNT,), "float32", align=16)

    def copy(self, thread: tirx.Expr, threads: int) -> None:
        """Emit the copies of the partial sums by a block, as one group."""
        total = self.norm.groups * self._m * COUNT
        count = total // _COPIED
        for turn in range(math.ceil(count / threads)):
            place = turn * threads + thread
            with when([place < count] if (turn + 1) * threads > count else []):
                copy_async(self._partials.ptr_to([place * _COPIED]), self._source.ptr_to([place * _COPIED]))
        end_copies()
        if total % _COPIED:
            with when([thread == 0]):
                load_bytes(self._partials.ptr_to([total - COUNT]), self._source.ptr_to([total - COUNT]), 4 * COUNT)

    def finish(self, block: tirx.Expr, thread: tirx.Expr, warps: int) -> None:
        """Emit the statistics from what was copied, which the block has waited for; the first block writes them."""
        warp, lane = thread // WARP, thread % WARP
        for turn in range(math.ceil(self._m / warps)):
            row = turn * warps + warp
            # All lanes of a warp take the same way.
            with when([row < self._m] if (turn + 1) * warps > self._m else []):
                self._write(row, partial(self._total, row, lane), block, [lane == 0])

    def _total(self, row: tirx.Expr, lane: tirx.Expr, which: int) -> tirx.Expr:
        """Return the sum of all groups of a row, in all lanes."""
        groups, zero = self.norm.groups, tirx.FloatImm("float32", 0.0)
        own = T.alloc_local([1], "float32")
        T.buffer_store(own, zero, [0])
        for turn in range(math.ceil(groups / WARP)):
            group = turn * WARP + lane
            with when([group < groups] if (turn + 1) * WARP > groups else []):
                T.buffer_store(own, own[0] + self._partials[(group * self._m + row) * COUNT + which], [0])
        return in_register(sum_of_lanes(own[0], WARP), "float32")
