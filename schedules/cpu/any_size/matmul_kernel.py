"""The loops of `matmul`: jobs, groups of row tiles, blocks of k, registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import PrimFunc
from tvm.tirx.script import builder as T

from relaxtune.schedules.cpu.any_size.emit import (
    INTO_FIRST,
    INTO_SECOND,
    Buffers,
    build_function,
    load_at,
    places,
    prefetch,
    row_buffer,
    share_jobs,
    store_result,
    unfolded,
    wide,
)
from relaxtune.schedules.cpu.any_size.product import Product
from relaxtune.schedules.cpu.any_size.row_tiles import RowTiles, fewer_rows, parts_of_rows, tiles_of_rows
from relaxtune.schedules.cpu.any_size.tile_kernel import TileKernel, has_tile_kernel, is_worth_tiles
from relaxtune.schedules.cpu.contraction import BYTES_OF_WORD
from relaxtune.schedules.sizes import Size

# While a job reads its first panel, each step of k fetches a line of the next tile of the left operand, which another
# core may have written. On two cores of a Xeon with AVX-512, matmuls of 128 and 384 rows take 0.97 to 0.99 of the time.
# A line has so many elements, and a tile at most so many rows.
_LINE = 16

Values = Mapping[tirx.Var, tirx.Expr]


@dataclass(frozen=True)
class _Job:
    """What a core computes at once: a place of the batch axes, rows from `begin` to `end`, and a number of columns."""

    values: Values
    begin: tirx.Expr
    end: tirx.Expr
    number: tirx.Expr


@dataclass(frozen=True)
class _Group:
    """Row tiles, from a first one on, of a job's panels; whether they are the job's last ones."""

    first_panel: tirx.Expr
    panels: tirx.Expr
    first_tile: tirx.Expr
    tiles: tirx.Expr
    is_last: tirx.Expr


@dataclass(frozen=True)
class _Step:
    """One block of k for one tile.

    The tile's sums are kept from block to block in `sums`, from `at` on. `place` counts the tiles, `readers` of them,
    that read the block; the first ones fetch the next one, which is a panel's, from a step of k on. `turn` counts the
    panels of the job.
    """

    block: tirx.Expr
    place: tirx.Expr
    readers: tirx.Expr
    next_panel: tirx.Expr
    next_begin: tirx.Expr
    turn: tirx.Expr
    sums: tirx.Var
    at: tirx.Expr


class ProductKernel:
    """Writes the loops of a product."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._last_tiles = fewer_rows(product.rows)
        self._follow_one_another = product.rows_follow_one_another
        #: Those of the kernel being written, by those of the function.
        self.buffers: Buffers = {}

    def build(self) -> PrimFunc:
        """Return the kernel with the parameters and attributes of its function."""
        return build_function(self._product.func, self._emit)

    def _emit(self, buffers: Buffers) -> None:
        self.buffers = buffers
        if not has_tile_kernel(self._product):
            self._emit_rows()
            return
        rows = T.Bind(unfolded(self._product.row_count))
        with T.If(is_worth_tiles(rows)):
            with T.Then():
                self._tiles(rows).emit()
            with T.Else():
                self._emit_rows()

    def _tiles(self, rows: tirx.Expr) -> TileKernel:
        """Return the kernel for the tile unit, which has a batch of one."""
        con, axes = self._product.con, self._product.block.axes
        batch: Values = {axes[axis]: wide(0) for axis in con.batch}
        return TileKernel(
            self._product,
            rows,
            lambda row, k: self.load(con.left, {**batch, **self._row(row), axes[con.reduce[0]]: k}),
            lambda panel, k, column: self.buffers[con.right.source][panel, k, column],
            lambda row, start, sums, at: self._finish({**batch, **self._row(row)}, start, sums, at),
        )

    def _emit_rows(self) -> None:
        """Write the loops of vectors."""
        columns, width = self._product.columns, self._product.width
        if isinstance(columns, int):
            self._share(-(-columns // (width * self._product.cut.panels)), self._columns_of_job)
            return
        with T.If(columns >= width):
            with T.Then():
                self._share(tirx.floordiv(columns + (width - 1), width), self._columns_of_job)
            with T.Else():
                self._share(1, self._few_columns)

    def _share(self, jobs: Size, body: Callable[[_Job], None]) -> None:
        """Run a body for each place of the batch axes, each part of the rows, and each job of columns."""
        con, block, cores = self._product.con, self._product.block, self._product.cut.cores
        rows = self._product.row_count
        parts: Size = 1
        if cores > 1:
            rows = T.Bind(unfolded(rows))
            parts = T.Bind(unfolded(parts_of_rows(rows, cores)))

        def job(found: list[tirx.Expr]) -> None:
            *batch, part, number = found
            begin, end = wide(0), rows
            if cores > 1:
                begin, end = (T.Bind(unfolded(place * rows // parts)) for place in (part, part + 1))
            values = {block.axes[axis]: place for axis, place in zip(con.batch, batch, strict=True)}
            body(_Job(values, begin, end, number))

        # The parts of the rows follow one another, so that each core has the same rows in all kernels.
        share_jobs([*(block.sizes[axis] for axis in con.batch), parts, jobs], job)

    def _columns_of_job(self, job: _Job) -> None:
        """Compute a job's rows of its panels, a group of row tiles after another."""
        product, cut = self._product, self._product.cut
        tiles = tiles_of_rows(job.begin, job.end, product.rows)
        first = T.Bind(job.number * cut.panels)
        panels: tirx.Expr = wide(1)
        if cut.panels > 1:
            panels = T.Bind(tirx.min(wide(cut.panels), -(-product.columns // product.width) - first))
        groups = T.Bind(unfolded((tiles.count + (cut.tiles - 1)) // cut.tiles))
        size = unfolded((tiles.count + (groups - 1)) // tirx.max(groups, wide(1)))
        with T.serial(0, groups) as group:
            tile = unfolded(group * size)
            here = unfolded(tirx.min(size, tiles.count - tile))
            self._group(job.values, tiles, _Group(first, panels, tile, here, group == groups - 1))

    def _group(self, values: Values, tiles: RowTiles, group: _Group) -> None:
        """Compute a group of row tiles of all panels, a part of k after another."""
        product, cut = self._product, self._product.cut
        tile_size = product.rows * product.width
        kept = cut.tiles * tile_size
        sums = row_buffer(kept * (cut.panels if cut.parts > 1 else 1), product.sums_dtype)
        with T.serial(0, wide(cut.parts)) as part, T.serial(0, group.panels) as turn:
            panel = T.Bind(group.first_panel + turn)
            # A panel begins where it begins; its last columns may be no columns of C.
            begin = panel * product.width
            start = T.Bind(begin if product.con.panel else tirx.min(begin, product.columns - product.width))
            at = unfolded(turn * kept if cut.parts > 1 else wide(0))
            with T.serial(0, wide(cut.blocks)) as block, T.serial(0, group.tiles) as place:
                number = unfolded(group.first_tile + place)
                # A tile that is a group fetches the next panel with others of this one.
                turns = (place, group.tiles) if cut.tiles > 1 else (number, tiles.count)
                following = self._following(group, part, turn, block)
                step = _Step(part * cut.blocks + block, *turns, *following, turn, sums, at + place * tile_size)
                self._tile(values, start, tiles, number, step)
            with T.If(part == cut.parts - 1), T.Then(), T.serial(0, group.tiles) as place:
                number = unfolded(group.first_tile + place)
                first = unfolded(tiles.first(number))
                with T.serial(0, unfolded(tiles.rows_of(number))) as row:
                    known = {**values, **self._row(T.Bind(tirx.min(first + row, tiles.end - 1)))}
                    self._finish(known, start, sums, at + (place * product.rows + row) * product.width)

    def _following(
        self, group: _Group, part: tirx.Expr, turn: tirx.Expr, block: tirx.Expr
    ) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the panel that is read after a block, and from which step of k on."""
        cut = self._product.cut
        panel = group.first_panel + turn
        if cut.tiles == 1:
            return panel + 1, wide(0)
        in_part = block < cut.blocks - 1
        in_panels = turn < group.panels - 1
        in_parts = part < cut.parts - 1
        again = group.first_panel + tirx.Select(tirx.any(in_parts, tirx.Not(group.is_last)), wide(0), group.panels)
        other = tirx.Select(in_panels, panel + 1, again)
        begins = tirx.Select(in_panels, part, tirx.Select(in_parts, part + 1, wide(0)))
        length = wide(cut.length)
        begin = tirx.Select(in_part, part * cut.blocks + block + 1, begins * cut.blocks) * length
        return unfolded(tirx.Select(in_part, panel, other)), unfolded(begin)

    def _tile(self, values: Values, start: tirx.Expr, tiles: RowTiles, number: tirx.Expr, step: _Step) -> None:
        """Multiply a tile by the code for its rows; whole ones that fetch more or less have code of their own."""
        product = self._product
        first = T.Bind(unfolded(tiles.first(number)))

        def clamped(rows: int) -> list[Values]:
            return [self._row(tirx.min(first + row, tiles.end - 1)) for row in range(rows)]

        def whole() -> list[Values]:
            return [self._row_in_place(first + row) for row in range(product.rows)]

        with T.If(tiles.is_whole(number)):
            with T.Then():
                rows = whole if self._follow_one_another else lambda: clamped(product.rows)
                if product.cut.all_fetch and self._follow_one_another:
                    with T.If(step.turn == 0):
                        with T.Then():
                            self._multiply(values, start, rows(), step, next_rows=first + product.rows)
                        with T.Else():
                            self._multiply(values, start, rows(), step)
                elif product.con.panel is None or product.cut.all_fetch:
                    self._multiply(values, start, rows(), step)
                else:
                    with T.If(step.place < tirx.min(step.readers, wide(product.cut.fetching))):
                        with T.Then():
                            self._multiply(values, start, rows(), step)
                        with T.Else():
                            self._multiply(values, start, rows(), step, fetch=False)
            with T.Else():
                for rest, least in zip(self._last_tiles, [*self._last_tiles[1:], 0], strict=True):
                    with T.If(tirx.all(tiles.each > least, tiles.each <= rest)), T.Then():
                        self._multiply(values, start, clamped(rest), step)

    def _multiply(
        self,
        values: Values,
        start: tirx.Expr,
        rows: list[Values],
        step: _Step,
        *,
        fetch: bool = True,
        next_rows: tirx.Expr | None = None,
    ) -> None:
        """Add the products of one block of k to the sums of some rows."""
        product, con = self._product, self._product.con
        lanes, vectors, cut = product.lanes, product.vectors, product.cut
        column, reduced = product.block.axes[con.column], product.block.axes[con.reduce[0]]
        # A buffer a row: TVM puts up to 1 KiB on the stack, where LLVM makes registers of it.
        sums = [row_buffer(product.width, product.sums_dtype) for _ in rows]

        def each(body: Callable[[int, tirx.Expr], None]) -> None:
            for row in range(len(rows)):
                for vector in range(vectors):
                    with T.vectorized(0, lanes) as lane:
                        body(row, vector * lanes + lane)

        def clear() -> None:
            each(lambda row, at: T.buffer_store(sums[row], tirx.const(0, product.sums_dtype), [at]))

        begin, size = wide(0), wide(con.steps if con.steps is not None else product.block.sizes[con.reduce[0]])
        if cut.is_whole:
            clear()
        else:
            begin = unfolded(step.block * cut.length)
            size = unfolded(tirx.min(wide(cut.length), size - begin))
            with T.If(step.block == 0):
                with T.Then():
                    clear()
                with T.Else():
                    each(lambda row, at: T.buffer_store(sums[row], step.sums[step.at + row * product.width + at], [at]))
        whole = len(rows) == product.rows
        fetch_next = self._next_block(size, step, whole) if fetch and con.panel is not None else None
        with T.serial(0, size) as k:
            known = {**values, reduced: (begin + k) * con.group if con.group > 1 else begin + k}

            def multiply(row: int, at: tirx.Expr) -> None:
                here = {**known, **rows[row], column: start + wide(at)}
                term = self.load(con.left, here) * self.load(con.right, here)
                T.buffer_store(sums[row], sums[row][at] + term, [at])

            if con.group > 1:
                self._add_words(sums, known, rows, start // product.width, begin + k)
            else:
                each(multiply)
            if fetch_next is not None:
                fetch_next(k)
            if next_rows is not None:
                row = self._row_in_place(next_rows + k % _LINE)
                line = (begin + k // _LINE * _LINE) * con.group if con.group > 1 else begin + k // _LINE * _LINE
                prefetch(self.load(con.left, {**known, **row, reduced: line}), INTO_FIRST)
        each(lambda row, at: T.buffer_store(step.sums, sums[row][at], [step.at + row * product.width + at]))

    def _add_words(
        self, sums: list[tirx.Var], values: Values, rows: list[Values], panel: tirx.Expr, step: tirx.Expr
    ) -> None:
        """Add, to the sums of some rows, the products of four bytes along k from `values` on: VPDPBUSD."""
        product, con, lanes = self._product, self._product.con, self._product.lanes
        reduced, one = product.block.axes[con.reduce[0]], wide(1)
        word = tirx.Ramp(values[reduced], one, BYTES_OF_WORD)
        panels, count = self.buffers[con.right.source], lanes * BYTES_OF_WORD
        name = f"llvm.x86.avx512.vpdpbusd.{count * 8}"
        for row, place in enumerate(rows):
            four = tirx.reinterpret("int32", self.load(con.left, {**values, **place, reduced: word}))
            left = tirx.reinterpret(f"uint8x{count}", tirx.Broadcast(four, lanes))
            for vector in range(product.vectors):
                right = panels[panel, step, wide(vector * lanes), tirx.Ramp(wide(0), one, count)]
                at = tirx.Ramp(wide(vector * lanes), one, lanes)
                total = tirx.call_llvm_pure_intrin(f"int32x{lanes}", name, sums[row][at], left, right)
                T.buffer_store(sums[row], total, [at])

    def _next_block(self, size: tirx.Expr, step: _Step, whole: bool) -> Callable[[tirx.Expr], None]:
        """Return what fetches a part of the next block at a step of k: each tile's share is contiguous.

        A tile of fewer rows than a whole one may be the only one, and then fetches all lines of the panel's row.
        """
        product = self._product
        fetching = unfolded(tirx.min(step.readers, wide(product.cut.fetching)))
        stride = unfolded((product.width + (fetching - 1)) // fetching)
        share = unfolded(step.place % fetching * size * stride)
        panels, byte = self.buffers[product.con.right.source], [wide(0)] * (product.con.group > 1)

        def fetch(k: tirx.Expr) -> None:
            first = share + k * stride
            prefetch(panels[(step.next_panel, step.next_begin, first, *byte)], INTO_SECOND)
            for further in range(_LINE, 1 if whole else product.width, _LINE):
                with T.If(stride > further), T.Then():
                    prefetch(panels[(step.next_panel, step.next_begin, first + further, *byte)], INTO_SECOND)

        return fetch

    def _finish(self, values: Values, start: tirx.Expr, sums: tirx.Var, at: tirx.Expr) -> None:
        """Store the epilogue of one row, whose sums begin at a place of their buffer."""
        product = self._product
        lanes, column = product.lanes, product.block.axes[product.con.column]

        def finish(vector: tirx.Expr | int, lane: tirx.Expr) -> None:
            offset = vector * lanes + lane
            self.store(sums[at + offset], {**values, column: start + offset})

        def whole() -> None:
            with T.serial(0, product.vectors) as vector, T.vectorized(0, product.lanes) as lane:
                finish(vector, lane)

        columns = product.columns
        if product.con.panel is None or (isinstance(columns, int) and columns % product.width == 0):
            whole()
            return
        with T.If(start + product.width <= columns):
            with T.Then():
                whole()
            with T.Else(), T.serial(0, columns - start) as lane:
                finish(0, lane)

    def _few_columns(self, job: _Job) -> None:
        """Compute row after row, for fewer columns than a tile has."""
        product, con = self._product, self._product.con
        column, reduced = product.block.axes[con.column], product.block.axes[con.reduce[0]]
        with T.serial(job.begin, job.end) as number:
            acc = row_buffer(product.width)
            place = {**job.values, **self._row(number)}
            with T.serial(0, product.columns) as j:
                T.buffer_store(acc, tirx.FloatImm("float32", 0.0), [j])
            with T.serial(0, wide(product.block.sizes[con.reduce[0]])) as k, T.serial(0, product.columns) as j:
                here = {**place, reduced: k, column: j}
                T.buffer_store(acc, acc[j] + self.load(con.left, here) * self.load(con.right, here), [j])
            with T.serial(0, product.columns) as j:
                self.store(acc[j], {**place, column: j})

    def _row(self, number: tirx.Expr) -> Values:
        """Return the place of a row along each axis of rows."""
        con, block = self._product.con, self._product.block
        found = places(number, [block.sizes[axis] for axis in con.rows])
        return {block.axes[axis]: place for axis, place in zip(con.rows, found, strict=True)}

    def _row_in_place(self, number: tirx.Expr) -> Values:
        """Return a row of the left operand by its number, as a place along the last axis of rows.

        That place may be past the axis's end. Its address is the row's nevertheless, a constant away from the next
        row's.
        """
        con, axes = self._product.con, self._product.block.axes
        return {**{axes[axis]: wide(0) for axis in con.rows}, axes[con.rows[-1]]: number}

    def load(self, load: TensorLoad, values: Values) -> tirx.Expr:
        """Return what a load reads at a place."""
        return load_at(self.buffers, load, values)

    def store(self, total: tirx.Expr, values: Values) -> None:
        """Store the epilogue of a sum at a place, given as values of the product's axes."""
        store_result(self.buffers, self._product.block, self._product.epilogue, total, values)
