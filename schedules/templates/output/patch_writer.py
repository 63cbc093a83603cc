"""From a warp's patch of shared memory, 16 rows of a part of the output's columns, to the output."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.hopper import uniform
from relaxtune.schedules.templates.emit.registers import when
from relaxtune.schedules.templates.output.output_shares import VECTOR_BYTES, has_vectors
from relaxtune.schedules.tir.blocks import Size, element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.rotated_matmul import output_column


def patch_vectors(lane: tirx.Expr, dtype: str, width: int) -> list[tuple[tirx.Expr, tirx.Expr, int, bool]]:
    """Return, for each 16-byte vector of a patch that a lane handles, its row, column, elements, and if partial."""
    lanes = VECTOR_BYTES // element_bytes(dtype)
    across = width // lanes
    vectors = []
    for step in range(math.ceil(16 * across / 32)):
        position = lane + step * 32
        vectors.append((position // across, position % across * lanes, lanes, 16 * across % 32 != 0))
    return vectors


@dataclass(frozen=True)
class PatchWriter:
    """Emits the writing of patches into the current IRBuilder."""

    matmul: MatmulFunction  # Whose output it is.
    # The output as a matrix; the patches of all warps.
    output: tirx.Var
    patch: tirx.Var
    # Of the thread.
    warp: tirx.Expr
    lane: tirx.Expr
    # The first row and column that are left out; None where all are written.
    row_end: Size | None
    column_end: Size | None
    uniform_rows: bool  # Whether a warp whose rows all exist has code of its own where it writes element by element.

    def write(self, row: tirx.Expr, column: tirx.Expr, width: int) -> None:
        """Emit the writing of so many columns of a patch, its first row and column given as the output's."""
        dtype = self.matmul.output_dtype
        if has_vectors(self.matmul, dtype):
            for line, inside, lanes, partial in patch_vectors(self.lane, dtype, width):
                with when([line < 16] if partial else []):
                    self._write_vector(row, column, line, inside, lanes, self.row_end)
            return
        # Element by element: without a branch for each where all 16 rows exist.
        steps = 16 * width // 32
        if self.row_end is None or not self.uniform_rows:
            self._write_elements(row, column, width, range(steps), self.row_end)
            return
        with T.If(uniform(row + 16) <= self.row_end):
            with T.Then():
                self._write_elements(row, column, width, range(steps))
            with T.Else(), T.serial(steps, unroll=False) as step:
                self._write_elements(row, column, width, [step], self.row_end)

    def _write_elements(
        self, row: tirx.Expr, column: tirx.Expr, width: int, steps: range | list[tirx.Expr], row_end: Size | None = None
    ) -> None:
        for step in steps:
            position = self.lane + step * 32
            self._write_vector(row, column, position // width, position % width, 1, row_end)

    def _write_vector(
        self, row: tirx.Expr, column: tirx.Expr, line: tirx.Expr, inside: tirx.Expr, lanes: int, row_end: Size | None
    ) -> None:
        row, column = row + line, column + inside
        head, patch = self.matmul.epilogue.head, self.patch
        target = output_column(column, head) if head else column
        guards = [] if row_end is None else [row < row_end]
        guards += [] if self.column_end is None else [column < self.column_end]
        with when(guards):
            if lanes == 1:
                T.buffer_store(self.output, patch[self.warp, line, inside], [row, target])
                return
            with T.vectorized(lanes) as lane:
                T.buffer_store(self.output, patch[self.warp, line, inside + lane], [row, target + lane])
