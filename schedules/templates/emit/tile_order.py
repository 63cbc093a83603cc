"""The order in which blocks make the tiles of a matmul's output, so that what runs at a time shares what it reads."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.tir.blocks import Size


def tile_place(tile: tirx.Expr, tiles_m: Size, tiles_n: int, group: int) -> tuple[tirx.Expr, tirx.Expr]:
    """Return the row and the column, in tiles, of a tile by its number.

    Tiles are counted column by column in groups of `group` rows of tiles; the last group may have fewer. Where the
    number of rows is symbolic, it emits them into registers.
    """
    height = min(group, tiles_m) if isinstance(tiles_m, int) else group
    if height == 1 and isinstance(tiles_m, int):
        return tile // tiles_n, tile % tiles_n
    number, inside = tile // (height * tiles_n), tile % (height * tiles_n)
    rows: tirx.Expr | int = height
    if not isinstance(tiles_m, int) or tiles_m % height:
        rows = tirx.min(height, tiles_m - number * height)
    if isinstance(tiles_m, int):
        return number * height + inside % rows, inside // rows
    # Every address has them. As expressions, which passes put in the place of plain variables, they are a quotient of
    # two unknown numbers each time: of 37 KB of code they made 285 KB.
    place = T.alloc_local([2], "int32")
    T.buffer_store(place, tirx.truncdiv(inside, rows), [1])
    T.buffer_store(place, number * height + inside - place[1] * rows, [0])
    return place[0], place[1]
