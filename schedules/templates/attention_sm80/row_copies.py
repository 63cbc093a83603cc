"""Copies of rows of Q, K and V from global to shared memory by all threads of a block; the notation is `template.py`'s.

A thread copies one chunk of 16 bytes of every some rows. Chunks of a row change places, as
`schedules.templates.emit.tensor_cores.swizzle` says. Zeros stand for positions and columns that do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.emit.async_copy import copy_async
from relaxtune.schedules.templates.emit.registers import when
from relaxtune.schedules.templates.emit.tensor_cores import CHUNK, chunk_place


class RowCopies:
    """Emits the copies of tiles of `rows` rows into the current IRBuilder.

    `source` is flat; `columns` of the `width` chunks of a row exist in it.
    """

    def __init__(self, source: tirx.Var, threads: int, thread: tirx.Expr, rows: int, width: int, columns: int) -> None:
        self._source, self._rows, self._width = source, rows, width
        used = min(threads, rows * width)
        self._idle = [thread < used] if used < threads else []
        # A row may have more chunks than there are threads.
        self._across = math.ceil(width / used)
        self._step = max(1, used // width)
        self._count = math.ceil(rows / self._step)
        self._row, self._chunk = thread // width, thread % width
        self._columns = columns

    def copy(
        self, tile: Callable[[tirx.Expr], tirx.Expr], start: Callable[[tirx.Expr], tirx.Expr], limit: Size | None
    ) -> None:
        """Emit the copies of a tile.

        `tile` returns the address of an element of it, `start` the place in the source at which one of its rows starts.
        Rows from `limit` on are zeros; None where all exist.
        """
        padded = self._columns < self._width * CHUNK
        for number in range(self._count):
            row = self._row + number * self._step
            inside = [row < self._rows] if (number + 1) * self._step > self._rows else []
            exists = [] if limit is None else [row < limit]
            if padded:
                exists.append(self._chunk * CHUNK < self._columns)
            at = start(row) + self._chunk * CHUNK
            # What is not read has to exist, too.
            at = tirx.Select(tirx.all(*exists), at, tirx.IntImm("int32", 0)) if exists else at
            with when([*self._idle, *inside]):
                copy_async(tile(self._place(number)), self._source.ptr_to([at]), exists, lines=True)

    def _place(self, number: int) -> tirx.Expr:
        if self._step % 8 == 0:
            # The pattern of rows some eights apart is the same.
            return chunk_place(self._row, self._chunk, self._width) + number * (self._step * self._width * CHUNK)
        return chunk_place(self._row + number * self._step, self._chunk, self._width)
