"""Attention of symbolic lengths on a CPU: no score leaves the first two caches.

    S[b..., m, n] = epilogue(sum over d of Q[b..., m, d] * K[b..., d, n])
    P[b..., m, :] = softmax(S[b..., m, :])
    O[b..., m, e] = epilogue(sum over n of P[b..., m, n] * V[b..., n, e])

`e` has a static size of whole vectors; epilogues scale, mask, transpose.

    parallel b..., row tile           all tiles have the same number of rows: the last one begins early enough
      scores[rows, n]                 rows are a little longer than n, so that they do not share sets of the cache
      column tile of S:  rows x vectors in registers over d; stored to scores
      row:               epilogue and softmax, in scores
      column tile of O:  rows x vectors in registers over n; then its epilogue

A row tile that is not full runs through code for a few rows more, whose last rows are repeated and then ignored.
Fewer columns of S than a vector run through a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc
from tvm.tirx.script import builder as T

from relaxtune.schedules.cpu.any_size.emit import (
    Buffers,
    KeptRow,
    build_function,
    row_buffer,
    share_jobs,
    unfolded,
    wide,
)
from relaxtune.schedules.cpu.any_size.matmul import ProductKernel, Values
from relaxtune.schedules.cpu.any_size.product import Product
from relaxtune.schedules.cpu.any_size.rows import Rows, RowsKernel
from relaxtune.schedules.cpu.base import CpuRule, cpu_limits, inline_spatial
from relaxtune.schedules.cpu.contraction import MAX_ROWS, TiledContraction, lanes_of
from relaxtune.schedules.cpu.matmul import find_matmul
from relaxtune.schedules.cpu.tiling import find_epilogue
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.blocks import position_of, same_sizes
from relaxtune.schedules.tir.contraction import are_axes
from relaxtune.schedules.tir.expressions import list_loads
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock, block_facts, is_canonical, list_blocks

_VECTORS = 2


class AnySizeAttention(CpuRule):
    """Functions of two float32 matmuls with a softmax, or another walk of rows, between them."""

    name = "cpu-any-size-attention"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return the kernel as a schedule of nothing more to do, None for any other function."""
        found = _find(Schedule(func), cpu_limits(target))
        return None if found is None else Schedule(tvm.IRModule({"main": _Kernel(found).build()}))


@dataclass(frozen=True)
class _Attention:
    """A function to make: S = Q K, what happens to a row of it, O = P V; `rows` of a tile at most.

    `kept` are the tensors whose row is in the cache, one after another. `places` has, for each batch axis of S, the
    position of the same axis in the second product, None where that has none (size 1).
    """

    func: PrimFunc
    first: Product
    walk: Rows
    second: Product
    kept: tuple[tirx.Var, ...]
    places: tuple[int | None, ...]
    rows: int

    @property
    def queries(self) -> Size:
        """Rows of S and of O."""
        return self.first.block.sizes[self.first.con.rows[0]]

    @property
    def keys(self) -> Size:
        """Columns of S."""
        return self.first.block.sizes[self.first.con.column]


