"""The end of kernels for few rows: the warps' sums meet in shared memory, are added up, and go through the epilogue.

The sums are added in the order of the warps, so that results repeat bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.device_function import load_bytes
from relaxtune.schedules.templates.emit.epilogue import evaluated, output_axes
from relaxtune.schedules.templates.emit.kernel_frame import flat_view
from relaxtune.schedules.templates.emit.registers import clear, in_register, when
from relaxtune.schedules.templates.emit.sums_exchange import SplitSum
from relaxtune.schedules.templates.gemv.norms import Statistics, sum_of_lanes
from relaxtune.schedules.templates.gemv.plan import COLUMNS, LANES, SHARED_PAD, TILE, WARP, FewRowsPlan
from relaxtune.schedules.tir.blocks import element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction, gate_column, value_column
from relaxtune.schedules.tir.expressions import dtype_of, substitute
from relaxtune.schedules.tir.rotated_matmul import HEAD_UNIT, output_column
from relaxtune.schedules.tir.row_norm import COUNT, SQUARES, SUM

# Numbers that blocks hand over together.
_TOGETHER = 4


class GemvOutput:
    """The epilogue of one tile of rows of W; the methods emit into the current IRBuilder.

    `params` are the kernel's, `renamed` has one for each of the function. A warp makes the tiles of 16 rows of W that
    the plan says; its warps share the sum over K. The sums are multiplied by `factor`. `statistics` are those of the
    norm that the function has.
    """

    def __init__(
        self,
        matmul: MatmulFunction,
        plan: FewRowsPlan,
        renamed: Mapping[tirx.Var, tirx.Var],
        params: list[tirx.Var],
        statistics: Statistics | None,
        factor: float = 1.0,
    ) -> None:
        self._matmul, self._renamed, self._output = matmul, renamed, flat_view(params[matmul.output])
        self._tiles, self._warps, self._rows = plan.parameters.tiles, plan.parameters.warps, plan.rows
        self._statistics, self._factor = statistics, factor
        self._partial_sums = None if matmul.partials is None else flat_view(params[matmul.partials.output])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the sums of all warps in shared memory, in float32."""
        return self._warps, self._matmul.m, self._rows + SHARED_PAD

    def share(self, shared: tirx.Var, sums: tirx.Var, thread: tirx.Expr, first: tirx.Expr) -> None:
        """Emit the writing of this warp's sums to shared memory, from place `first` of its first axis on."""
        warp, group, part = thread // WARP, thread % WARP // LANES, thread % LANES
        column_tiles = math.ceil(self._matmul.m / COLUMNS)
        for tile in range(self._tiles):
            for column in range(column_tiles):
                for index in range(4):
                    row = tile * TILE + group + index // 2 * COLUMNS
                    m = column * COLUMNS + part * 2 + index % 2
                    value = sums[(tile * column_tiles + column) * 4 + index]
                    with when([m < self._matmul.m] if (column + 1) * COLUMNS > self._matmul.m else []):
                        T.buffer_store(shared, value, [first + warp, m, row])

    def write(
        self,
        shared: tirx.Var,
        thread: tirx.Expr,
        first_row: Callable[[tirx.Expr], tirx.Expr],
        first: Callable[[tirx.Expr], tirx.Expr],
        parts: int = 1,
        warps: int | None = None,
    ) -> None:
        """Emit the adding up of all warps' sums, as `share` left them, the epilogue, and the writing of the output.

        Of each of `parts` of W that are written together, `first_row` gives the first row of W, which may lie behind
        the last one where there are several parts, and `first` the place in the first axis of `shared`. Sums of `warps`
        warps are added up, by default of all.
        """
        matmul, threads = self._matmul, self._warps * WARP
        each = matmul.epilogue.accumulators
        rows = self._rows // each
        count = parts * matmul.m * rows
        for turn in range(math.ceil(count / threads)):
            place = turn * threads + thread
            part = place // (matmul.m * rows) if parts > 1 else tirx.IntImm("int32", 0)
            m, row = place // rows % matmul.m if parts > 1 else place // rows, place % rows
            stored = first_row(part) // each + row
            guards = [] if count % threads == 0 else [place < count]
            if matmul.n % self._rows or parts > 1:
                guards.append(stored < matmul.columns)
            written = T.alloc_local([1], "float32") if matmul.partials is not None else None
            with when(guards):
                sums = [self._total(shared, first(part), m, one, warps or self._warps) for one in self._sources(row)]
                head = matmul.epilogue.head
                column = output_column(stored, head) if head else stored
                value = self._value(sums, m, column)
                if written is not None:
                    value = in_register(value, matmul.output_dtype)
                    T.buffer_store(written, tirx.Cast("float32", value), [0])
                T.buffer_store(self._output, value, [m * matmul.columns + column])
            if matmul.partials is not None and written is not None:
                # Neighbouring lanes have neighbouring columns. A group's columns are all there or none.
                group, value = matmul.partials.group, written[0]
                totals = [in_register(sum_of_lanes(one, group), "float32") for one in (value, value * value)]
                with when([*guards, stored % group == 0]):
                    for which, total in zip((SUM, SQUARES), totals, strict=True):
                        at = (stored // group * matmul.m + m) * COUNT + which
                        T.buffer_store(self._partial_sums, total, [at])

    @contextmanager
    def of_the_last(
        self, split: SplitSum, shared: tirx.Var, thread: tirx.Expr, first: Callable[[tirx.Expr], tirx.Expr], parts: int
    ) -> Iterator[None]:
        """Emit the adding up of all warps' sums of some parts of W, and of the blocks that share K.

        Code emitted inside is run by the last of these blocks; the sums are those of a part's first warp then.
        """
        m, threads = self._matmul.m, self._warps * WARP
        fours = self._rows // _TOGETHER
        count = parts * m * fours
        turns = math.ceil(count / threads)
        totals = T.alloc_local([_TOGETHER * turns], "float32")

        def each(body: Callable[[int, list[tirx.Expr]], None]) -> None:
            for turn in range(turns):
                place = turn * threads + thread
                part, line, row = place // (m * fours), place // fours % m, place % fours * _TOGETHER
                with when([place < count] if (turn + 1) * threads > count else []):
                    for index in range(_TOGETHER):
                        body(turn * _TOGETHER + index, [first(part), line, row + index])

        clear(totals)
        each(lambda index, at: T.buffer_store(totals, self._total(shared, at[0], at[1], at[2], self._warps), [index]))
        with split.of_the_last(totals, _TOGETHER * turns):
            # Each thread overwrites what it alone has read.
            each(lambda index, at: T.buffer_store(shared, totals[index], at))
            yield

    def _sources(self, row: tirx.Expr) -> list[tirx.Expr]:
        """Return the rows of W in a tile that a column of the output is made of."""
        epilogue = self._matmul.epilogue
        if epilogue.head:
            # The other half of a head is 8 rows away.
            return [row, row // HEAD_UNIT * HEAD_UNIT + (row + HEAD_UNIT // 2) % HEAD_UNIT]
        return [row] if epilogue.accumulators == 1 else [gate_column(row), value_column(row)]

    def _total(self, shared: tirx.Var, first: tirx.Expr, m: tirx.Expr, row: tirx.Expr, warps: int) -> tirx.Expr:
        total: tirx.Expr = shared[first, m, row]
        for warp in range(1, warps):
            total = total + shared[first + warp, m, row]
        if self._factor != 1:
            total = total * tirx.FloatImm("float32", self._factor)
        return in_register(total, "float32")

    def _value(self, sums: list[tirx.Expr], m: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
        """Return an output element; what its epilogue reads is loaded in place."""
        epilogue = self._matmul.epilogue
        axes = output_axes(epilogue, m, column)
        loaded = [(load, self._loaded(load, axes, m)) for load in epilogue.loads()]

        def replace(load: TensorLoad) -> tirx.Expr:
            return next(value for known, value in loaded if tvm_ffi.structural_equal(known, load))

        return evaluated(epilogue.value, epilogue, sums, axes, replace)

    def _loaded(self, load: TensorLoad, axes: dict[tirx.Var, tirx.Expr], m: tirx.Expr) -> tirx.Expr:
        """Emit a load that stays behind the wait for the kernel before; a statistic is in shared memory."""
        if self._statistics is not None and load.source.same_as(self._statistics.norm.buffer):
            return self._statistics.statistic(m, int(load.indices[-1]))
        buffer = self._renamed[load.source]
        register = T.alloc_local([1], dtype_of(buffer))
        indices = [substitute(index, axes) for index in load.indices]
        load_bytes(register.ptr_to([0]), buffer.ptr_to(indices), element_bytes(dtype_of(buffer)))
        return register[0]
