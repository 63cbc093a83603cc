"""Reductions over rows of a symbolic size on a CPU: softmax, sum, maximum, whatever follows them.

Blocks of the kinds S...SR (reduce a row) and S...SS (walk a row), all over the same leading rows, as in `reduction`:

    parallel rows
      each block:  vectors of the row, then its last elements one by one

A reduction has one partial result a lane, and shares the loop of the block whose elements it combines (softmax: the
sum is taken while the exponentials are made). Of the intermediates, what belongs to a row is one number, and one tensor
may be as wide as the output: it lies in the output until that is written, element by element.
"""

from __future__ import annotations

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

from relaxtune.schedules.cpu.any_size.emit import Buffers, View, build_function, row_buffer, share_jobs, wide
from relaxtune.schedules.cpu.base import cpu_limits, inline_spatial
from relaxtune.schedules.cpu.reduction import count_shared_rows
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.tir.blocks import position_of, same_sizes, shape_of
from relaxtune.schedules.tir.contraction import are_axes
from relaxtune.schedules.tir.expressions import list_loads, substitute
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock, is_canonical, list_blocks

_COMBINED = (tirx.Add, tirx.Max, tirx.Min)


def any_size_rows(func: PrimFunc, target: Target) -> Schedule | None:
    """Return the kernel of float32 blocks that walk or reduce rows of one symbolic size; None for others."""
    sch = Schedule(func)
    if not all(is_canonical(sch, block) for block in list_blocks(sch)):
        return None
    inline_spatial(sch)
    blocks = list_blocks(sch)
    rows = _rows_of(sch, blocks)
    lanes = cpu_limits(target).vector_bytes // 4
    found = None if rows is None else _find(sch.mod["main"], blocks, rows, lanes)
    return None if found is None else Schedule(tvm.IRModule({"main": RowsKernel(found).build()}))


@dataclass(frozen=True)
class Rows:
    """A function to make: `rows` leading axes of all blocks, columns of a symbolic size.

    `kept` are the intermediates of one number a row; `wide` is the one as wide as the output, None without one.
    """

    func: PrimFunc
    blocks: tuple[ScheduledBlock, ...]
    rows: tuple[Size, ...]
    columns: Size
    kept: tuple[tirx.Var, ...]
    wide: tirx.Var | None
    lanes: int


def _rows_of(sch: Schedule, blocks: list[ScheduledBlock]) -> int | None:
    """Return how many leading axes are rows: all but the reduced one of each reduction."""
    reductions = [block for block in blocks if not block.is_spatial]
    if not reductions or any(not block.is_reduction or not block.kinds.endswith("R") for block in reductions):
        return None
    rows = len(reductions[0].kinds) - 1
    if any(block.kinds != "S" * rows + "R" for block in reductions) or count_shared_rows(sch, blocks) < rows:
        return None
    return rows if all(len(block.kinds) in (rows, rows + 1) for block in blocks) else None


def _find(func: PrimFunc, blocks: list[ScheduledBlock], rows: int, lanes: int) -> Rows | None:
    columns = next(block.sizes[-1] for block in blocks if not block.is_spatial)
    if isinstance(columns, int) or any(
        len(block.kinds) > rows and not same_sizes(block.sizes[rows:], [columns]) for block in blocks
    ):
        return None
    written = [block.store.buffer for block in blocks]
    if any(str(buffer.dtype) != "float32" for buffer in written) or len(set(written)) != len(written):
        return None
    outputs = [buffer for buffer in written if position_of(func, buffer) is not None]
    if outputs != written[-1:] or blocks[-1].init is not None:
        return None
    kept = tuple(block.store.buffer for block in blocks[:-1] if not block.is_spatial or len(block.kinds) == rows)
    wide_ones = [buffer for buffer in written[:-1] if buffer not in kept]
    if len(wide_ones) > 1 or (wide_ones and not same_sizes(shape_of(wide_ones[0]), shape_of(written[-1]))):
        return None
    moved = next(iter(wide_ones), None)
    if not all(_is_plain(block, moved) for block in blocks):
        return None
    return Rows(func, tuple(blocks), blocks[0].sizes[:rows], columns, kept, moved, lanes)


def _is_plain(block: ScheduledBlock, moved: tirx.Var | None) -> bool:
    """Whether a block writes the element of its own place, and reads what another wrote over at that place alone."""
    axes, store = block.spatial, block.store
    if len(store.indices) != len(axes) or not are_axes(store.indices, axes):
        return False
    loads = [load for load in list_loads(store.value) if moved is not None and load.source.same_as(moved)]
    return all(are_axes(load.indices, block.axes) for load in loads)


def _combines(block: ScheduledBlock, made: ScheduledBlock) -> bool:
    """Whether a block reduces, of what another one makes, the element at its own place alone."""
    loads = [load for load in list_loads(block.store.value) if load.source.same_as(made.store.buffer)]
    return bool(not block.is_spatial and loads) and all(are_axes(load.indices, block.axes) for load in loads)


Values = Mapping[tirx.Var, tirx.Expr]