def _find(sch: Schedule, limits: CpuLimits) -> _Attention | None:
    blocks = list_blocks(sch)
    if not all(is_canonical(sch, block) for block in blocks):
        return None
    if [find_matmul(block) is not None for block in blocks if not block.is_spatial].count(True) != 2:
        return None
    inline_spatial(sch, keep=_around_the_walk(blocks))
    blocks = list_blocks(sch)
    products = [place for place, block in enumerate(blocks) if find_matmul(block) is not None]
    if len(products) != 2 or products[0] != 0 or len(blocks) - products[1] > 2:
        return None
    first, second = (find_matmul(blocks[place]) for place in products)
    if first is None or second is None:
        return None
    epilogue = find_epilogue(sch, second)
    last = None if epilogue is None else block_facts(sch, epilogue)
    if len(blocks) - products[1] != (1 if last is None else 2):
        return None
    func, walk = sch.mod["main"], blocks[1 : products[1]]
    lanes = lanes_of("float32", limits)
    width = second.block.extents[second.column]
    if not _is_scores(func, first) or width is None or width % lanes or limits.vector_registers <= 2 * _VECTORS:
        return None
    kept, numbers = _kept_in_row(walk, first.block)
    if not kept or position_of(func, (last or second.block).store.buffer) is None:
        return None
    places = _places(func, first, second, kept[-1])
    if places is None:
        return None
    vectors = _VECTORS if width % (_VECTORS * lanes) == 0 else 1
    rows = min(MAX_ROWS, (limits.vector_registers - 1 - _VECTORS) // _VECTORS)
    sizes = first.block.sizes
    return _Attention(
        func,
        Product(func, first, None, _VECTORS, lanes, rows, 1),
        Rows(func, tuple(walk), sizes[: first.column], sizes[first.column], numbers, None, lanes),
        Product(func, second, last, vectors, lanes, rows, 1),
        kept,
        places,
        rows,
    )


def _around_the_walk(blocks: Sequence[ScheduledBlock]) -> list[str]:
    """Return the blocks whose results are read by a walk of rows, and by what multiplies these: not to be inlined."""
    reductions = [block for block in blocks if not block.is_spatial]
    read = [load.source for block in reductions[1:] for load in list_loads(block.store.value)]
    return [
        block.name
        for block in blocks
        if block.is_spatial and any(source.same_as(block.store.buffer) for source in read)
    ]


def _is_scores(func: PrimFunc, con: TiledContraction) -> bool:
    """Whether a product is of two parameters, with one axis of rows before symbolic columns."""
    block, axes = con.block, len(con.block.spatial)
    return (
        _is_float(con)
        and all(position_of(func, load.source) is not None for load in (con.left, con.right))
        and len(con.reduce) == 1
        and con.contiguous
        and con.panel is None
        and con.rows == (axes - 2,)
        and con.column == axes - 1
        and block.extents[con.column] is None
    )


def _places(
    func: PrimFunc, first: TiledContraction, second: TiledContraction, weights: tirx.Var
) -> tuple[int | None, ...] | None:
    """Return `places` where the second product multiplies rows of the weights by a parameter, None elsewhere."""
    block, left = second.block, second.left
    plain = _is_float(second) and len(second.reduce) == 1 and second.contiguous and second.panel is None
    if not plain or not left.source.same_as(weights) or position_of(func, second.right.source) is None:
        return None
    *batch, row, column = left.indices
    if len(second.rows) != 1 or not are_axes([row, column], [block.axes[second.rows[0]], *block.reduced]):
        return None
    if not same_sizes([first.block.sizes[first.column]], [block.sizes[second.reduce[0]]]):
        return None
    found: list[int | None] = []
    for place, index in enumerate(batch):
        axis = next((axis for axis in second.batch if block.axes[axis].same_as(index)), None)
        if axis is None and first.block.extents[place] != 1:
            return None
        found.append(axis)
    others = [axis for axis in second.batch if axis not in found]
    distinct = len({axis for axis in found if axis is not None}) == sum(axis is not None for axis in found)
    return tuple(found) if distinct and all(block.extents[axis] == 1 for axis in others) else None


def _is_float(con: TiledContraction) -> bool:
    buffers = (con.left.source, con.right.source, con.block.store.buffer)
    return con.block.init is not None and {str(buffer.dtype) for buffer in buffers} == {"float32"}


def _kept_in_row(
    walk: Sequence[ScheduledBlock], scores: ScheduledBlock
) -> tuple[tuple[tirx.Var, ...], tuple[tirx.Var, ...]]:
    """Return the tensors as wide as S, each of which may take the place of the one before, and those of a number a row.

    Both are empty where a row of S has to be read after another one took its place, or away from its own place.
    """
    width, rows, columns = len(scores.spatial), scores.sizes[: len(scores.spatial) - 1], scores.sizes[-2]
    kept, numbers = [scores.store.buffer], list[tirx.Var]()
    for block in walk:
        loads, store, wide_axes = list_loads(block.store.value), block.store, len(block.axes) == width
        sizes = block.sizes
        ends_in_rows = same_sizes(sizes[: width - 1], rows)
        if str(store.buffer.dtype) != "float32" or not ends_in_rows or not are_axes(store.indices, block.spatial):
            return (), ()
        if wide_axes and not same_sizes(sizes[width - 1 :], [columns]):
            return (), ()
        if block.kinds not in ("S" * width, "S" * (width - 1) + "R", "S" * (width - 1)):
            return (), ()
        # What may be read of the tensors made here: the latest row, at its own place, and numbers of this row.
        readable = [(kept[-1], block.axes), *((number, block.axes[: width - 1]) for number in numbers)]
        for load in loads:
            axes = next((axes for one, axes in readable if load.source.same_as(one)), None)
            if axes is None and any(load.source.same_as(one) for one in kept):
                return (), ()
            if axes is not None and not are_axes(load.indices, axes):
                return (), ()
        if block.is_spatial and wide_axes:
            kept.append(store.buffer)
        else:
            numbers.append(store.buffer)
    return tuple(kept), tuple(numbers)


class _Kernel:
    def __init__(self, attention: _Attention) -> None:
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
        self._first.buffers = self._second.buffers = self._buffers = buffers
        block, con = found.first.block, found.first.con
        queries = wide(found.queries)
        tiles = (queries + (found.rows - 1)) // found.rows

        def job(number: list[tirx.Expr]) -> None:
            *batch, tile = number
            rows = unfolded((queries + (tiles - 1)) // tiles)
            begin = unfolded(tirx.min(tile * rows, queries - rows))
            self._tile(batch, begin, rows)

        share_jobs([*(block.sizes[axis] for axis in con.batch), tiles], job)

    def _tile(self, batch: list[tirx.Expr], begin: tirx.Expr, rows: tirx.Expr) -> None:
        """Make the rows of one tile, from `begin` on."""
        found = self._attention
        lanes, keys = found.first.lanes, wide(found.keys)
        size = keys + 2 * lanes
        scores = T.alloc_buffer([found.rows * size], "float32", scope="global")
        length = unfolded(size // lanes * lanes)
        self._scores(batch, begin, rows, scores, length)
        with T.serial(0, rows) as row:
            kept = KeptRow(scores, unfolded(row * length))
            at = [*batch, T.Bind(begin + row)]
            self._walk.make_row(at, {**self._buffers, **dict.fromkeys(found.kept, kept)})
        self._weigh(batch, begin, rows, scores, length)

    def _scores(
        self, batch: list[tirx.Expr], begin: tirx.Expr, rows: tirx.Expr, scores: tirx.Var, length: tirx.Expr
    ) -> None:
        """Store sums of Q and K."""
        found = self._attention
        product, keys = found.first, wide(found.keys)
        block, con = product.block, product.con
        values = dict(zip(block.axes, batch, strict=False))
        last = wide(found.queries) - 1

        def tiles_of(vectors: int, counts: Sequence[int]) -> None:
            width = vectors * product.lanes

            def tile(count: int) -> None:
                places = [T.Bind(tirx.min(begin + row, last)) for row in range(count)]
                with T.serial(0, (keys + (width - 1)) // width) as number:
                    start = unfolded(tirx.min(number * width, keys - width))

                    def term(row: int, at: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
                        here = {**values, block.axes[con.rows[0]]: places[row], block.axes[con.reduce[0]]: k}
                        return self._product_of(self._first, {**here, block.axes[con.column]: start + at})

                    def keep(row: int, at: tirx.Expr, total: tirx.Expr) -> None:
                        T.buffer_store(scores, total, [row * length + start + at])

                    self._multiply((count, vectors), wide(block.sizes[con.reduce[0]]), term, keep)

            self._by_rows(rows, tile, counts)

        def one_by_one() -> None:
            with T.serial(0, rows) as row, T.serial(0, keys) as column:
                total = row_buffer(1)
                T.buffer_store(total, tirx.FloatImm("float32", 0.0), [0])
                here = {**values, block.axes[con.rows[0]]: begin + row, block.axes[con.column]: column}
                with T.serial(0, wide(block.sizes[con.reduce[0]])) as k:
                    term = self._product_of(self._first, {**here, block.axes[con.reduce[0]]: k})
                    T.buffer_store(total, total[0] + term, [0])
                T.buffer_store(scores, total[0], [row * length + column])

        with T.If(keys >= _VECTORS * product.lanes):
            with T.Then():
                tiles_of(_VECTORS, self._counts)
            with T.Else(), T.If(keys >= product.lanes):
                with T.Then():
                    tiles_of(1, self._counts[::2])
                with T.Else():
                    one_by_one()

    def _weigh(
        self, batch: list[tirx.Expr], begin: tirx.Expr, rows: tirx.Expr, scores: tirx.Var, length: tirx.Expr
    ) -> None:
        """Store the epilogue of sums of P and V."""
        found = self._attention
        product = found.second
        block, con, width = product.block, product.con, product.width
        values: dict[tirx.Var, tirx.Expr] = {block.axes[axis]: wide(0) for axis in con.batch}
        for axis, place in zip(found.places, batch, strict=True):
            if axis is not None:
                values[block.axes[axis]] = place
        columns = block.extents[con.column]
        assert columns is not None

        def tile(count: int) -> None:
            with T.serial(0, columns // width) as number:
                sums = row_buffer(count * width)

                def term(row: int, at: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
                    here = {**values, block.axes[con.reduce[0]]: k, block.axes[con.column]: number * width + at}
                    return scores[row * length + k] * self._second.load(con.right, here)

                def keep(row: int, at: tirx.Expr, total: tirx.Expr) -> None:
                    T.buffer_store(sums, total, [row * width + at])

                self._multiply((count, product.vectors), wide(found.keys), term, keep)
                with T.serial(0, rows) as row:
                    here = {**values, block.axes[con.rows[0]]: T.Bind(begin + row)}
                    with T.serial(0, product.vectors) as vector, T.vectorized(0, product.lanes) as lane:
                        at = vector * product.lanes + lane
                        place = {**here, block.axes[con.column]: number * width + at}
                        self._second.store(sums[row * width + at], place)

        self._by_rows(rows, tile, self._counts)

    def _by_rows(self, rows: tirx.Expr, tile: Callable[[int], None], counts: Sequence[int]) -> None:
        """Run the code of the fewest rows that are enough; each takes time to compile."""
        for count, least in zip(counts, [*counts[1:], 0], strict=True):
            with T.If(tirx.all(rows > least, rows <= count)), T.Then():
                tile(count)

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
