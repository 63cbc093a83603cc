"""Products of many rows on a core's tile unit (Intel AMX): each float32 is a sum of three bfloat16.

A float32 has 24 bits of significand, a bfloat16 8: cut off from the left, the three parts of x add up to x exactly.

    x = high + middle + low        |middle| < 2^-7 |x|,  |low| < 2^-15 |x|

Of the nine products of the parts of two numbers six are computed. The others, middle times low and smaller, are less
than 2^-21 of the product, and less than rounding a float32 sum loses: on sums of 768 and 3,072 products the errors are
0.4 of those of float32 multiply-adds. Sums are kept in float32 by the unit, which takes subnormal numbers as zero
(Intel SDM volume 2, TDPBF16PS); an infinity may make its sums NaN.

The unit multiplies 16 x 32 by 32 x 16 elements in 16 cycles, sixteen times what multiply-adds of 512 bits do in that
time; by six products, 2.7 times as much. Its operands lie in tiles of 1 KiB:

    as many rows as keep the cores busy
      parallel tile of 16 rows         left[tile, step, part, row, 32]
      parallel group of rows, job of panels
        part of k                      its rows of `left` stay in the second cache
          panel                        right[step, part, vector, 16, (k, k + 1) of 16 columns], read by all rows
            pair of tiles, 32 rows     2 x 2 tiles of sums
              step of 32               24 products of tiles; beside them, a share of the next block of `right` is cut
              epilogue of the rows     after the last part

On two cores of a Xeon with AVX-512 and AMX, the matmuls of a layer of BERT-base, weights from memory, take 0.73 of the
time of the loops of vectors with 128 rows, and 0.63 with 256 and 512. The model takes 0.97 of the time with 80 rows,
0.91 with 96, 0.70 with 256; with 64 and 72 it would take 1.06 and 1.08.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.cpu.any_size.emit import INTO_SECOND, prefetch, row_buffer, share_jobs, unfolded, wide
from relaxtune.schedules.cpu.any_size.product import Product

# Elements of a side of a tile of sums, steps of k that one product takes, and parts of a number.
_SIDE, _STEP, _PARTS = 16, 32, 3
# Rows of a pair of tiles, and elements of a tile of bfloat16.
_PAIR, _TILE = 2 * _SIDE, _SIDE * _STEP
# Which parts of the left and the right operand are multiplied, the least products first; each differs from the one
# before in one operand.
_PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (0, 0), (2, 0))
# Tile registers: four of sums, two of each operand.
_LEFT, _RIGHT = 4, 6
# Pairs of a group at most, and at least where cores would else have no job; panels of a job at most. A group's rows of
# one part of k, and two blocks of a panel, take half of the second cache: of a quarter to three, all are within 5 %.
_PAIRS_MAX, _PAIRS_MIN, _PANELS_MAX, _L2_SHARE = 16, 2, 16, 2
# arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA) of Linux on x86-64: 0 where the process may use tiles.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
# What ldtilecfg reads, in words: palette 1; of each of eight tiles, 64 bytes a row and 16 rows.
_CONFIG = (1, 0, 0, 0, *[0x00400040] * 4, 0, 0, 0, 0, *[0x10101010] * 2, 0, 0)

# Where few rows hide little of the time that weights take to come from memory, so that each step cuts so many pairs of
# them, those of as many rows ahead are fetched: on two cores, 0.93 of the time with 64 and 96 rows, 0.96 with 128. With
# 256 it would be 1.04.
_FETCHED_FROM, _ROWS_AHEAD = 4, 256
# With fewer rows, cutting the weights costs more than the unit saves.
_ROWS_LEAST = 80

Values = Mapping[tirx.Var, tirx.Expr]


def has_tile_kernel(product: Product) -> bool:
    """Whether a product has a kernel for the tile unit: packed weights, whole steps of k, a batch of one."""
    con, block = product.con, product.block
    if product.tiles_l2_bytes == 0 or con.panel is None or any(block.extents[axis] != 1 for axis in con.batch):
        return False
    length = block.sizes[con.reduce[0]]
    whole = isinstance(length, int) and length % _STEP == 0 and product.width % _SIDE == 0
    return whole and isinstance(product.columns, int)


def fills_tiles(product: Product) -> bool:
    """Whether a product of known rows is computed on the tile unit."""
    rows = math.prod(product.block.sizes[axis] for axis in product.con.rows)
    return isinstance(rows, int) and rows >= _ROWS_LEAST and has_tile_kernel(product)


def is_worth_tiles(rows: tirx.Expr) -> tirx.Expr:
    """Return whether a number of rows is computed on the tile unit, which the system must let the process use."""
    numbers = (tirx.IntImm("int64", number) for number in (_ARCH_PRCTL, _REQUEST, _TILE_DATA))
    allowed = T.call_extern("int64", "syscall", *numbers) == 0
    return tirx.if_then_else(rows >= _ROWS_LEAST, allowed, tirx.const(False, "bool"))


@dataclass(frozen=True)
class _Job:
    """Pairs of tiles from a first one on, panels, and the parts of k: how many, and of how many steps.

    The left operand's parts are there from the pair `left_begins` on. The sums of at most `kept` pairs are kept at a
    time. TVM allocates what a job needs before it does anything, so that sizes of buffers are known before the jobs are
    shared.
    """

    left_begins: tirx.Expr
    first_pair: tirx.Expr
    pairs: tirx.Expr
    first_panel: tirx.Expr
    panels: tirx.Expr
    parts: tirx.Expr
    steps: tirx.Expr
    kept: tirx.Expr


@dataclass(frozen=True)
class _Block:
    """A part of k of one panel, from a step on: its parts of numbers lie in a buffer from `at` on."""

    buffer: tirx.Var
    at: tirx.Expr
    panel: tirx.Expr
    part: tirx.Expr
    begin: tirx.Expr
    steps: tirx.Expr


class TileKernel:
    """Writes the loops of a product for the tile unit.

    `load_left` and `load_right` return an element of an operand, of a row by its number, and of a column of a panel;
    `finish` stores the epilogue of a row, by its number, of a panel's first column and the sums from a place on.
    """

    def __init__(
        self,
        product: Product,
        rows: tirx.Expr,
        load_left: Callable[[tirx.Expr, tirx.Expr], tirx.Expr],
        load_right: Callable[[tirx.Expr, tirx.Expr, tirx.Expr], tirx.Expr],
        finish: Callable[[tirx.Expr, tirx.Expr, tirx.Var, tirx.Expr], None],
    ) -> None:
        self._product = product
        self._rows = rows
        self._load_left, self._load_right, self._finish = load_left, load_right, finish
        self._length = int(product.block.sizes[product.con.reduce[0]])
        self._steps = self._length // _STEP
        self._vectors = product.width // _SIDE

    def emit(self) -> None:
        """Write the kernel."""
        product, cores = self._product, self._product.cut.cores
        panels = -(-int(product.columns) // product.width)
        share = -(-panels // cores)
        panels_of_job = -(-share // -(-share // _PANELS_MAX))
        jobs = -(-panels // panels_of_job)
        # So many pairs of tiles are computed at once: each core has a job.
        groups_max = -(-cores // jobs)
        most = groups_max * _PAIRS_MAX
        # Buffers' sizes are expressions of the function's sizes: see `_Job`.
        tiles = tirx.min((product.row_count + (_SIDE - 1)) // _SIDE, wide(most * 2))
        left = T.alloc_buffer([tiles * (self._steps * _PARTS * _TILE)], "uint16", scope="global")
        pairs = T.Bind(unfolded((self._rows + (_PAIR - 1)) // _PAIR))
        spans = T.Bind(unfolded((pairs + (most - 1)) // most))
        at_once = T.Bind(unfolded((pairs + (spans - 1)) // spans))
        wanted = tirx.min(wide(groups_max), at_once // _PAIRS_MIN)
        groups = T.Bind(unfolded(tirx.max((at_once + (_PAIRS_MAX - 1)) // _PAIRS_MAX, wanted)))
        size = T.Bind(unfolded((at_once + (groups - 1)) // groups))
        bytes_of_step = (size * _PAIR + 2 * product.width) * (_STEP * _PARTS * 2)
        fitting = tirx.max(product.tiles_l2_bytes // _L2_SHARE // bytes_of_step, wide(1))
        parts = T.Bind(unfolded((self._steps + (fitting - 1)) // fitting))
        steps = T.Bind(unfolded((self._steps + (parts - 1)) // parts))
        kept = T.Bind(unfolded(tirx.Select(parts > 1, size * panels_of_job, wide(1))))
        with T.serial(0, spans) as span:
            begin = T.Bind(unfolded(span * at_once))
            end = T.Bind(unfolded(tirx.min(begin + at_once, pairs)))
            first_row = T.Bind(begin * _PAIR)
            count = T.Bind(unfolded(tirx.min((end - begin) * 2, (self._rows - first_row + (_SIDE - 1)) // _SIDE)))
            share_jobs([count], lambda place: self._cut_left(left, first_row, place[0]))

            def job(place: list[tirx.Expr]) -> None:
                group, number = place
                first = T.Bind(unfolded(begin + group * size))
                here = T.Bind(unfolded(tirx.max(tirx.min(size, end - first), wide(0))))
                panel = T.Bind(number * panels_of_job)
                count = T.Bind(tirx.min(wide(panels_of_job), panels - panel))
                self._job(left, _Job(begin, first, here, panel, count, parts, steps, kept))

            share_jobs([groups, jobs], job)

    def _cut_left(self, left: tirx.Var, first_row: tirx.Expr, tile: tirx.Expr) -> None:
        """Cut 16 rows of the left operand into parts; what is past the last row is that row again."""
        with T.serial(0, wide(_SIDE)) as row:
            number = T.Bind(tirx.min(first_row + tile * _SIDE + row, self._rows - 1))
            with T.serial(0, wide(self._steps * 2)) as half:
                bits = _cut(lambda lane: self._load_left(number, half * _SIDE + lane))
                at = ((tile * self._steps + half // 2) * _PARTS * _SIDE + row) * _STEP + half % 2 * _SIDE
                for part in range(_PARTS):
                    with T.vectorized(0, _SIDE) as lane:
                        value = (bits[part * _SIDE + lane] >> 16).astype("uint16")
                        T.buffer_store(left, value, [at + part * _TILE + lane])

    def _cut_rows(self, block: _Block, number: tirx.Expr, fetch: tirx.Expr) -> None:
        """Cut two rows of a block of weights into parts; each word of the result is of both."""
        k = block.begin * _STEP + number * 2
        with T.If(fetch), T.Then():
            for vector in range(self._vectors * 2):
                prefetch(self._load_right(block.panel, k + _ROWS_AHEAD, vector * _SIDE), INTO_SECOND)
        for vector in range(self._vectors):
            even, odd = (self._cut_weights(block.panel, row, vector) for row in (k, k + 1))
            at = block.at + ((number // _SIDE * _PARTS * self._vectors + vector) * _SIDE + number % _SIDE) * _SIDE
            for part in range(_PARTS):
                with T.vectorized(0, _SIDE) as lane:
                    word = (even[part * _SIDE + lane] >> 16) | odd[part * _SIDE + lane]
                    T.buffer_store(block.buffer, word, [at + part * self._vectors * _SIDE * _SIDE + lane])

    def _cut_weights(self, panel: tirx.Expr, k: tirx.Expr, vector: int) -> tirx.Var:
        return _cut(lambda lane: self._load_right(panel, k, vector * _SIDE + lane))

    def _job(self, left: tirx.Var, job: _Job) -> None:
        """Compute a group's rows of a job's panels."""
        width = self._product.width
        config = T.alloc_buffer([len(_CONFIG)], "int32", scope="global")
        for place, word in enumerate(_CONFIG):
            T.buffer_store(config, T.int32(word), [place])
        _call("ldtilecfg", T.address_of(config[0]))
        size = job.steps * (_PARTS * self._vectors * _SIDE * _SIDE)
        right = T.alloc_buffer([size * 2], "uint32", scope="global")
        sums = T.alloc_buffer([job.kept * (_PAIR * width)], "float32", scope="global")

        def block(number: tirx.Expr) -> _Block:
            part = unfolded(number // job.panels)
            begin = T.Bind(part * job.steps)
            steps = tirx.max(tirx.min(job.steps, self._steps - begin), wide(0))
            panel = job.first_panel + unfolded(number % job.panels)
            return _Block(right, unfolded(number % 2 * size), T.Bind(panel), part, begin, T.Bind(unfolded(steps)))

        first = block(wide(0))
        with T.serial(0, first.steps * (_STEP // 2)) as number:
            self._cut_rows(first, number, tirx.const(True, "bool"))
        with T.serial(0, job.parts * job.panels) as turn:
            here, following = block(turn), block(turn + 1)
            spread = T.Bind(unfolded(tirx.max(job.pairs * here.steps, wide(1))))
            share = T.Bind(unfolded((following.steps * (_STEP // 2) + (spread - 1)) // spread))
            with T.serial(0, job.pairs) as place:
                number = tirx.Select(job.parts > 1, unfolded(turn % job.panels) * job.pairs + place, wide(0))
                at = T.Bind(unfolded(number * (_PAIR * width)))

                def cut_share(step: tirx.Expr) -> None:
                    begin = T.Bind(unfolded((place * here.steps + step) * share))
                    rest = tirx.max(following.steps * (_STEP // 2) - begin, wide(0))
                    with T.serial(0, unfolded(tirx.min(share, rest))) as number:
                        self._cut_rows(following, begin + number, share >= _FETCHED_FROM)

                pair = T.Bind(job.first_pair + place)
                rows = T.Bind(tirx.min(self._rows - pair * _PAIR, wide(_PAIR)))
                self._pair(left, here, sums, (pair - job.left_begins, at), rows, cut_share)
                with T.If(here.part == job.parts - 1), T.Then(), T.serial(0, rows) as row:
                    self._finish(pair * _PAIR + row, here.panel * width, sums, at + row * width)
        _call("tilerelease")

    def _pair(
        self,
        left: tirx.Var,
        block: _Block,
        sums: tirx.Var,
        of: tuple[tirx.Expr, tirx.Expr],
        rows: tirx.Expr,
        beside: Callable[[tirx.Expr], None],
    ) -> None:
        """Add the products of a block to the sums of a pair of tiles, or of one where there are few rows.

        `of` is the pair's place in `left`, and that of its sums; `beside` is done once at each step.
        """

        def vectors(tiles: int) -> None:
            for first in range(0, self._vectors, 2):
                shape = (tiles, min(2, self._vectors - first))
                self._multiply(left, block, sums, (*of, first), shape, beside if first == 0 else None)

        with T.If(rows > _SIDE):
            with T.Then():
                vectors(2)
            with T.Else():
                vectors(1)

    def _multiply(
        self,
        left: tirx.Var,
        block: _Block,
        sums: tirx.Var,
        of: tuple[tirx.Expr, tirx.Expr, int],
        shape: tuple[int, int],
        beside: Callable[[tirx.Expr], None] | None,
    ) -> None:
        """Add the products of a block to the sums of tiles of rows and vectors of columns, so many as `shape` says.

        `of` is the pair's place in `left`, that of its sums, and the first vector.
        """
        pair, at, first = of
        width = self._product.width
        registers = [(row, column, row * 2 + column) for row in range(shape[0]) for column in range(shape[1])]

        def each_sum(name: str) -> None:
            for row, column, register in registers:
                place = at + row * _SIDE * width + (first + column) * _SIDE
                _call(name, T.int8(register), T.address_of(sums[place]), T.int64(width * 4))

        with T.If(block.part == 0):
            with T.Then():
                for _, _, register in registers:
                    _call("tilezero", T.int8(register))
            with T.Else():
                each_sum("tileloadd64")
        with T.serial(0, block.steps) as step:
            loaded: tuple[int | None, int | None] = (None, None)
            for of_left, of_right in _PRODUCTS:
                if of_left != loaded[0]:
                    for row in range(shape[0]):
                        element = (((pair * 2 + row) * self._steps + block.begin + step) * _PARTS + of_left) * _TILE
                        _call("tileloadd64", T.int8(_LEFT + row), T.address_of(left[element]), T.int64(_STEP * 2))
                if of_right != loaded[1]:
                    for column in range(shape[1]):
                        vector = (step * _PARTS + of_right) * self._vectors + first + column
                        word = T.address_of(block.buffer[block.at + vector * (_SIDE * _SIDE)])
                        _call("tileloadd64", T.int8(_RIGHT + column), word, T.int64(_SIDE * 4))
                loaded = (of_left, of_right)
                for row, column, register in registers:
                    _call("tdpbf16ps", T.int8(register), T.int8(_LEFT + row), T.int8(_RIGHT + column))
            if beside is not None:
                beside(step)
        each_sum("tilestored64")


def _cut(load: Callable[[tirx.Expr], tirx.Expr]) -> tirx.Var:
    """Return the parts of 16 numbers, one after another: the bits of each, the lower half zero."""
    rest = row_buffer(_SIDE)
    parts = T.alloc_buffer([_PARTS * _SIDE], "uint32", scope="global")
    with T.vectorized(0, _SIDE) as lane:
        T.buffer_store(rest, load(lane), [lane])
    for part in range(_PARTS):
        with T.vectorized(0, _SIDE) as lane:
            bits = T.reinterpret("uint32", rest[lane]) & tirx.const(0xFFFF0000, "uint32")
            T.buffer_store(parts, bits, [part * _SIDE + lane])
            T.buffer_store(rest, rest[lane] - T.reinterpret("float32", bits), [lane])
    return parts


def _call(name: str, *arguments: tirx.Expr) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments))