class RowsKernel:
    """Writes the loops of rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def build(self) -> PrimFunc:
        """Return the kernel with the parameters and attributes of its function."""
        return build_function(self._rows.func, self._emit)

    def make_row(
        self, places: list[tirx.Expr], buffers: Mapping[tirx.Var, tirx.Var | View]
    ) -> Mapping[tirx.Var, tirx.Var]:
        """Make the row of some places along the leading axes, all of whose tensors are in `buffers`.

        What is returned holds, for each intermediate of one number a row, this row's.
        """
        self._buffers = buffers
        self._kept = {buffer: row_buffer(1) for buffer in self._rows.kept}
        blocks = list(self._rows.blocks)
        while blocks:
            block = blocks.pop(0)
            known = dict(zip(block.axes, places, strict=False))
            if not block.is_spatial:
                self._reduce(block, known)
            elif len(block.axes) == len(places):
                self._store(block, known, self._value(block.store.value, known))
            elif blocks and _combines(blocks[0], block):
                total = blocks.pop(0)
                self._reduce(total, dict(zip(total.axes, places, strict=False)), self._element(block, known))
            else:
                self._walk(block, known)
        return self._kept

    def _emit(self, buffers: Buffers) -> None:
        found = self._rows
        wide_one = {} if found.wide is None else {found.wide: buffers[found.blocks[-1].store.buffer]}
        share_jobs(found.rows, lambda places: self.make_row(places, {**buffers, **wide_one}))

    def _element(self, block: ScheduledBlock, known: Values) -> Callable[[tirx.Expr], None]:
        """Return what makes the element of a block at a column."""

        def element(column: tirx.Expr) -> None:
            values = {**known, block.axes[-1]: column}
            self._store(block, values, self._value(block.store.value, values))

        return element

    def _walk(self, block: ScheduledBlock, known: Values) -> None:
        element = self._element(block, known)
        whole = self._vectors(lambda at, lane: element(at + wide(lane)))
        with T.serial(whole, self._rows.columns) as column:
            element(column)

    def _reduce(
        self, block: ScheduledBlock, known: Values, make: Callable[[tirx.Expr], None] = lambda _column: None
    ) -> None:
        """Combine the elements of a row, each of which is made first."""
        store, total = block.store, self._kept[block.store.buffer]
        assert block.init is not None
        init = self._value(block.init.value, known)
        T.buffer_store(total, init, [0])
        partial = row_buffer(self._rows.lanes)

        def each(body: Callable[[tirx.Expr], tirx.Expr]) -> None:
            with T.vectorized(0, self._rows.lanes) as lane:
                T.buffer_store(partial, body(lane), [lane])

        def add(at: tirx.Expr, lane: tirx.Expr) -> None:
            make(at + wide(lane))
            values = {**known, block.axes[-1]: at + wide(lane)}
            T.buffer_store(partial, self._value(store.value, values, (store.buffer, partial[lane])), [lane])

        whole: tirx.Expr = wide(0)
        if type(store.value) in _COMBINED:
            each(lambda _lane: init)
            whole = self._vectors(add)
            # Constant places, so that the partial results are a register.
            halves = [partial[lane] for lane in range(self._rows.lanes)]
            while len(halves) > 1:
                half = len(halves) // 2
                pairs = zip(halves[:half], halves[half:], strict=True)
                halves = [type(store.value)(left, right) for left, right in pairs]
            T.buffer_store(total, halves[0], [0])
        with T.serial(whole, self._rows.columns) as column:
            make(column)
            T.buffer_store(total, self._value(store.value, {**known, block.axes[-1]: column}), [0])

    def _vectors(self, body: Callable[[tirx.Expr, tirx.Expr], None]) -> tirx.Expr:
        """Run a body for the whole vectors of the row, given their first column and the lane; return where they end."""
        lanes = self._rows.lanes
        count = T.Bind(self._rows.columns // lanes)
        with T.serial(0, count) as number, T.vectorized(0, lanes) as lane:
            body(number * lanes, lane)
        return count * lanes

    def _value(self, expr: tirx.Expr, values: Values, instead: tuple[tirx.Var, tirx.Expr] | None = None) -> tirx.Expr:
        """Return an expression at a place, with another one `instead` of the loads of a buffer."""

        def replaced(load: TensorLoad) -> tirx.Expr:
            if instead is not None and load.source.same_as(instead[0]):
                return instead[1]
            kept = self._kept.get(load.source)
            return kept[0] if kept is not None else self._buffers[load.source][tuple(load.indices)]

        return tvm_ffi.structural_map(substitute(expr, values), (TensorLoad, replaced))

    def _store(self, block: ScheduledBlock, values: Values, value: tirx.Expr) -> None:
        kept = self._kept.get(block.store.buffer)
        if kept is not None:
            T.buffer_store(kept, value, [0])
            return
        indices = [substitute(index, values) for index in block.store.indices]
        into = self._buffers[block.store.buffer]
        if isinstance(into, View):
            T.buffer_store(into.buffer, value, into.at(indices))
        else:
            T.buffer_store(into, value, indices)
