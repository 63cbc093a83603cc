"""The loops of `windows`: jobs, lines of the output, tiles of positions by channels, registers.

    parallel panels, lines          each core has one part of the lines; panels that a cache holds are inside
      tiles of a line
        acc[positions, vectors] = 0
        window..., channels: acc += D[position] (broadcast, or a vector) * W[vector]
        epilogue on the tile

A tile whose windows all lie inside the line reads the source. Any other first copies what it reads of a line to a
buffer, with padding where there is no source. Windows beyond the first or last line are cut.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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
    load_at,
    places,
    row_buffer,
    share_jobs,
    store_result,
    unfolded,
    wide,
)
from relaxtune.schedules.cpu.any_size.windows import Windows, find_windows
from relaxtune.schedules.cpu.base import cpu_limits, worth_parallel
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.tir.expressions import substitute

Values = Mapping[tirx.Var, tirx.Expr]
# Positions of a window whose loop is unrolled.
_UNROLLED = 8


def any_size_windows(func: PrimFunc, target: Target) -> Schedule | None:
    """Return the kernel of a convolution or pooling with channels last; None for any other function."""
    found = find_windows(func, cpu_limits(target))
    return None if found is None else Schedule(tvm.IRModule({"main": WindowKernel(found).build()}))


@dataclass(frozen=True)
class _Tile:
    """Positions of a line from `first` on, of which there is code for `rows`, and columns from `start` on."""

    leading: list[tirx.Expr]
    batch: tirx.Expr
    start: tirx.Expr
    first: tirx.Expr
    rows: int


class WindowKernel:
    """Writes the loops of windows."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        block, geometry = windows.block, windows.geometry
        self._axes = len(geometry.kernel)
        # Positions that are windows follow one another through all lines: they are one line.
        self._flat = geometry.is_pointwise
        positions = list(block.sizes[: 1 + self._axes])
        self._lines: list[Size] = [1] if self._flat else positions[:-1]
        self._positions: Size = math.prod(positions) if self._flat else positions[-1]
        self._window = block.reduced[: self._axes]
        self._channel = block.reduced[self._axes] if len(block.reduced) > self._axes else None
        self._dtype = str(block.store.buffer.dtype)
        self._buffers: Buffers = {}

    def build(self) -> PrimFunc:
        """Return the kernel with the parameters and attributes of its function."""
        return build_function(self._windows.func, self._emit)

    def _emit(self, buffers: Buffers) -> None:
        self._buffers = buffers
        found = self._windows
        cores = found.cores if worth_parallel(self._work()) else 1
        # Lines are shared where there are some, else parts of the only one.
        parts, pieces = (1, cores) if self._flat or self._axes == 1 else (cores, 1)
        lines = math.prod(self._lines)

        def job(place: list[tirx.Expr]) -> None:
            panel, part, piece = place
            begin, end = (T.Bind(unfolded(number * lines // parts)) for number in (part, part + 1))
            with T.serial(0, end - begin) as line:
                batch, *leading = places(begin + line, self._lines)
                if self._flat or not found.panels_inside:
                    self._line(batch, leading, panel, (piece, pieces))
                else:
                    with T.serial(0, wide(found.panels)) as here:
                        self._line(batch, leading, here, (piece, pieces))

        share_jobs([1 if found.panels_inside else found.panels, parts, pieces], job)

    def _work(self) -> int | None:
        work = 1
        for size in self._windows.block.sizes:
            if not isinstance(size, int):
                return None
            work *= size
        return work

    def _line(self, batch: tirx.Expr, leading: list[tirx.Expr], panel: tirx.Expr, piece: tuple[tirx.Expr, int]) -> None:
        """Compute a piece of a line's positions of a panel, or of all panels where the line is the only one."""
        found, size, (number, pieces) = self._windows, self._positions, piece

        def tiles(first: tirx.Expr, rows: int, count: tirx.Expr | None = None) -> None:
            def tile(here: tirx.Expr) -> None:
                start = here * found.width
                # Without panels, the last columns are computed twice.
                start = T.Bind(start if found.panel is not None else tirx.min(start, found.columns - found.width))
                self._whole_or_copied(_Tile(leading, batch, start, first, rows), count)

            if self._flat and found.panels_inside:
                with T.serial(0, wide(found.panels)) as here:
                    tile(here)
            else:
                tile(panel)

        if isinstance(size, int):
            # Tiles of one number of rows; the last one computes some of them twice.
            count = -(-size // found.rows)
            rows = -(-size // count)
            begin, end = (T.Bind(unfolded(part * count // pieces)) for part in (number, number + 1))
            with T.serial(0, end - begin) as step:
                tiles(T.Bind(tirx.min((begin + step) * rows, size - rows)), rows)
            return
        begin, end = (T.Bind(unfolded(part * wide(size) // pieces)) for part in (number, number + 1))
        with T.serial(0, (end - begin + (found.rows - 1)) // found.rows) as step:
            first = T.Bind(begin + step * found.rows)
            tiles(first, found.rows, T.Bind(tirx.min(end - first, wide(found.rows))))

    def _whole_or_copied(self, tile: _Tile, count: tirx.Expr | None = None) -> None:
        """Compute `count` rows of a tile, or all of them; a tile that is not whole, or reaches beyond, is copied."""
        first = self._source_of(tile, 0, wide(0))
        last = self._source_of(tile, tile.rows - 1, wide(self._windows.geometry.kernel[-1] - 1))
        inside = []
        if self._windows.geometry.is_padded:
            inside += [first >= 0, last < self._length]
        if count is not None:
            inside.append(count == tile.rows)
        if not inside:
            self._tile(tile, copied=False)
            return
        with T.If(tirx.all(*inside)):
            with T.Then():
                self._tile(tile, copied=False)
            with T.Else():
                half = tile.rows // 2
                if count is None or not half:
                    self._tile(tile, copied=True)
                    return
                with T.If(count > half):
                    with T.Then():
                        self._tile(tile, copied=True, stored=count)
                    with T.Else():
                        self._tile(replace(tile, rows=half), copied=True, stored=count)

    @property
    def _length(self) -> tirx.Expr:
        """Positions of the source's line."""
        return wide(self._positions if self._flat else self._windows.sizes[-1])

    def _source_of(self, tile: _Tile, row: int, place: tirx.Expr) -> tirx.Expr:
        """Return the position in the source's line that a row of a tile reads at a place of the window."""
        geometry = self._windows.geometry
        return (tile.first + row) * geometry.strides[-1] + place * geometry.steps[-1] - geometry.before[-1]

    def _tile(self, tile: _Tile, *, copied: bool, stored: tirx.Expr | None = None) -> None:
        """Compute a tile, and store so many of its rows."""
        found, block = self._windows, self._windows.block
        width = found.width
        sums = [row_buffer(width, self._dtype) for _ in range(tile.rows)]
        assert block.init is not None
        for row, vector in itertools.product(range(tile.rows), range(found.vectors)):
            with T.vectorized(0, found.lanes) as lane:
                T.buffer_store(sums[row], block.init.value, [vector * found.lanes + lane])
        span = (tile.rows - 1) * found.geometry.strides[-1] + (found.geometry.kernel[-1] - 1) * found.geometry.steps[-1]
        span, held = span + 1, self._held
        copy = T.alloc_buffer([span * held], self._dtype, scope="global") if copied else None
        with contextlib.ExitStack() as stack:
            window = [stack.enter_context(self._lines_of(tile, axis)) for axis in range(len(tile.leading))]
            if copy is not None:
                self._copy(tile, window, copy, span)
            self._each_place(lambda place, channel: self._add(tile, sums, copy, [*window, place], channel), not copied)
        whole = row_buffer(tile.rows * width, self._dtype)
        for row, vector in itertools.product(range(tile.rows), range(found.vectors)):
            with T.vectorized(0, found.lanes) as lane:
                at = vector * found.lanes + lane
                T.buffer_store(whole, sums[row][at], [row * width + at])
        with T.serial(0, wide(tile.rows) if stored is None else stored) as row:
            self._finish(self._place_of(tile, tile.first + row), tile.start, whole, row * width)

    def _place_of(self, tile: _Tile, position: tirx.Expr) -> Values:
        """Return the place of a position along all axes but the channels'."""
        block = self._windows.block
        found = [tile.batch, *tile.leading, position]
        if self._flat:
            found = places(T.Bind(position), block.sizes[: 1 + self._axes])
        return dict(zip(block.spatial, found, strict=False))

    @contextlib.contextmanager
    def _lines_of(self, tile: _Tile, axis: int):  # type: ignore[no-untyped-def]
        """Run over a window's places along an axis of lines, those inside the source; give the place."""
        geometry = self._windows.geometry
        kernel, step, before = geometry.kernel[axis], geometry.steps[axis], geometry.before[axis]
        begin, end = wide(0), wide(kernel)
        if before or geometry.after[axis]:
            first = tile.leading[axis] * geometry.strides[axis] - before
            begin = unfolded(tirx.max((-first + (step - 1)) // step, wide(0)))
            size = wide(self._windows.sizes[axis])
            end = unfolded(tirx.max(tirx.min((size - first + (step - 1)) // step, wide(kernel)), begin))
        with T.serial(0, end - begin) as number:
            yield begin + number

    @property
    def _held(self) -> int:
        """Channels of a copied line: those of a group, or of the tile."""
        return self._windows.width if self._channel is None else self._windows.channels

    def _channel_of(self, tile: _Tile, column: tirx.Expr, channel: tirx.Expr | None) -> tirx.Expr:
        """Return the channel that is read for a column."""
        known = {self._windows.block.spatial[-1]: column}
        if self._channel is not None and channel is not None:
            known[self._channel] = channel
        return substitute(self._windows.data.indices[-1], known)

    def _copy(self, tile: _Tile, window: list[tirx.Expr], copy: tirx.Var, span: int) -> None:
        """Copy a part of a line."""
        found, held = self._windows, self._held
        lanes = min(found.lanes if self._channel is None else 16, held)
        begin = T.Bind(self._source_of(tile, 0, wide(0)))
        first = T.Bind(self._channel_of(tile, tile.start, wide(0)))
        with T.serial(0, wide(span)) as place:
            inside = tirx.all(begin + place >= 0, begin + place < self._length)

            def fill(load: Callable[[tirx.Expr], tirx.Expr]) -> None:
                with T.serial(0, wide(held // lanes)) as vector, T.vectorized(0, lanes) as lane:
                    at = vector * lanes + lane
                    T.buffer_store(copy, load(at), [place * held + at])
                if held % lanes:
                    with T.vectorized(0, held % lanes) as lane:
                        at = held // lanes * lanes + lane
                        T.buffer_store(copy, load(at), [place * held + at])

            with T.If(inside):
                with T.Then():
                    fill(lambda at: self._read(tile, window, begin + place, first + at))
                with T.Else():
                    fill(lambda _at: found.fill)

    def _read(self, tile: _Tile, window: list[tirx.Expr], position: tirx.Expr, channel: tirx.Expr) -> tirx.Expr:
        """Return an element of the source by its position in a line."""
        geometry = self._windows.geometry
        if self._flat:
            # The address is the position's, which may be past the end of its axis.
            return self._buffers[self._windows.data.source][(*[wide(0)] * self._axes, position, channel)]
        lines = [
            at * geometry.strides[axis] + place * geometry.steps[axis] - geometry.before[axis]
            for axis, (at, place) in enumerate(zip(tile.leading, window, strict=True))
        ]
        return self._buffers[self._windows.data.source][(tile.batch, *lines, position, channel)]

    def _each_place(self, body: Callable[[tirx.Expr, tirx.Expr | None], None], unrolled: bool) -> None:
        """Run a body over the places of a window along a line, and the channels that it sums."""
        geometry, channels = self._windows.geometry, self._windows.channels
        kernel = geometry.kernel[-1]
        if self._channel is None:
            if unrolled and kernel <= _UNROLLED:
                for place in range(kernel):
                    body(wide(place), None)
            else:
                with T.serial(0, wide(kernel)) as place:
                    body(place, None)
            return
        # Where the places follow one another, they are more channels.
        if geometry.steps[-1] == 1 and self._is_whole_line:
            with T.serial(0, wide(kernel * channels)) as channel:
                body(wide(0), channel)
            return
        with T.serial(0, wide(kernel)) as place, T.serial(0, wide(channels)) as channel:
            body(place, channel)

    @property
    def _is_whole_line(self) -> bool:
        """Whether a window sums all channels of a position."""
        return int(self._buffers[self._windows.data.source].ty.shape[-1]) == self._windows.channels  # type: ignore[union-attr]

    def _add(
        self,
        tile: _Tile,
        sums: list[tirx.Var],
        copy: tirx.Var | None,
        window: list[tirx.Expr],
        channel: tirx.Expr | None,
    ) -> None:
        """Combine what a tile's rows read at one place of their windows, of one channel, with their sums."""
        found, block = self._windows, self._windows.block
        known = {axis: wide(0) for axis in self._window}
        known |= dict(zip(self._window[-len(window) :], window, strict=True))
        if self._channel is not None and channel is not None:
            known[self._channel] = channel
        for row, vector in itertools.product(range(tile.rows), range(found.vectors)):
            with T.vectorized(0, found.lanes) as lane:
                at = vector * found.lanes + lane
                column = tile.start + wide(at)
                read = self._channel_of(tile, column, channel)
                if copy is None:
                    data = self._read(tile, window[:-1], self._source_of(tile, row, window[-1]), read)
                else:
                    offset = row * found.geometry.strides[-1] + window[-1] * found.geometry.steps[-1]
                    inside = wide(at) if self._channel is None else channel
                    data = copy[offset * self._held + inside]
                self._combine(sums[row], at, {**known, block.spatial[-1]: column}, data)

    def _combine(self, sums: tirx.Var, at: tirx.Expr, known: Values, data: tirx.Expr) -> None:
        found, block = self._windows, self._windows.block

        def replaced(load: TensorLoad) -> tirx.Expr:
            if load.source.same_as(block.store.buffer):
                return sums[at]
            if load.source.same_as(found.data.source):
                return data
            return load_at(self._buffers, load, known)

        # What pads is a call, the only one.
        parts = [(TensorLoad, replaced), (tvm.ir.Call, lambda _call: data)]
        T.buffer_store(sums, tvm_ffi.structural_map(block.store.value, parts), [at])

    def _finish(self, values: Values, start: tirx.Expr, sums: tirx.Var, at: tirx.Expr) -> None:
        """Store the epilogue of one row, whose sums begin at a place of their buffer."""
        found, block = self._windows, self._windows.block

        def vectors(columns: int) -> None:
            whole = columns // found.lanes
            with T.serial(0, wide(whole)) as vector, T.vectorized(0, found.lanes) as lane:
                finish(vector * found.lanes + lane)
            if columns % found.lanes:
                with T.vectorized(0, columns % found.lanes) as lane:
                    finish(whole * found.lanes + lane)

        def finish(offset: tirx.Expr) -> None:
            here = {**values, block.spatial[-1]: start + offset}
            store_result(self._buffers, block, found.epilogue, sums[at + offset], here)

        rest = found.columns % found.width
        if found.panel is None or rest == 0:
            vectors(found.width)
            return
        with T.If(start + found.width <= found.columns):
            with T.Then():
                vectors(found.width)
            with T.Else():
                vectors(rest)
