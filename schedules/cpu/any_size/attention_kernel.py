"""The loops of `attention`: groups of row tiles, the columns that they need, registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import PrimFunc
from tvm.tirx.script import builder as T

from relaxtune.schedules.cpu.any_size.emit import Buffers, View, build_function, row_buffer, share_jobs, unfolded, wide
from relaxtune.schedules.cpu.any_size.matmul_kernel import ProductKernel, Values
from relaxtune.schedules.cpu.any_size.product import ELEMENT_BYTES, Product
from relaxtune.schedules.cpu.any_size.rows import Rows, RowsKernel
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.tir.expressions import substitute

# Tiles of a group read K and V from the first cache, one after another, while their scores take at most so much.
_GROUP_TILES = 4
_GROUP_BYTES = 128 << 10
# Jobs that a core has at least, where there are rows enough, when each job copies V.
_JOBS_EACH = 4
# Columns at the end of all rows of a group are looked at so many vectors at once.
_SCANNED_VECTORS = 4


@dataclass(frozen=True)
class Attention:
    """A function to make: S = Q K, what happens to a row of it, O = P V; `rows` of a tile at most."""

    func: PrimFunc
    first: Product
    walk: Rows
    second: Product
    kept: tuple[tirx.Var, ...]  # The tensors whose row is in the cache, one after another.
    # For each batch axis of S, the position of the same axis in the second product, None where that has none (size 1).
    places: tuple[int | None, ...]
    rows: int
    # The number of a row that O is divided by, since P is not; None where P is what multiplies V.
    total: tirx.Var | None
    # A condition, over the axes of the first block of the walk, without which it does not read S; None for always.
    seen: tirx.Expr | None
    views: Mapping[tirx.Var, View]  # Operands of the products that lie in a parameter.
    cores: int  # What jobs are shared among.

    @property
    def queries(self) -> Size:
        """Rows of S and of O."""
        return self.first.block.sizes[self.first.con.rows[0]]

    @property
    def keys(self) -> Size:
        """Columns of S."""
        return self.first.block.sizes[self.first.con.column]


@dataclass(frozen=True)
class _Group:
    """Tiles of rows: `tiles` of them, each of `rows`, the first of which begins at row `first` of Q.

    Tile t begins at row `begin(t)`; two tiles may share rows, and `all_rows` counts these once. The scores of the
    group's row r lie in `scores` from `r * length` on, and `totals[r]` is what its row of O is divided by. `copied` has
    the rows of V, one after another, where it is not read in its place.
    """

    batch: Sequence[tirx.Expr]
    tiles: tirx.Expr
    rows: tirx.Expr
    begin: Callable[[tirx.Expr], tirx.Expr]
    first: tirx.Expr
    all_rows: tirx.Expr
    scores: tirx.Var
    totals: tirx.Var
    length: tirx.Expr
    copied: tirx.Var | None


class AttentionKernel:
    """Writes the loops of an attention."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._first, self._second = ProductKernel(attention.first), ProductKernel(attention.second)
        self._walk = RowsKernel(attention.walk)
        # All tiles have the same number of rows: more than three quarters of the most, once there are three tiles.
        most = attention.rows
        self._counts = sorted({most, -(-most * 3 // 4), most // 2 + 1, -(-most // 4)}, reverse=True)

    def build(self) -> PrimFunc:
        """Return the kernel with the parameters and attributes of its function."""
        return build_function(self._attention.func, self._emit)

    def _emit(self, buffers: Buffers) -> None:
        found = self._attention
        views = {made: replace(view, buffer=buffers[view.buffer]) for made, view in found.views.items()}
        self._first.buffers = self._second.buffers = self._buffers = {**buffers, **views}
        block, con = found.first.block, found.first.con
        queries, keys = wide(found.queries), wide(found.keys)
        # Values by way of memory: TVM takes long to simplify quotients of quotients.
        tiles = T.Bind(unfolded((queries + (found.rows - 1)) // found.rows))
        room = T.Bind(unfolded(keys + 2 * found.first.lanes))
        fitting = wide(_GROUP_BYTES // (found.rows * ELEMENT_BYTES)) // room
        size = T.Bind(unfolded(tirx.max(tirx.min(fitting, wide(_GROUP_TILES)), wide(1))))

        def job(batch: Sequence[tirx.Expr], place: tirx.Expr, copied: tirx.Var | None = None) -> None:
            rows = unfolded((queries + (tiles - 1)) // tiles)
            first_tile = unfolded(place * size)
            count = unfolded(tirx.min(size, tiles - first_tile))

            def begin(tile: tirx.Expr) -> tirx.Expr:
                return tirx.min((first_tile + tile) * rows, queries - rows)

            first = T.Bind(unfolded(begin(wide(0))))
            all_rows = unfolded(begin(count - 1) + rows - first)
            scores = T.alloc_buffer([size * found.rows * room], "float32", scope="global")
            totals = T.alloc_buffer([_GROUP_TILES * found.rows], "float32", scope="global")
            length = unfolded(room // found.first.lanes * found.first.lanes)
            self._group(_Group(batch, count, rows, begin, first, all_rows, scores, totals, length, copied))

        groups = T.Bind(unfolded((tiles + (size - 1)) // size))
        sizes = [block.sizes[axis] for axis in con.batch]
        if found.second.con.right.source not in views:
            share_jobs([*sizes, groups], lambda number: job(number[:-1], number[-1]))
            return
        whole = T.Bind(unfolded(tirx.max(wide(math.prod(sizes)), wide(1))))
        parts = T.Bind(unfolded(tirx.min((_JOBS_EACH * found.cores + (whole - 1)) // whole, groups)))

        def part(number: list[tirx.Expr]) -> None:
            *batch, place = number
            each = unfolded((groups + (parts - 1)) // parts)
            copied = self._copied(batch)
            with T.serial(0, each) as group, T.If(place * each + group < groups), T.Then():
                job(batch, T.Bind(place * each + group), copied)

        share_jobs([*sizes, parts], part)

    def _group(self, group: _Group) -> None:
        found = self._attention
        self._scores(group, self._columns_seen(group))
        with T.serial(0, group.all_rows) as row:
            begin = unfolded(row * group.length)
            kept = View(group.scores, lambda place: [begin + wide(place[-1])])
            at = [*group.batch, T.Bind(group.first + row)]
            numbers = self._walk.make_row(at, {**self._buffers, **dict.fromkeys(found.kept, kept)})
            if found.total is not None:
                # Without keys there is nothing to divide.
                divisor = tirx.Select(wide(found.keys) > 0, numbers[found.total][0], tirx.FloatImm("float32", 1.0))
                T.buffer_store(group.totals, divisor, [row])

        def is_weighed(row: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
            return group.scores[row * group.length + column] != tirx.FloatImm("float32", 0.0)

        self._weigh(group, self._last_column(group.all_rows, is_weighed))

    def _columns_seen(self, group: _Group) -> tirx.Expr:
        """Return where the columns end whose scores are read, of all rows of a group."""
        found = self._attention
        seen = found.seen
        if seen is None:
            return wide(found.keys)
        axes = found.walk.blocks[0].axes

        def is_seen(row: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
            at = dict(zip(axes, [*group.batch, group.first + row, column], strict=True))
            return tvm_ffi.structural_map(substitute(seen, at), (TensorLoad, lambda load: self._first.load(load, {})))

        return self._last_column(group.all_rows, is_seen)

    def _last_column(self, rows: tirx.Expr, holds: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]) -> tirx.Expr:
        """Return an end of the columns for which a condition holds in any row: none from there on, perhaps some before.

        Fewer columns than are looked at once are all taken.
        """
        lanes, keys = self._attention.first.lanes, wide(self._attention.keys)
        width = _SCANNED_VECTORS * lanes
        end, going = (T.alloc_buffer([1], "int64", scope="global") for _ in range(2))
        T.buffer_store(end, keys, [0])
        T.buffer_store(going, tirx.Select(keys >= width, wide(1), wide(0)), [0])
        with T.While(tirx.all(going[0] > 0, end[0] > 0)):
            start = T.Bind(unfolded(tirx.max(end[0] - width, wide(0))))
            held = row_buffer(lanes)
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(held, tirx.FloatImm("float32", 0.0), [lane])
            with T.serial(0, rows) as row:
                for vector in range(_SCANNED_VECTORS):
                    with T.vectorized(0, lanes) as lane:
                        condition = holds(row, start + vector * lanes + wide(lane))
                        one = tirx.Select(condition, tirx.FloatImm("float32", 1.0), held[lane])
                        T.buffer_store(held, one, [lane])
            total = sum((held[lane] for lane in range(1, lanes)), held[0])
            T.buffer_store(going, tirx.Select(total > tirx.FloatImm("float32", 0.0), wide(0), wide(1)), [0])
            T.buffer_store(end, tirx.Select(going[0] > 0, start, end[0]), [0])
        return end[0]

    def _scores(self, group: _Group, end: tirx.Expr) -> None:
        """Store sums of Q and K, of columns before an end; none is read from there on."""
        found = self._attention
        product, keys = found.first, wide(found.keys)
        block, con = product.block, product.con
        values = dict(zip(block.axes, group.batch, strict=False))
        last = wide(found.queries) - 1
        depth = wide(block.sizes[con.reduce[0]])

        def tiles_of(vectors: int, counts: Sequence[int]) -> None:
            width = vectors * product.lanes

            def tiles(count: int) -> None:
                with T.serial(0, (end + (width - 1)) // width) as number, T.serial(0, group.tiles) as tile:
                    start = unfolded(tirx.min(number * width, keys - width))
                    begin = unfolded(group.begin(tile))
                    into = unfolded((begin - group.first) * group.length + start)
                    places = [T.Bind(tirx.min(begin + row, last)) for row in range(count)]

                    def term(row: int, at: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
                        here = {**values, block.axes[con.rows[0]]: places[row], block.axes[con.reduce[0]]: k}
                        return self._product_of(self._first, {**here, block.axes[con.column]: start + at})

                    def keep(row: int, at: tirx.Expr, total: tirx.Expr) -> None:
                        T.buffer_store(group.scores, total, [into + row * group.length + at])

                    self._multiply((count, vectors), depth, term, keep)

            self._by_rows(group.rows, tiles, counts)

        def one_by_one() -> None:
            with T.serial(0, group.all_rows) as row, T.serial(0, keys) as column:
                total = row_buffer(1)
                T.buffer_store(total, tirx.FloatImm("float32", 0.0), [0])
                here = {**values, block.axes[con.rows[0]]: group.first + row, block.axes[con.column]: column}
                with T.serial(0, depth) as k:
                    term = self._product_of(self._first, {**here, block.axes[con.reduce[0]]: k})
                    T.buffer_store(total, total[0] + term, [0])
                T.buffer_store(group.scores, total[0], [row * group.length + column])

        with T.If(keys >= product.width):
            with T.Then():
                tiles_of(product.vectors, self._counts)
            with T.Else(), T.If(keys >= product.lanes):
                with T.Then():
                    tiles_of(1, self._counts[::2])
                with T.Else():
                    one_by_one()

    def _weigh(self, group: _Group, end: tirx.Expr) -> None:
        """Store the epilogue of sums of P and V; from a column on, all weights are 0."""
        found = self._attention
        product = found.second
        block, con, width = product.block, product.con, product.width
        columns = block.extents[con.column]
        assert columns is not None
        values = self._batch_of_values(group.batch)

        def value(k: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
            if group.copied is not None:
                return group.copied[k * columns + column]
            return self._value(values, k, column)

        zeros = self._zeros(end, columns, value)

        def tiles(count: int) -> None:
            with T.serial(0, columns // width) as number, T.serial(0, group.tiles) as tile:
                sums = row_buffer(count * width)
                begin = unfolded(group.begin(tile))
                place = unfolded(begin - group.first)
                into = unfolded(place * group.length)

                def term(row: int, at: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
                    return group.scores[into + row * group.length + k] * value(k, number * width + at)

                def keep(row: int, at: tirx.Expr, total: tirx.Expr) -> None:
                    T.buffer_store(sums, total + zeros[number * width + at], [row * width + at])

                self._multiply((count, product.vectors), end, term, keep)
                with T.serial(0, group.rows) as row:
                    here = {**values, block.axes[con.rows[0]]: T.Bind(begin + row)}
                    with T.serial(0, product.vectors) as vector, T.vectorized(0, product.lanes) as lane:
                        at = vector * product.lanes + lane
                        total = sums[row * width + at]
                        if found.total is not None:
                            total = total / group.totals[place + row]
                        self._second.store(total, {**here, block.axes[con.column]: number * width + at})

        self._by_rows(group.rows, tiles, self._counts)

    def _batch_of_values(self, batch: Sequence[tirx.Expr]) -> dict[tirx.Var, tirx.Expr]:
        """Return the batch axes of the second product at a place of the first one's."""
        block = self._attention.second.block
        values: dict[tirx.Var, tirx.Expr] = {block.axes[axis]: wide(0) for axis in self._attention.second.con.batch}
        for axis, place in zip(self._attention.places, batch, strict=True):
            if axis is not None:
                values[block.axes[axis]] = place
        return values

    def _value(self, batch: Values, k: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
        """Return an element of V, read in its place."""
        block, con = self._attention.second.block, self._attention.second.con
        here = {**batch, block.axes[con.reduce[0]]: k, block.axes[con.column]: column}
        return self._second.load(con.right, here)

    def _copied(self, batch: Sequence[tirx.Expr]) -> tirx.Var:
        """Return a copy of V at a place of the batch, one row after another."""
        product, keys = self._attention.second, wide(self._attention.keys)
        columns = product.block.extents[product.con.column]
        assert columns is not None
        values = self._batch_of_values(batch)
        copied = T.alloc_buffer([tirx.max(keys, wide(1)) * columns], "float32", scope="global")
        vectors = T.serial(0, columns // product.lanes)
        with T.serial(0, keys) as k, vectors as vector, T.vectorized(0, product.lanes) as lane:
            column = vector * product.lanes + wide(lane)
            T.buffer_store(copied, self._value(values, k, column), [k * columns + column])
        return copied

    def _zeros(self, begin: tirx.Expr, columns: int, value: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]) -> tirx.Var:
        """Return the sums of V from a row on, with weights of 0: NaN where there is one, or an infinity."""
        lanes = self._attention.second.lanes
        zeros = row_buffer(columns)

        def each(element: Callable[[tirx.Expr], tirx.Expr]) -> None:
            for vector in range(columns // lanes):
                with T.vectorized(0, lanes) as lane:
                    column = wide(vector * lanes) + wide(lane)
                    T.buffer_store(zeros, element(column), [column])

        # From memory: TVM takes 0 times anything for 0.
        weight = row_buffer(1)
        T.buffer_store(weight, tirx.FloatImm("float32", 0.0), [0])
        each(lambda _column: weight[0])
        with T.serial(begin, wide(self._attention.keys)) as k:
            each(lambda column: zeros[column] + weight[0] * value(k, column))
        return zeros

    def _by_rows(self, rows: tirx.Expr, tiles: Callable[[int], None], counts: Sequence[int]) -> None:
        """Run the code of the fewest rows that are enough; each takes time to compile."""
        for count, least in zip(counts, [*counts[1:], 0], strict=True):
            with T.If(tirx.all(rows > least, rows <= count)), T.Then():
                tiles(count)

    def _multiply(
        self,
        size: tuple[int, int],
        length: tirx.Expr,
        term: Callable[[int, tirx.Expr, tirx.Expr], tirx.Expr],
        keep: Callable[[int, tirx.Expr, tirx.Expr], None],
    ) -> None:
        """Sum terms over k for rows x vectors in registers, then keep each sum; both are given a row and a column."""
        rows, vectors = size
        lanes = self._attention.first.lanes
        sums = [row_buffer(vectors * lanes) for _ in range(rows)]

        def each(body: Callable[[int, tirx.Expr], None]) -> None:
            for row in range(rows):
                for vector in range(vectors):
                    with T.vectorized(0, lanes) as lane:
                        body(row, wide(vector * lanes) + wide(lane))

        each(lambda row, at: T.buffer_store(sums[row], tirx.FloatImm("float32", 0.0), [at]))
        with T.serial(0, length) as k:
            each(lambda row, at: T.buffer_store(sums[row], sums[row][at] + term(row, at, k), [at]))
        each(lambda row, at: keep(row, at, sums[row][at]))

    def _product_of(self, kernel: ProductKernel, values: Values) -> tirx.Expr:
        con = self._attention.first.con
        return kernel.load(con.left, values) * kernel.load(con.right, values)
