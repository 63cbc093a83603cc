"""From the accumulators of wgmma or mma to the output: evaluate an epilogue on registers and write whole rows.

A warp owns 16 rows. In each 8 columns, lane l holds of rows `l / 4` and `l / 4 + 8` the columns `2 * (l % 4)` and the
next (PTX ISA 9.0, register fragments of D of wgmma and of mma.m16n8). It evaluates the epilogue for such pairs, puts
them into a patch of shared memory of its own, 16 rows of up to 64 columns, and writes the patch out 16 bytes a lane,
whole rows together.

Reads of the epilogue from other buffers:

- at the output's own position (a residual): read as it is written, 16 bytes a lane and through a patch; where registers
  are left, before the sum is made, so that the sum hides the latency;
- one element a column (a bias): copied to shared memory before the sum is made, a copy for each group of warps that
  write the same columns (`schedules.templates.output.column_copies`);
- a few elements a row (statistics): the lane's own, in registers from before the sum on; so is a scalar;
- anything else: read in place, element by element.

Partial sums of the output's rows (`schedules.tir.row_norm`), where the function has them, are taken from the
pairs as they are rounded: a lane adds up its columns of a group, then the four lanes of a row theirs.

Where heads are rotated (`schedules.tir.rotated_matmul`), the halves of a head alternate in the product: of each
16 columns, a lane has both columns of its pairs. Each 8 columns are put back in their place as they are written.

Rows and columns outside the output are clamped for reads, and not written. Where the output's rows do not start at
multiples of 16 bytes, it is written element by element, and residuals are read in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.barriers import uniform
from relaxtune.schedules.templates.emit.device_function import load_bytes
from relaxtune.schedules.templates.emit.epilogue import evaluated, in_float32, output_axes
from relaxtune.schedules.templates.emit.registers import clear, load_vector, store_vector, when
from relaxtune.schedules.templates.output.column_copies import ColumnCopies, load_pair, pair_of
from relaxtune.schedules.templates.output.output_shares import (
    VECTOR_BYTES,
    Shares,
    has_vectors,
    head_tables,
    patch_pad,
    residual_loads,
    row_loads,
)
from relaxtune.schedules.templates.output.row_statistics import share_of_four_sums
from relaxtune.schedules.tir.blocks import Size, element_bytes, static_shape
from relaxtune.schedules.tir.epilogue import Epilogue, MatmulFunction
from relaxtune.schedules.tir.expressions import constant_value, dtype_of, substitute
from relaxtune.schedules.tir.rotated_matmul import output_column
from relaxtune.schedules.tir.row_norm import COUNT, SQUARES, SUM, PartialSums


class OutputTile:
    """Emits the writing of output tiles into the current IRBuilder.

    `params` are the parameters of the kernel under construction, in the order of the function's. `copies` holds what is
    read one element a column. With `uniform_rows`, the compiler is told that branches around rows are whole warps',
    which wgmma's descriptors take to stay in uniform registers.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        matmul: MatmulFunction,
        params: Sequence[tirx.Var],
        shares: Shares,
        *,
        uniform_rows: bool,
    ) -> None:
        self._matmul = matmul
        self._uniform_rows = uniform_rows
        self._epilogue: Epilogue = matmul.epilogue
        self._value_of_sums = in_float32(matmul.epilogue.value)
        self._renamed = dict(zip(func.params, params, strict=True))
        self._shares, self._step = shares, shares.row_step
        self._residuals = residual_loads(matmul)
        self.copies = ColumnCopies(func, matmul, params, shares)
        self._tables = head_tables(matmul)
        self._output_param = params[matmul.output]
        self._params = params

    def allocate(self, pool: T.SMEMPool) -> None:
        """Take shared memory from a pool."""
        self._patch = self._allocate_patch(pool, self._matmul.output_dtype)
        self._residual_patches: list[tirx.Var] = []
        free = True
        for load in self._residuals:
            dtype = dtype_of(load)
            shared = free and dtype == self._matmul.output_dtype
            free = free and not shared
            self._residual_patches.append(self._patch if shared else self._allocate_patch(pool, dtype))
        self.copies.allocate(pool)

    def _allocate_patch(self, pool: T.SMEMPool, dtype: str) -> tirx.Var:
        return pool.alloc((self._shares.warps, 16, self._shares.width + patch_pad(dtype)), dtype, align=128)

    def begin(self, row: tirx.Expr, column: tirx.Expr, warp: tirx.Expr, lane: tirx.Expr, *, ragged_rows: bool) -> None:
        """Emit the reads that are made before the sum.

        `row` and `column` are the first of this warp and of its part of the tile; with `ragged_rows`, rows may lie
        outside the output.
        """
        self._row, self._column, self._warp, self._lane = row, column, warp, lane
        self._ragged_rows = ragged_rows
        shares = self._shares
        self.copies.make(column, warp, lane)
        self._rows = [(load, self._read_rows(load)) for load in row_loads(self._matmul)]
        self._scalars: list[tuple[TensorLoad, tirx.Expr]] = []
        for load in (one for one in self._matmul.epilogue.loads() if static_shape(one.source) == ()):
            source, scalar = _matrix(self._renamed[load.source], 1, 1), T.alloc_local([1], dtype_of(load))
            load_bytes(scalar.ptr_to([0]), source.ptr_to([0, 0]), element_bytes(dtype_of(load)))
            self._scalars.append((load, scalar[0]))
        self._held: dict[tuple[int, int, int], tirx.Var] = {}
        self._held_tables: dict[tuple[int, int, int], list[tuple[TensorLoad, tirx.Var]]] = {}
        if shares.prefetched:
            for block in range(shares.m_blocks):
                for start, width in shares.chunks:
                    self._read_residuals(block, start, width)
                    for eight in range(start // 8, (start + width) // 8):
                        for half in range(2):
                            self._read_tables(block, eight, half)

    def take_statistics(self, buffer: tirx.Var, statistic: Callable[[int, int, int], tirx.Expr]) -> None:
        """Take registers for the loads from a buffer of statistics, [rows..., number] as the epilogue reads them.

        `statistic` returns the register of a block of rows, a half of 16 and a number.
        """
        for load in self._epilogue.loads():
            if load.source.same_as(buffer):
                number = int(constant_value(load.indices[-1]) or 0)
                places = ((block, half) for block in range(self._shares.m_blocks) for half in range(2))
                self._rows.append((load, {place: statistic(*place, number) for place in places}))

    def _read_rows(self, load: TensorLoad) -> dict[tuple[int, int], tirx.Expr]:
        """Emit the loads of one element for each of a lane's rows; return the registers by block and half."""
        source = _matrix(self._renamed[load.source], self._matmul.extent, int(load.source.ty.shape[-1]))
        registers, size = T.alloc_local([self._shares.m_blocks * 2], dtype_of(load)), element_bytes(dtype_of(load))
        places = [(block, half) for block in range(self._shares.m_blocks) for half in range(2)]
        for number, (block, half) in enumerate(places):
            row = tirx.min(self._row + block * self._step + half * 8 + self._lane // 4, self._matmul.extent - 1)
            load_bytes(registers.ptr_to([number]), source.ptr_to([row, load.indices[-1]]), size)
        return {place: registers[number] for number, place in enumerate(places)}

    def rows_exist(self, block: int) -> AbstractContextManager[None]:
        """Emit what the block emits for those warps that have rows of the output in one of its blocks of rows."""
        if not self._ragged_rows:
            return when([])
        row = self._row + block * self._step
        return when([(uniform(row) if self._uniform_rows else row) < self._matmul.extent])

    def write(self, accumulators: tirx.Var, *, ragged_columns: bool, column_end: tirx.Expr | int) -> None:
        """Emit the evaluation and writing of this warp's part.

        `accumulators` has 4 registers for every 8 columns of the product, the blocks of rows one after another:
        float32, or uint32 for sums in int32. With `ragged_columns`, columns may lie outside the output or this warp's
        part, which ends at `column_end`.
        """
        self._ragged_columns = ragged_columns
        self._column_end = column_end
        shares, matmul = self._shares, self._matmul
        self._output = _matrix(self._output_param, matmul.extent, matmul.columns)
        self.copies.wait(self._warp)
        for block in range(shares.m_blocks):
            with self.rows_exist(block):
                for start, width in shares.chunks:
                    if not shares.prefetched:
                        self._read_residuals(block, start, width)
                    for index, patch in enumerate(self._residual_patches):
                        vectors = patch_vectors(self._lane, str(patch.ty.dtype), width)
                        for number, (line, inside, _, partial) in enumerate(vectors):
                            to = patch.ptr_to([self._warp, line, inside])
                            with when([line < 16] if partial else []):
                                store_vector("shared", to, self._held[index, block, start], number * 4)
                    if self._residual_patches:
                        T.evaluate(T.cuda.warp_sync())
                    self._evaluate(accumulators, block, start, width)
                    T.evaluate(T.cuda.warp_sync())
                    self._write_patch(self._row + block * self._step, self._column + start, width)
                    T.evaluate(T.cuda.warp_sync())

    def _write_patch(self, row: tirx.Expr, column: tirx.Expr, width: int) -> None:
        """Emit the writing of so many columns of a patch, its first row and column given as the output's."""
        dtype, row_end = self._matmul.output_dtype, self._matmul.extent if self._ragged_rows else None

        def write_elements(steps: range | list[tirx.Expr], row_end: Size | None) -> None:
            for step in steps:
                position = self._lane + step * 32
                self._write_vector(row + position // width, column, position // width, position % width, 1, row_end)

        if has_vectors(self._matmul, dtype):
            for line, inside, lanes, partial in patch_vectors(self._lane, dtype, width):
                with when([line < 16] if partial else []):
                    self._write_vector(row + line, column, line, inside, lanes, row_end)
            return
        # Element by element: with uniform rows, without a branch for each where all 16 rows exist.
        steps = 16 * width // 32
        if row_end is None or not self._uniform_rows:
            write_elements(range(steps), row_end)
            return
        with T.If(uniform(row + 16) <= row_end):
            with T.Then():
                write_elements(range(steps), None)
            with T.Else(), T.serial(steps, unroll=False) as step:
                write_elements([step], row_end)

    def _write_vector(
        self, row: tirx.Expr, column: tirx.Expr, line: tirx.Expr, inside: tirx.Expr, lanes: int, row_end: Size | None
    ) -> None:
        column, head = column + inside, self._epilogue.head
        target = output_column(column, head) if head else column
        guards = [] if row_end is None else [row < row_end]
        guards += [column < self._column_end] if self._ragged_columns else []
        with when(guards):
            if lanes == 1:
                T.buffer_store(self._output, self._patch[self._warp, line, inside], [row, target])
                return
            with T.vectorized(lanes) as lane:
                T.buffer_store(self._output, self._patch[self._warp, line, inside + lane], [row, target + lane])

    def _read_residuals(self, block: int, start: int, width: int) -> None:
        for index, load in enumerate(self._residuals):
            dtype = dtype_of(load)
            source = _matrix(self._renamed[load.source], self._matmul.extent, self._matmul.columns)
            vectors = patch_vectors(self._lane, dtype, width)
            words = T.alloc_local([4 * len(vectors)], "uint32")
            for number, (line, inside, lanes, _) in enumerate(vectors):
                at_row = tirx.min(self._row + block * self._step + line, self._matmul.extent - 1)
                at_column = tirx.min(self._column + start + inside, self._matmul.columns - lanes)
                load_vector("global", words, source.ptr_to([at_row, at_column]), first=number * 4)
            self._held[index, block, start] = words

    def _evaluate(self, accumulators: tirx.Var, block: int, start: int, width: int) -> None:
        """Emit a chunk's values and their writing into the patch, `shares.batch` columns at a time.

        In a batch, all loads come first and all stores last: a compiler that cannot tell two addresses of shared memory
        apart keeps their order, and would make one pair after another wait for its load.
        """
        partials = self._matmul.partials
        if partials is not None:
            self._sums = T.alloc_local([math.ceil(width / partials.group) * 2 * COUNT], "float32")
            clear(self._sums)
        for first in range(start, start + width, self._shares.batch):
            last = min(first + self._shares.batch, start + width)
            self._evaluate_batch(accumulators, block, start, range(first // 8, last // 8))
        if partials is not None:
            self._write_sums(block, start, math.ceil(width / partials.group), partials)

    def _write_sums(self, block: int, start: int, groups: int, partials: PartialSums) -> None:
        matmul, lane, group = self._matmul, self._lane, partials.group
        data = self._params[partials.output].data
        target = T.decl_buffer((matmul.columns // group, matmul.extent, COUNT), "float32", data=data)
        # Of a row and the one 8 below, each of four lanes writes one of the sums.
        row, which = self._row + block * self._step + lane % 4 // COUNT * 8 + lane // 4, lane % COUNT
        shares = T.alloc_local([groups], "float32")
        for number in range(groups):
            values = [self._sums[number * 2 * COUNT + index] for index in range(2 * COUNT)]
            T.buffer_store(shares, share_of_four_sums(lane, values), [number])
        for number in range(groups):
            column = self._column + start + number * group
            guards = [row < matmul.extent] if self._ragged_rows else []
            if self._ragged_columns:
                guards.append(column < self._column_end)
            with when(guards):
                T.buffer_store(target, shares[number], [tirx.floordiv(column, group), row, which])

    def _evaluate_batch(self, accumulators: tirx.Var, block: int, start: int, eights: range) -> None:
        places = [(eight, half) for eight in eights for half in range(2)]
        two = self._lane % 4 * 2
        columns = {eight: self.copies.pairs(self._warp, eight * 8 + two) for eight, half in places if half == 0}
        residuals = [
            [
                (load, load_pair(patch, [self._warp, self._lane // 4 + half * 8], eight * 8 - start + two))
                for load, patch in zip(self._residuals, self._residual_patches, strict=True)
            ]
            for eight, half in places
        ]
        if not self._shares.prefetched:
            for eight, half in places:
                self._read_tables(block, eight, half)
        results = []
        for (eight, half), residual in zip(places, residuals, strict=True):
            at_row = tirx.min(self._row + block * self._step + self._lane // 4 + half * 8, self._matmul.extent - 1)
            at_column = self._output_column(eight) + two
            tables = self._held_tables[block, eight, half]
            registers = self._registers(block, eight, half)
            result = pair_of(self._matmul.output_dtype)
            for index in range(2):
                loaded = [(load, pair[index]) for load, pair in (*columns[eight], *residual, *tables)]
                loaded += [(load, elements[block, half]) for load, elements in self._rows]
                loaded += self._scalars
                here = tirx.min(at_column + index, self._matmul.columns - 1)
                sums = [accumulators[register + index] for register in registers]
                value = self._value(sums, loaded, at_row, here)
                T.buffer_store(result, value, [index])
            results.append(result)
            if self._matmul.partials is not None:
                # To the sums of the pair's group.
                first = ((eight * 8 - start) // self._matmul.partials.group * 2 + half) * COUNT
                for index in range(2):
                    wide = tirx.Cast("float32", result[index])
                    T.buffer_store(self._sums, self._sums[first + SUM] + wide, [first + SUM])
                    T.buffer_store(self._sums, self._sums[first + SQUARES] + wide * wide, [first + SQUARES])
        for (eight, half), result in zip(places, results, strict=True):
            with T.vectorized(2) as lane:
                inside = [self._warp, self._lane // 4 + half * 8, eight * 8 - start + two + lane]
                T.buffer_store(self._patch, result[lane], inside)

    def _read_tables(self, block: int, eight: int, half: int) -> None:
        """Emit the loads of a pair of neighbouring elements of every table of heads into registers."""
        row = tirx.min(self._row + block * self._step + self._lane // 4 + half * 8, self._matmul.extent - 1)
        column = self._output_column(eight) + self._lane % 4 * 2
        axes = output_axes(self._epilogue, row, column)
        pairs = []
        for load in self._tables:
            pair = pair_of(dtype_of(load))
            source = self._renamed[load.source].ptr_to([substitute(index, axes) for index in load.indices])
            load_bytes(pair.ptr_to([0]), source, 2 * element_bytes(dtype_of(load)))
            pairs.append((load, pair))
        self._held_tables[block, eight, half] = pairs

    def _output_column(self, eight: int) -> tirx.Expr:
        """Return the output's column that the first of 8 columns of this warp's part of a tile goes to."""
        column = self._column + eight * 8
        if not self._epilogue.head:
            return column
        return output_column(tirx.min(column, self._matmul.columns - 8), self._epilogue.head)

    def _registers(self, block: int, eight: int, half: int) -> list[int]:
        """Return the first of a pair's registers, and of those of the pair that it is gated or rotated with."""
        each = self._shares.accumulators
        register = (block * self._shares.columns // 2 + eight * 4) * each + half * 2
        if self._epilogue.head:
            return [register, register + (4 if eight % 2 == 0 else -4)]
        # The gated column's register follows those of its gate's 8 columns.
        return [register + 4 * number for number in range(each)]

    def _value(
        self,
        accumulators: Sequence[tirx.Expr],
        loaded: Sequence[tuple[TensorLoad, tirx.Expr]],
        row: tirx.Expr,
        column: tirx.Expr,
    ) -> tirx.Expr:
        epilogue = self._epilogue
        axes = output_axes(epilogue, row, column)

        def replace_load(load: TensorLoad) -> tirx.Expr:
            for known, element in loaded:
                if tvm_ffi.structural_equal(known, load):
                    return element
            buffer = self._renamed[load.source]
            return buffer[tuple(substitute(one, axes) for one in load.indices)]

        variables = [epilogue.accumulator] if epilogue.second is None else [epilogue.accumulator, epilogue.second]
        # Registers of integer sums are unsigned.
        sums = [
            one if one.ty == variable.ty else tirx.Cast(str(variable.ty.dtype), one)
            for variable, one in zip(variables, accumulators, strict=True)
        ]
        return evaluated(self._value_of_sums, epilogue, sums, axes, replace_load)


def _matrix(buffer: tirx.Var, rows: Size, columns: int) -> tirx.Var:
    return T.decl_buffer((rows, columns), str(buffer.ty.dtype), data=buffer.data)


def patch_vectors(lane: tirx.Expr, dtype: str, width: int) -> list[tuple[tirx.Expr, tirx.Expr, int, bool]]:
    """Return, for each 16-byte vector of a patch that a lane handles, its row, column, elements, and if partial."""
    lanes = VECTOR_BYTES // element_bytes(dtype)
    across = width // lanes
    vectors = []
    for step in range(math.ceil(16 * across / 32)):
        position = lane + step * 32
        vectors.append((position // across, position % across * lanes, lanes, 16 * across % 32 != 0))
    return vectors
