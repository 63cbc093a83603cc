"""Matrix products of symbolic size on a CPU: packed weights, batches of two activations, any epilogue.

    C[b..., m..., n] = epilogue(sum over k of L[b..., m..., k] * R[b..., k, n])

Rows `m` of all axes are counted by one number M, which is known when the kernel is called; so may be columns and k.
A tile of rows x vectors of C is kept in vector registers over the whole reduction:

    parallel b..., column tile                     the last tile of columns begins early enough to be whole
      group of row tiles                           one tile, or several where k has several blocks
        block of k                                 one, unless a panel of packed weights takes much of the second cache
          row tile in M // rows:     rows          no row is checked: one beyond the last is the last one again
          the rest of M:             one tile of fewer rows, or two where one would have few (16 rows: 8 and 8)
            acc[rows, vectors] = 0 or sums[row tile]
            k: acc += L[row] (broadcast) * R[vector];  the first tiles fetch the next block of weights
            sums[row tile] = acc                   constant indices, so that the accumulators are registers
        C = epilogue(sums)

Rows and columns that two tiles share are computed twice, to the same value. Columns of fewer than a tile run through
a plain loop, which LLVM makes vectors of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc
from tvm.tirx.script import builder as T

from relaxtune.schedules.cpu.any_size.emit import (
    Buffers,
    build_function,
    places,
    row_buffer,
    share_jobs,
    unfolded,
    wide,
)
from relaxtune.schedules.cpu.any_size.product import Product
from relaxtune.schedules.cpu.base import CpuRule, cpu_limits, inline_spatial
from relaxtune.schedules.cpu.contraction import MAX_ROWS, TiledContraction, lanes_of
from relaxtune.schedules.cpu.matmul import find_matmul
from relaxtune.schedules.cpu.packing import LINE_BYTES
from relaxtune.schedules.cpu.tiling import find_epilogue
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.blocks import position_of, written_params
from relaxtune.schedules.tir.expressions import substitute
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock, block_facts, is_canonical, list_blocks

# Vectors of columns that no panel and no size gives: two hide the latency of the multiply-add behind 14 rows.
_VECTORS = 2
_VECTORS_MAX = 4
_ELEMENT_BYTES = 4
# Rows that begin multiples of this apart share a set of the first cache, which holds as many lines as fit into it.
_SET_STRIDE_BYTES = 4096
# A block of a panel takes this part of the second cache at most, and tiles of so many rows read it, one after another,
# while the next one is fetched. Measured with panels of 3,072 and 4,096 rows, and vectors of 32 bytes.
_L2_SHARE, _GROUP_ROWS = 4, 224
# With vectors of a line it takes the first cache at most, and twice as many rows read it: on a Xeon with AVX-512,
# BERT-base then takes 0.8 of the time at length 16, 0.95 at 128, and the same at 256 (1.03 with the rows above).
_GROUP_ROWS_LINE = 448

# Of LLVM's instruction: to read, into the second cache, data.
_PREFETCH = (0, 2, 1)
# So many tiles fetch the next block together, each a share; more of them would take loads from the multiply-adds.
_FETCHING = 4


class AnySizeMatmul(CpuRule):
    """Functions of one float32 matmul whose rows, columns or reduction have a symbolic size."""

    name = "cpu-any-size-matmul"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return the kernel as a schedule of nothing more to do, None for any other function."""
        sch, limits = Schedule(func), cpu_limits(target)
        blocks = list_blocks(sch)
        products = [block for block in blocks if not block.is_spatial]
        if len(products) != 1 or not all(is_canonical(sch, block) for block in blocks):
            return None
        inline_spatial(sch)
        blocks = list_blocks(sch)
        product = next(block for block in blocks if not block.is_spatial)
        con = find_matmul(product)
        epilogue = None if con is None else find_epilogue(sch, con)
        if con is None or len(blocks) != (1 if epilogue is None else 2):
            return None
        found = _find(sch.mod["main"], con, None if epilogue is None else block_facts(sch, epilogue), limits)
        return None if found is None else Schedule(tvm.IRModule({"main": ProductKernel(found).build()}))


