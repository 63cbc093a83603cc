"""Which chunks of 16 bytes of a tile in shared memory each thread of a block copies.

A thread has one chunk of every some rows. Chunks of a row change places, as `tensor_cores.swizzle` says.
"""

from __future__ import annotations

import math

from tvm import tirx

from relaxtune.schedules.templates.emit.tensor_cores import CHUNK, chunk_place


class TileChunks:
    """A thread's chunks of a tile of `rows` rows of `width` chunks of some elements, at most one for each thread.

    Attributes
    ----------
    row, chunk
        Of the first one; the others are `step` rows apart each.
    count
        How many there are for a thread at most; `inside` says which exist.
    """

    def __init__(
        self, threads: int, thread: tirx.Expr, rows: int, width: int, elements: int = CHUNK, together: int = 1
    ) -> None:
        self._rows, self._width, self._elements, self._together = rows, width, elements, together
        self.step = min(threads // width, rows)
        self.count = math.ceil(rows / self.step)
        self.row, self.chunk = thread // width, thread % width
        # Threads that are too few for one more row have nothing to do: they would copy behind the last one.
        self._idle = [thread < self.step * width] if self.step * width < threads else []

    def place(self, number: int) -> tirx.Expr:
        """Return the element of the tile at which a chunk starts."""
        if self.step % 8 == 0:
            # The pattern of rows some eights apart is the same.
            first = self._at(self.row)
            return first + number * (self.step * self._width * self._elements)
        return self._at(self.row + number * self.step)

    def _at(self, row: tirx.Expr) -> tirx.Expr:
        return chunk_place(row, self.chunk, self._width, self._elements, self._together)

    def inside(self, number: int) -> list[tirx.Expr]:
        """Return the conditions under which a chunk exists."""
        ragged = (number + 1) * self.step > self._rows
        return [*self._idle, *([self.row + number * self.step < self._rows] if ragged else [])]
