"""The kernel of `schedules.templates.rows`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from schedules.templates.accesses import Accesses
from schedules.templates.dataflow import Dataflow, Reduction
from schedules.templates.expressions import dtype_of
from schedules.templates.kernel_frame import Frame, build_kernel, unflatten, wait_for_predecessor
from schedules.templates.registers import Lanes, when
from schedules.templates.rows_plan import RowsPlan

_WARP = 32
_COMBINE: dict[str, Callable[[tirx.Expr, tirx.Expr], tirx.Expr]] = {
    "sum": lambda a, b: a + b,
    "max": tirx.max,
    "min": tirx.min,
}


def build_rows_kernel(func: tirx.PrimFunc, flow: Dataflow, accesses: Accesses, plan: RowsPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""
    kernel = _Kernel(func, flow, accesses, plan)
    return build_kernel(func, flow, plan.blocks, plan.threads, plan.parameters.dependent, kernel.emit)


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
        self._ragged_rows = flow.rows % p.rows != 0
        row = tirx.min(self._row, flow.rows - 1) if self._ragged_rows else self._row
        outer = unflatten(row, flow.axes[:-1])
        self._places = [chunk * p.threads + self._own for chunk in range(plan.chunks)]
        self._chunks = [
            Lanes(flow, self._accesses, p.lanes, frame.flat, outer, self._inside(chunk), self._results)
            for chunk in range(plan.chunks)
        ]
        if plan.warps > 1:
            pool = T.SMEMPool()
            self._shared = pool.alloc((len(flow.reductions), p.rows, plan.warps), "float32", align=16)
            pool.commit()
        self._load()
        for number, reduction in enumerate(flow.reductions):
            self._results[reduction.result] = self._reduce(number, reduction)
        self._write()

    def _is_ragged(self, chunk: int) -> bool:
        """Whether a chunk goes beyond the row's end in some threads."""
        return (chunk + 1) * self._p.threads > self._plan.vectors

    def _inside(self, chunk: int) -> tirx.Expr:
        """Return a thread's vector of a chunk, the row's last one where it would be beyond the end."""
        place = self._places[chunk]
        return tirx.min(place, self._plan.vectors - 1) if self._is_ragged(chunk) else place

    def _load(self) -> None:
        """Emit all loads, those of constants before the wait for the kernel before."""
        found = self._accesses.found
        early = [access for access in found if self._p.dependent and self._frame.is_constant(access)]
        for accesses in (early, [access for access in found if access not in early]):
            for access in accesses:
                self._chunks[0].load(access)
                for lanes in self._chunks[1:]:
                    if access.per_row:
                        lanes.share(self._chunks[0], [access])
                    else:
                        lanes.load(access)
            if accesses is early:
                wait_for_predecessor(self._p.dependent)

    def _reduce(self, number: int, reduction: Reduction) -> tirx.Expr:
        """Emit a reduction and return its result, the same in all threads of a row."""
        p, plan = self._p, self._plan
        combine, start = _COMBINE[reduction.combine], tirx.FloatImm("float32", reduction.start)
        total = T.alloc_local([1], "float32")
        T.buffer_store(total, start, [0])
        for chunk, lanes in enumerate(self._chunks):
            values = [_as_float(lanes.value(reduction.element, lane)) for lane in range(p.lanes)]
            part = _tree(combine, values)
            if self._is_ragged(chunk):
                part = tirx.Select(self._places[chunk] < plan.vectors, part, start)
            T.buffer_store(total, combine(total[0], part), [0])
        width = min(p.threads, _WARP)
        if width > 1:
            T.buffer_store(total, T.cuda.warp_reduce(total[0], reduction.combine, width), [0])
        if plan.warps > 1:
            in_block = self._thread // p.threads
            with T.If(self._own % _WARP == 0), T.Then():
                T.buffer_store(self._shared, total[0], [number, in_block, self._own // _WARP])
            T.evaluate(T.cuda.cta_sync())
            parts = [self._shared[number, in_block, warp] for warp in range(plan.warps)]
            T.buffer_store(total, _tree(combine, parts), [0])
        return total[0]

    def _write(self) -> None:
        for output in self._flow.outputs:
            buffer, dtype = self._frame.written[output.param], dtype_of(self._func.params[output.param])
            rows = [self._row < self._flow.rows] if self._ragged_rows else []
            if output.per_row:
                value = self._chunks[0].value(output.value, 0)
                with when([self._own == 0, *rows]):
                    self._chunks[0].store(buffer, self._row, [value], dtype)
                continue
            for chunk, lanes in enumerate(self._chunks):
                columns = [self._places[chunk] < self._plan.vectors] if self._is_ragged(chunk) else []
                values = [lanes.value(output.value, lane) for lane in range(self._p.lanes)]
                at = self._row * self._flow.columns.size + self._places[chunk] * self._p.lanes
                with when([*rows, *columns]):
                    lanes.store(buffer, at, values, dtype)


def _as_float(value: tirx.Expr) -> tirx.Expr:
    return value if dtype_of(value) == "float32" else tirx.Cast("float32", value)


def _tree(combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr], values: Sequence[tirx.Expr]) -> tirx.Expr:
    """Return values combined pair by pair."""
    while len(values) > 1:
        pairs = [combine(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = [*pairs, *values[len(values) - len(values) % 2 :]]
    return values[0]
