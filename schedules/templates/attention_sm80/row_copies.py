"""Copies of rows of Q, K and V between global and shared memory by all threads of a block; see `template.py`.

`schedules.templates.emit.tile_chunks` says which thread copies what. Zeros stand for positions and columns that do not
exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.emit.async_copy import copy_async
from relaxtune.schedules.templates.emit.registers import when
from relaxtune.schedules.templates.emit.tensor_cores import CHUNK
from relaxtune.schedules.templates.emit.tile_chunks import TileChunks

# The conditions under which a row is copied.
Only: TypeAlias = "Callable[[tirx.Expr], list[tirx.Expr]]"
# Chunks that a thread reads from shared memory before it writes them: a wait for each would be as long.
_STORED_TOGETHER = 4


class RowCopies:
    """Emits the copies of tiles of `rows` rows into the current IRBuilder.

    `memory` is flat, global; `columns` of its elements fill a row of `width` chunks, at most one for each of the
    threads.
    """

    def __init__(self, memory: tirx.Var, threads: int, thread: tirx.Expr, rows: int, width: int, columns: int) -> None:
        self._memory, self._width, self._columns = memory, width, columns
        self._chunks = TileChunks(threads, thread, rows, width)

    def load(
        self,
        tile: Callable[[tirx.Expr], tirx.Expr],
        start: Callable[[tirx.Expr], tirx.Expr],
        limit: Size | None,
        only: Only | None = None,
    ) -> None:
        """Emit the copies of a tile from global memory.

        `tile` returns the address of an element of it, `start` the place in global memory at which one of its rows
        starts. Rows from `limit` on are zeros; None where all exist. Rows for which `only` does not hold are left
        as they are.
        """
        chunks = self._chunks
        for number in range(chunks.count):
            row, exists = self._row(number, limit)
            at = start(row) + chunks.chunk * CHUNK
            # What is not read has to exist, too.
            at = tirx.Select(tirx.all(*exists), at, tirx.IntImm("int32", 0)) if exists else at
            with when([*chunks.inside(number), *(only(row) if only is not None else [])]):
                copy_async(tile(chunks.place(number)), self._memory.ptr_to([at]), exists, lines=True)

    def store(
        self, tile: Callable[[tirx.Expr], tirx.Expr], start: Callable[[tirx.Expr], tirx.Expr], limit: Size | None
    ) -> None:
        """Emit the copies of a tile to global memory, of what this thread copied from there and has waited for."""
        chunks = self._chunks
        for begin in range(0, chunks.count, _STORED_TOGETHER):
            numbers = range(begin, min(begin + _STORED_TOGETHER, chunks.count))
            words = T.alloc_local([4 * len(numbers)], "uint32")
            registers = [[words[4 * turn + index] for index in range(4)] for turn in range(len(numbers))]
            for four, number in zip(registers, numbers, strict=True):
                with when(chunks.inside(number)):
                    T.evaluate(T.ptx["ld.shared.v4.u32"](*four, tile(chunks.place(number))))
            for four, number in zip(registers, numbers, strict=True):
                row, exists = self._row(number, limit)
                with when([*chunks.inside(number), *exists]):
                    target = self._memory.ptr_to([start(row) + chunks.chunk * CHUNK])
                    T.evaluate(T.ptx["st.global.v4.u32"](target, *four))

    def _row(self, number: int, limit: Size | None) -> tuple[tirx.Expr, list[tirx.Expr]]:
        """Return the row of a thread's chunk, and the conditions under which the chunk exists in global memory."""
        row = self._chunks.row + number * self._chunks.step
        exists = [] if limit is None else [row < limit]
        if self._columns < self._width * CHUNK:
            exists.append(self._chunks.chunk * CHUNK < self._columns)
        return row, exists
