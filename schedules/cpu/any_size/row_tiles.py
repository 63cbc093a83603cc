"""How a number of rows, known when a kernel is called, is shared among cores and made of tiles that have code."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.cpu.any_size.emit import unfolded, wide

# Each core computes rows of its own where it has so many. The same core then wrote most of what a kernel reads, but
# each core reads all weights. On two cores of a Xeon with AVX-512, BERT-base, GPT-2 and MiniLM take 0.95 to 0.99 of the
# time with 96 to 192 rows a core; BERT-base takes as long with 80, and 1.06 of the time with 64.
_ROWS_OF_CORE = 96


def parts_of_rows(rows: tirx.Expr, cores: int) -> tirx.Expr:
    """Return into how many parts rows are cut; the cores can be shared equally among them."""
    parts: tirx.Expr = wide(1)
    for count in range(2, cores + 1):
        if cores % count == 0:
            parts = tirx.Select(rows >= count * _ROWS_OF_CORE, wide(count), parts)
    return parts


def fewer_rows(most: int) -> list[int]:
    """Return rows of tiles for what whole tiles leave, the most first: each takes time to compile."""
    half = most // 2 + 1
    largest = max(most - 2, -(-(most + most // 2) // 2))
    return sorted({*range(largest, half, -2), half, max(1, half // 2)}, reverse=True)


@dataclass(frozen=True)
class RowTiles:
    """Tiles of rows from `begin` to `end`: `whole` ones of the `most` rows, `count` with the last ones, of `each`."""

    begin: tirx.Expr
    end: tirx.Expr
    most: int
    whole: tirx.Expr
    each: tirx.Expr
    count: tirx.Expr

    def is_whole(self, number: tirx.Expr) -> tirx.Expr:
        """Return whether a tile has the most rows."""
        return number < self.whole

    def first(self, number: tirx.Expr) -> tirx.Expr:
        """Return the first row of a tile; all rows of a whole one are there, the last of another may not be."""
        whole = tirx.min(self.begin + number * self.most, self.end - self.most)
        last = self.begin + self.whole * self.most + (number - self.whole) * self.each
        return tirx.Select(self.is_whole(number), whole, last)

    def rows_of(self, number: tirx.Expr) -> tirx.Expr:
        """Return how many rows a tile computes."""
        return tirx.Select(self.is_whole(number), wide(self.most), self.each)


def tiles_of_rows(begin: tirx.Expr, end: tirx.Expr, most: int) -> RowTiles:
    """Return the tiles of some rows, at most so many each; two share what one whole tile and few rows would have."""
    rows = unfolded(end - begin)
    largest = fewer_rows(most)[0]
    # What is left of the last whole tile is a tile, or shares its rows with it. More than a smaller one has is whole.
    spare = max(0, most - 1 - largest)
    over = T.Bind(rows % most)
    few = tirx.Select(tirx.all(over > 0, over <= most // 2), wide(1), wide(0))
    whole = unfolded(tirx.Select(rows > most, (rows + spare) // most - few, rows // most))
    left = T.Bind(tirx.max(rows - whole * most, wide(0)))
    tiles = T.Bind((left + (largest - 1)) // largest)
    each = unfolded((left + (tiles - 1)) // tirx.max(tiles, wide(1)))
    return RowTiles(begin, end, most, whole, each, unfolded(whole + tiles))
