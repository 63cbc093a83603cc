"""The kernel of `template.py`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CudaLimits
from relaxtune.schedules.templates.base import Parameters, refuse_registers
from relaxtune.schedules.templates.emit.accesses import Accesses
from relaxtune.schedules.templates.emit.kernel_frame import (
    EmitBody,
    Frame,
    build_function,
    shared_pool,
    unflatten,
    wait_for_predecessor,
)
from relaxtune.schedules.templates.emit.lanes import Lanes
from relaxtune.schedules.templates.emit.registers import tree, when
from relaxtune.schedules.tir.blocks import Size, element_bytes, narrow
from relaxtune.schedules.tir.dataflow import Dataflow, Output, Reduction
from relaxtune.schedules.tir.expressions import dtype_of

LANES_MAX = 16
_WARP = 32
# Elements that a thread holds.
_HELD_MAX = 128
# Chunks of a row that is not held that are in flight together.
_TOGETHER = 4
# Registers that a thread needs beside the elements that it holds.
_REGISTERS_BESIDE = 24
# Beside what was loaded for an element: the compiler keeps some values from one pass to the next.
_REGISTERS_PER_ELEMENT = 0.1


@dataclass(frozen=True)
class RowsParameters(Parameters):
    """Shares of one kernel."""

    template: ClassVar[str] = "rows"

    lanes: int = 8  # Neighbouring elements that a thread loads together.
    threads: int = 32  # Threads that share a row: a power of two up to 32, or whole warps.
    rows: int = 4  # Of a block.
    # Whether a thread keeps its part of a row in registers; else it is read again for each reduction and the output.
    held: bool = True
    dependent: bool = False  # Whether the kernel may start before the one before it has ended.


@dataclass(frozen=True)
class RowsPlan:
    """Sizes of one kernel."""

    parameters: RowsParameters
    vectors: int  # Vectors of a row.
    chunks: int  # Vectors that one thread makes at most.
    together: int  # Chunks that are read before anything is computed from them.
    warps: int  # Warps that share a row; 1 if a part of a warp does.
    blocks: int  # Of the grid.
    threads: int  # Of a block.
    registers: int  # Of a thread, estimated.


def make_plan(flow: Dataflow, accesses: Accesses, p: RowsParameters, limits: CudaLimits) -> RowsPlan | Refusal:
    """Return the sizes of the kernel for a function, or why there is none with these parameters.

    `accesses` are the function's with the parameters' `lanes`.
    """
    if p.threads < 1 or (p.threads % _WARP if p.threads > _WARP else _WARP % p.threads):
        return Refusal(f"threads is {p.threads}, expected a power of two up to {_WARP} or a multiple of it")
    block = p.threads * p.rows
    if p.rows < 1 or block > limits.max_threads_per_block or block % _WARP:
        return Refusal(
            f"{p.rows} rows of {p.threads} threads, expected a multiple of {_WARP} up to {limits.max_threads_per_block}"
        )
    vectors = flow.columns.size // p.lanes
    chunks = math.ceil(vectors / p.threads)
    if p.held and chunks * p.lanes > _HELD_MAX:
        return Refusal(f"{chunks * p.lanes} elements a thread, expected {_HELD_MAX} at most")
    together = chunks if p.held else min(chunks, _TOGETHER)
    # An access of less than a register has one to itself.
    loaded = [access for access in accesses.found if not access.per_row]
    held = sum(max(element_bytes(access.dtype), 4 / max(1, access.width)) for access in loaded)
    registers = _REGISTERS_BESIDE + math.ceil(together * p.lanes * (held / 4 + _REGISTERS_PER_ELEMENT))
    refusal = refuse_registers(registers, block, limits)
    if refusal is not None:
        return refusal
    return RowsPlan(
        parameters=p,
        vectors=vectors,
        chunks=chunks,
        together=together,
        warps=max(1, p.threads // _WARP),
        blocks=math.ceil((flow.planned or flow.rows) / p.rows),
        threads=block,
        registers=registers,
    )


_WARP = 32
_COMBINE: dict[str, Callable[[tirx.Expr, tirx.Expr], tirx.Expr]] = {
    "sum": lambda a, b: a + b,
    "max": tirx.max,
    "min": tirx.min,
}


def build_rows_kernel(func: tirx.PrimFunc, flow: Dataflow, accesses: Accesses, plan: RowsPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""
    kernel = _Kernel(func, flow, accesses, plan)
    rows, each = flow.rows, plan.parameters.rows
    blocks = plan.blocks if isinstance(rows, int) else (rows + (each - 1)) // each

    def begin(params: list[tirx.Var]) -> tuple[Size, EmitBody]:
        return narrow(blocks), partial(kernel.emit, Frame(func, flow, params))

    return build_function(func, plan.threads, plan.parameters.dependent, begin)


@dataclass(frozen=True)
class _Chunk:
    """A vector of each thread of a row: its elements, its number, and whether it is inside the row."""

    lanes: Lanes
    place: tirx.Expr
    inside: tirx.Expr | None


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(self, func: tirx.PrimFunc, flow: Dataflow, accesses: Accesses, plan: RowsPlan) -> None:
        self._func, self._flow, self._accesses, self._plan = func, flow, accesses, plan
        self._p = plan.parameters
        self._results: dict[tirx.Var, tirx.Expr] = {}

    def emit(self, frame: Frame, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p, flow = self._plan, self._p, self._flow
        self._frame, self._thread = frame, thread
        self._own = thread % p.threads
        self._row = block * p.rows + thread // p.threads
        self._rows = narrow(flow.rows)
        self._ragged_rows = p.rows > 1 and not (isinstance(flow.rows, int) and flow.rows % p.rows == 0)
        row = tirx.min(self._row, self._rows - 1) if self._ragged_rows else self._row
        self._outer = unflatten(row, flow.axes[:-1])
        if plan.warps > 1:
            pool = shared_pool()
            self._shared = pool.alloc((len(flow.reductions), p.rows, plan.warps), "float32", align=16)
            pool.commit()
        self._load()
        for number, reduction in enumerate(flow.reductions):
            self._results[reduction.result] = self._reduce(number, reduction)
        for output in flow.outputs:
            self._write(output)

    def _chunk(self, chunk: tirx.Expr | int, *, ragged: bool) -> _Chunk:
        """Return a chunk; a thread whose vector is beyond the row's end reads the last one."""
        place = chunk * self._p.threads + self._own
        inside = tirx.min(place, self._plan.vectors - 1) if ragged else place
        flow, flat = self._flow, self._frame.flat
        lanes = Lanes(flow, self._accesses, self._p.lanes, flat, self._outer, inside, self._results)
        return _Chunk(lanes, place, place < self._plan.vectors if ragged else None)

    def _load(self) -> None:
        """Emit the loads that are made once, those of constants before the wait for the kernel before."""
        plan, found = self._plan, self._accesses.found
        self._chunks = [
            self._chunk(number, ragged=(number + 1) * self._p.threads > plan.vectors)
            for number in range(plan.chunks if self._p.held else 1)
        ]
        once = [access for access in found if self._p.held or access.per_row]
        early = [access for access in once if self._p.dependent and self._frame.is_constant(access)]
        for accesses in (early, [access for access in once if access not in early]):
            for access in accesses:
                self._chunks[0].lanes.load(access)
                for chunk in self._chunks[1:]:
                    if access.per_row:
                        chunk.lanes.share(self._chunks[0].lanes, [access])
                    else:
                        chunk.lanes.load(access)
            if accesses is early:
                wait_for_predecessor(self._p.dependent)

    def _each_chunk(self, expr: tirx.Expr, make: Callable[[_Chunk], None]) -> None:
        if self._p.held:
            for chunk in self._chunks:
                make(chunk)
            return
        per_row = [access for access in self._accesses.found if access.per_row]
        others = [access for access in self._accesses.needed(expr) if not access.per_row]
        together = self._plan.together
        with T.serial(math.ceil(self._plan.chunks / together)) as turn:
            group = [self._chunk(turn * together + number, ragged=True) for number in range(together)]
            for chunk in group:
                chunk.lanes.share(self._chunks[0].lanes, per_row)
            for access in others:
                for chunk in group:
                    chunk.lanes.load(access)
            for chunk in group:
                make(chunk)

    def _reduce(self, number: int, reduction: Reduction) -> tirx.Expr:
        """Emit a reduction and return its result, the same in all threads of a row."""
        p, plan = self._p, self._plan
        combine, start = _COMBINE[reduction.combine], tirx.FloatImm("float32", reduction.start)
        total = T.alloc_local([1], "float32")
        T.buffer_store(total, start, [0])

        def add(chunk: _Chunk) -> None:
            values = [chunk.lanes.value(reduction.element, lane) for lane in range(p.lanes)]
            wide = [one if dtype_of(one) == "float32" else tirx.Cast("float32", one) for one in values]
            part = tree(combine, wide)
            if chunk.inside is not None:
                part = tirx.Select(chunk.inside, part, start)
            T.buffer_store(total, combine(total[0], part), [0])

        self._each_chunk(reduction.element, add)
        width = min(p.threads, _WARP)
        if width > 1:
            T.buffer_store(total, T.cuda.warp_reduce(total[0], reduction.combine, width), [0])
        if plan.warps > 1:
            in_block = self._thread // p.threads
            with T.If(self._own % _WARP == 0), T.Then():
                T.buffer_store(self._shared, total[0], [number, in_block, self._own // _WARP])
            T.evaluate(T.cuda.cta_sync())
            parts = [self._shared[number, in_block, warp] for warp in range(plan.warps)]
            T.buffer_store(total, tree(combine, parts), [0])
        return total[0]

    def _write(self, output: Output) -> None:
        buffer, dtype = self._frame.written[output.param], dtype_of(self._func.params[output.param])
        rows = [self._row < self._rows] if self._ragged_rows else []
        if output.per_row:
            lanes = self._chunks[0].lanes
            with when([self._own == 0, *rows]):
                lanes.store(buffer, self._row, [lanes.value(output.value, 0)], dtype)
            return

        def write(chunk: _Chunk) -> None:
            values = [chunk.lanes.value(output.value, lane) for lane in range(self._p.lanes)]
            at = self._row * self._flow.columns.size + chunk.place * self._p.lanes
            with when([*rows, *([] if chunk.inside is None else [chunk.inside])]):
                chunk.lanes.store(buffer, at, values, dtype)

        self._each_chunk(output.value, write)