def _find(func: PrimFunc, con: TiledContraction, epilogue: ScheduledBlock | None, limits: CpuLimits) -> Product | None:
    block = con.block
    operands = (con.left.source, con.right.source)
    symbolic = [axis for axis in (*con.rows, con.column, *con.reduce) if block.extents[axis] is None]
    if not symbolic or len(con.reduce) != 1 or not con.contiguous or block.init is None:
        return None
    if {str(buffer.dtype) for buffer in (*operands, block.store.buffer)} != {"float32"}:
        return None
    # Neither operand is made inside the function, and C is its only result.
    written = written_params(func)
    if any(position_of(func, buffer) is None or position_of(func, buffer) in written for buffer in operands):
        return None
    if [position_of(func, (epilogue or block).store.buffer)] != [*written]:
        return None
    lanes = lanes_of("float32", limits)
    columns = block.extents[con.column]
    vectors = _VECTORS if con.panel is None else con.panel // lanes
    if con.panel is None and columns is not None:
        fitting = [count for count in range(1, _VECTORS_MAX + 1) if columns % (count * lanes) == 0]
        vectors = max(fitting, default=min(_VECTORS, columns // lanes))
    if vectors < 1 or vectors > _VECTORS_MAX or vectors * lanes != (con.panel or vectors * lanes):
        return None
    rows = min(MAX_ROWS, (limits.vector_registers - 1 - vectors) // vectors)
    length = block.extents[con.reduce[0]]
    if limits.l1_bytes is not None and length is not None and length * _ELEMENT_BYTES % _SET_STRIDE_BYTES == 0:
        rows = min(rows, max(1, limits.l1_bytes // _SET_STRIDE_BYTES))
    blocks = 1
    if limits.l2_bytes is not None and length is not None and con.panel is not None:
        most = limits.l2_bytes // _L2_SHARE
        if limits.vector_bytes >= LINE_BYTES:
            most = min(most, limits.l1_bytes or most)
        blocks = -(-length * con.panel * _ELEMENT_BYTES // most)
    group_rows = _GROUP_ROWS_LINE if limits.vector_bytes >= LINE_BYTES else _GROUP_ROWS
    return Product(func, con, epilogue, vectors, lanes, rows, blocks, group_rows)


Values = Mapping[tirx.Var, tirx.Expr]


@dataclass(frozen=True)
class _Step:
    """One block of k for one tile: the block's number, and whether the tile's group is the last of its columns.

    The tile's sums are kept from block to block in `sums`, from `at` on. `place` counts the tiles that read the block;
    the first ones, `fetching` of them, fetch the next one.
    """

    block: tirx.Expr
    last: tirx.Expr
    place: tirx.Expr
    fetching: tirx.Expr
    sums: tirx.Var
    at: tirx.Expr


def _fewer_rows(most: int) -> list[int]:
    """Return rows of tiles for what whole tiles leave, the most first: each takes time to compile."""
    half = most // 2 + 1
    largest = max(most - 2, -(-(most + most // 2) // 2))
    return sorted({*range(largest, half, -2), half, max(1, half // 2)}, reverse=True)


class ProductKernel:
    """Writes the loops of a product."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._last_tiles = _fewer_rows(product.rows)
        #: Those of the kernel being written, by those of the function.
        self.buffers: Buffers = {}

    def build(self) -> PrimFunc:
        """Return the kernel with the parameters and attributes of its function."""
        return build_function(self._product.func, self._emit)

    def _emit(self, buffers: Buffers) -> None:
        columns, width = self._product.columns, self._product.width
        self.buffers = buffers
        if isinstance(columns, int):
            self._share(-(-columns // width), self._tile_of_columns)
            return
        with T.If(columns >= width):
            with T.Then():
                self._share(tirx.floordiv(columns + (width - 1), width), self._tile_of_columns)
            with T.Else():
                self._share(1, self._few_columns)

    def _share(self, tiles: Size, body: Callable[[Values, tirx.Expr], None]) -> None:
        """Run a body for each place of the batch axes and each tile of columns."""
        con, block = self._product.con, self._product.block

        def job(found: list[tirx.Expr]) -> None:
            *batch, tile = found
            body({block.axes[axis]: place for axis, place in zip(con.batch, batch, strict=True)}, tile)

        share_jobs([*(block.sizes[axis] for axis in con.batch), tiles], job)

    def _tile_of_columns(self, values: Values, tile: tirx.Expr) -> None:
        product = self._product
        columns, width = product.columns, product.width
        # A panel begins where it begins; its last columns may be no columns of C.
        begin = tile * width if product.con.panel is not None else tirx.min(tile * width, columns - width)
        start = T.Bind(begin)
        self._rows(values, start)

    def _rows(self, values: Values, start: tirx.Expr) -> None:
        """Compute all rows of a tile of columns, a group of tiles after another."""
        product = self._product
        most, fewer = product.rows, self._last_tiles
        rows = unfolded(wide(math.prod(product.block.sizes[axis] for axis in product.con.rows)))
        # What is left of the last whole tile is a tile, or shares its rows with it.
        spare = max(0, most - 1 - fewer[0])
        over = T.Bind(rows % most)
        few = tirx.all(over > 0, over <= most // 2, rows > most)
        whole = unfolded((rows + spare) // most - tirx.Select(few, wide(1), wide(0)))
        left = T.Bind(tirx.max(rows - whole * most, wide(0)))
        tiles = T.Bind((left + (most - 1)) // most)
        each = unfolded((left + (tiles - 1)) // tirx.max(tiles, wide(1)))
        count = unfolded(whole + tiles)
        size = 1 if product.blocks == 1 else product.group_rows // most
        with T.serial(0, (count + (size - 1)) // size) as group:
            sums = row_buffer(size * most * product.width)
            here = unfolded(tirx.min(wide(size), count - group * size))
            ends = (group + 1) * size >= count

            def tile(place: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
                number = unfolded(group * size + place)
                return number, unfolded(number * most - tirx.max(number - whole, wide(0)) * (most - each))

            with T.serial(0, product.blocks) as block, T.serial(0, here) as place:
                number, first = tile(place)
                turn, readers = (number, count) if product.blocks == 1 else (place, here)
                fetching = unfolded(tirx.min(readers, wide(_FETCHING)))
                step = _Step(block, ends, turn, fetching, sums, place * (most * product.width))
                with T.If(number < whole):
                    with T.Then():
                        self._whole_tile(values, start, [tirx.min(first + row, rows - 1) for row in range(most)], step)
                    with T.Else():
                        for rest, least in zip(fewer, [*fewer[1:], 0], strict=True):
                            with T.If(tirx.all(each > least, each <= rest)), T.Then():
                                places_of_rows = [tirx.min(first + row, rows - 1) for row in range(rest)]
                                self._multiply(values, start, places_of_rows, step)
            with T.serial(0, here) as place:
                number, first = tile(place)
                with T.serial(0, unfolded(tirx.Select(number < whole, wide(most), each))) as row:
                    known = {**values, **self._row(T.Bind(tirx.min(first + row, rows - 1)))}
                    self._finish(known, start, sums, (place * most + row) * product.width)

    def _whole_tile(self, values: Values, start: tirx.Expr, rows: list[tirx.Expr], step: _Step) -> None:
        """Multiply a tile of the most rows, with code of its own for the tiles that fetch nothing."""
        if self._product.con.panel is None:
            self._multiply(values, start, rows, step)
            return
        with T.If(step.place < step.fetching):
            with T.Then():
                self._multiply(values, start, rows, step)
            with T.Else():
                self._multiply(values, start, rows, step, fetch=False)

    def _multiply(
        self, values: Values, start: tirx.Expr, rows: list[tirx.Expr], step: _Step, *, fetch: bool = True
    ) -> None:
        """Add the products of one block of k to the sums of some rows."""
        product, con = self._product, self._product.con
        lanes, vectors = product.lanes, product.vectors
        column, reduced = product.block.axes[con.column], product.block.axes[con.reduce[0]]
        # A buffer a row: TVM puts up to 1 KiB on the stack, where LLVM makes registers of it.
        sums = [row_buffer(product.width) for _ in rows]
        places_of_rows = [self._row(row) for row in rows]

        def each(body: Callable[[int, tirx.Expr], None]) -> None:
            for row in range(len(rows)):
                for vector in range(vectors):
                    with T.vectorized(0, lanes) as lane:
                        body(row, vector * lanes + lane)

        def clear() -> None:
            each(lambda row, at: T.buffer_store(sums[row], tirx.FloatImm("float32", 0.0), [at]))

        begin, size = wide(0), wide(product.block.sizes[con.reduce[0]])
        if product.blocks == 1:
            clear()
        else:
            begin = unfolded(step.block * product.block_length)
            size = unfolded(tirx.min(wide(product.block_length), size - begin))
            with T.If(step.block == 0):
                with T.Then():
                    clear()
                with T.Else():
                    each(lambda row, at: T.buffer_store(sums[row], step.sums[step.at + row * product.width + at], [at]))
        line = self._next_block(start, begin, size, step) if fetch and con.panel is not None else None
        with T.serial(0, size) as k:
            known = {**values, reduced: begin + k}

            def multiply(row: int, at: tirx.Expr) -> None:
                here = {**known, **places_of_rows[row], column: start + wide(at)}
                term = self.load(con.left, here) * self.load(con.right, here)
                T.buffer_store(sums[row], sums[row][at] + term, [at])

            each(multiply)
            if line is not None:
                place = T.address_of(line(k))
                T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", place, *map(T.int32, _PREFETCH)))
        each(lambda row, at: T.buffer_store(step.sums, sums[row][at], [step.at + row * product.width + at]))

    def _next_block(
        self, start: tirx.Expr, begin: tirx.Expr, size: tirx.Expr, step: _Step
    ) -> Callable[[tirx.Expr], tirx.Expr]:
        """Return the element of the next block to fetch at a step of k: each tile's share is contiguous."""
        product = self._product
        ends = step.block == product.blocks - 1
        leaves = ends if product.blocks == 1 else tirx.all(ends, step.last)
        panel = unfolded(start // product.width + tirx.Select(leaves, wide(1), wide(0)))
        first = unfolded(tirx.Select(ends, wide(0), begin + product.block_length))
        stride = unfolded((product.width + (step.fetching - 1)) // step.fetching)
        share = unfolded(step.place % step.fetching * size * stride)
        return lambda k: self.buffers[product.con.right.source][panel, first, share + k * stride]

    def _finish(self, values: Values, start: tirx.Expr, sums: tirx.Var, at: tirx.Expr) -> None:
        """Store the epilogue of one row, whose sums begin at a place of their buffer."""
        lanes, column = self._product.lanes, self._product.block.axes[self._product.con.column]

        def finish(vector: tirx.Expr | int, lane: tirx.Expr) -> None:
            offset = vector * lanes + lane
            self.store(sums[at + offset], {**values, column: start + offset})

        self._columns_of_tile(start, finish)

    def _columns_of_tile(self, start: tirx.Expr, finish: Callable[[tirx.Expr | int, tirx.Expr], None]) -> None:
        """Run a body for the columns of a tile that are columns of C."""
        product = self._product

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

    def _few_columns(self, values: Values, _tile: tirx.Expr) -> None:
        """Compute row after row, for fewer columns than a tile has."""
        product, con = self._product, self._product.con
        column, reduced = product.block.axes[con.column], product.block.axes[con.reduce[0]]
        rows = T.Bind(wide(math.prod(product.block.sizes[axis] for axis in con.rows)))
        with T.serial(0, rows) as number:
            acc = row_buffer(product.width)
            place = {**values, **self._row(number)}
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

    def load(self, load: TensorLoad, values: Values) -> tirx.Expr:
        """Return what a load reads at a place."""
        return self.buffers[load.source][tuple(substitute(index, values) for index in load.indices)]

    def store(self, total: tirx.Expr, values: Values) -> None:
        """Store the epilogue of a sum at a place, given as values of the product's axes."""
        product = self._product
        if product.epilogue is None:
            store, value = product.block.store, total
            at = values
        else:
            # The epilogue walks the sums in their order.
            at = {own: values[axis] for own, axis in zip(product.epilogue.axes, product.block.spatial, strict=True)}
            store = product.epilogue.store
            sums = product.block.store.buffer

            def replaced(load: TensorLoad) -> tirx.Expr:
                return total if load.source.same_as(sums) else self.load(load, {})

            value = tvm_ffi.structural_map(substitute(store.value, at), (TensorLoad, replaced))
        indices = [substitute(index, at) for index in store.indices]
        T.buffer_store(self.buffers[store.buffer], value, indices)
