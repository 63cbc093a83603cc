"""Copies of rows of Q, K and V from global to shared memory by all threads of a block; the notation is `template.py`'s.

`schedules.templates.emit.tile_chunks` says which thread copies what. Zeros stand for positions and columns that do not
exist.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.emit.async_copy import copy_async
from relaxtune.schedules.templates.emit.registers import when
from relaxtune.schedules.templates.emit.tensor_cores import CHUNK
from relaxtune.schedules.templates.emit.tile_chunks import TileChunks


class RowCopies:
    """Emits the copies of tiles of `rows` rows into the current IRBuilder.

    `source` is flat; `columns` of its elements fill a row of `width` chunks, at most one for each of the threads.
    """

    def __init__(self, source: tirx.Var, threads: int, thread: tirx.Expr, rows: int, width: int, columns: int) -> None:
        self._source, self._width, self._columns = source, width, columns
        self._chunks = TileChunks(threads, thread, rows, width)

    def copy(
        self, tile: Callable[[tirx.Expr], tirx.Expr], start: Callable[[tirx.Expr], tirx.Expr], limit: Size | None
    ) -> None:
        """Emit the copies of a tile.

        `tile` returns the address of an element of it, `start` the place in the source at which one of its rows starts.
        Rows from `limit` on are zeros; None where all exist.
        """
        padded = self._columns < self._width * CHUNK
        chunks = self._chunks
        for number in range(chunks.count):
            row = chunks.row + number * chunks.step
            exists = [] if limit is None else [row < limit]
            if padded:
                exists.append(chunks.chunk * CHUNK < self._columns)
            at = start(row) + chunks.chunk * CHUNK
            # What is not read has to exist, too.
            at = tirx.Select(tirx.all(*exists), at, tirx.IntImm("int32", 0)) if exists else at
            with when(chunks.inside(number)):
                copy_async(tile(chunks.place(number)), self._source.ptr_to([at]), exists, lines=True)
