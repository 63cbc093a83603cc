"""How a number of rows, known when a kernel is called, is made of tiles that have code."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.cpu.any_size.emit import unfolded, wide


def fewer_rows(most: int) -> list[int]:
    """Return rows of tiles for what whole tiles leave, the most first: each takes time to compile."""
    half = most // 2 + 1
    largest = max(most - 2, -(-(most + most // 2) // 2))
    return sorted({*range(largest, half, -2), half, max(1, half // 2)}, reverse=True)


@dataclass(frozen=True)
class RowTiles:
    """Tiles of `rows` rows: `whole` ones of the `most` rows, all `count` of them with the last ones of `each`."""

    rows: tirx.Expr
    most: int
    whole: tirx.Expr
    each: tirx.Expr
    count: tirx.Expr

    def is_whole(self, number: tirx.Expr) -> tirx.Expr:
        """Return whether a tile has the most rows."""
        return number < self.whole

    def first(self, number: tirx.Expr) -> tirx.Expr:
        """Return the first row of a tile; all rows of a whole one are there, the last of another may not be."""
        whole = tirx.min(number * self.most, self.rows - self.most)
        return tirx.Select(self.is_whole(number), whole, self.whole * self.most + (number - self.whole) * self.each)

    def rows_of(self, number: tirx.Expr) -> tirx.Expr:
        """Return how many rows a tile computes."""
        return tirx.Select(self.is_whole(number), wide(self.most), self.each)


def tiles_of_rows(rows: tirx.Expr, most: int) -> RowTiles:
    """Return the tiles of so many rows, at most so many each; two share what one whole tile and few rows would have."""
    rows = unfolded(rows)
    largest = fewer_rows(most)[0]
    # What is left of the last whole tile is a tile, or shares its rows with it. More than a smaller one has is whole.
    spare = max(0, most - 1 - largest)
    over = T.Bind(rows % most)
    few = tirx.Select(tirx.all(over > 0, over <= most // 2), wide(1), wide(0))
    whole = unfolded(tirx.Select(rows > most, (rows + spare) // most - few, rows // most))
    left = T.Bind(tirx.max(rows - whole * most, wide(0)))
    tiles = T.Bind((left + (largest - 1)) // largest)
    each = unfolded((left + (tiles - 1)) // tirx.max(tiles, wide(1)))
    return RowTiles(rows, most, whole, each, unfolded(whole + tiles))
