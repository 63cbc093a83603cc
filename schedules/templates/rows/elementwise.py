"""Elementwise and injective functions for CUDA, from FuseTIR's output to a TIRx kernel.

Casts, masks, residual sums, activations, gathers of embeddings, rotary embeddings, slices, concatenations, transposes:

::

    Y[i] = value(X0[f0(i)], X1[f1(i)], ...)          i: all positions of the output, after `dataflow`
    thread t of block b, v = (b * vectors + u) * threads + t for each u:
        elements v * lanes .. v * lanes + lanes - 1 of Y, in accesses of up to 16 bytes

All loads of a thread are made before anything is computed from them, so that they are in flight together.

Where the number of columns is symbolic, calls whose number is no multiple of `lanes` have a kernel with one lane: the
function is a table of the two.

Where an input is read across the output's last axis (a transpose), threads follow the axis along which the input is
contiguous: its loads are made element by element and coalesce, and each thread still writes whole vectors.

With `dependent`, the kernel may start while the one before it in the stream ends (programmatic dependent launch), and
waits for it before it reads what is not known to be constant, and before it writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import Case, Parameters, cuda_limits
from relaxtune.schedules.templates.emit.accesses import VECTOR_BYTES, Access, Accesses
from relaxtune.schedules.templates.emit.division import Divisor
from relaxtune.schedules.templates.emit.kernel_frame import (
    EmitBody,
    Frame,
    build_function,
    tensor_bytes,
    unflatten,
    wait_for_predecessor,
)
from relaxtune.schedules.templates.emit.lanes import Lanes, refuse_dtypes
from relaxtune.schedules.templates.emit.registers import when
from relaxtune.schedules.templates.launch_table import element_checks, launch_first
from relaxtune.schedules.templates.rows.template import DataflowTemplate, Shape, accesses_of, predicted_us
from relaxtune.schedules.tir.blocks import Size, element_bytes, is_multiple, narrow, shape_of
from relaxtune.schedules.tir.dataflow import Axis, Dataflow, with_multiple_columns
from relaxtune.schedules.tir.expressions import UnsupportedExpressionError, constant_value, substitute

_LANES_MAX = 16
_THREADS_MAX = 1024
_VECTORS_MAX = 8
# Elements a thread holds at a time, more would not fit its registers.
_ELEMENTS_MAX = 64
_CANDIDATES_MAX = 16
# A kernel of vectors for the calls whose columns allow them, beside one without, takes time to compile: it is worth
# that for tensors of so many elements.
_VECTOR_ELEMENTS_MIN = 4_000_000
# Lanes of such vectors: T5's attention mask of float16, of int64 marks, took 57 us on an H100 with 4, 93 with 2 and 84
# with 8.
_OPEN_LANES_MIN = 4


@dataclass(frozen=True)
class ElementwiseParameters(Parameters):
    """Shares of one kernel."""

    template: ClassVar[str] = "elementwise"

    lanes: int = 8  # Neighbouring elements that a thread makes together.
    vectors: int = 1  # Times that many, `threads` apart, which a thread makes.
    threads: int = 256  # Of a block.
    dependent: bool = False  # Whether the kernel may start before the one before it has ended.


class Elementwise(DataflowTemplate[ElementwiseParameters]):
    """The template; see `schedules.templates.base.KernelTemplate`."""

    parameters = ElementwiseParameters

    @staticmethod
    def refuse(func: tirx.PrimFunc, flow: Dataflow) -> Refusal | None:
        """Return why the template cannot make what a function computes."""
        if flow.reductions:
            return Refusal("it has reductions (the template for rows makes those)")
        try:
            refuse_dtypes([str(param.ty.dtype) for param in func.params])
            Accesses(flow, 1)
        except UnsupportedExpressionError as reason:
            return Refusal(str(reason))
        return None

    def _propose(self, case: Case[Dataflow]) -> Sequence[ElementwiseParameters] | Refusal:
        func, found, target = case.func, case.found, case.target
        sure, most = _lanes(found, func), max(_OPEN_LANES_MIN, _vector_lanes(found, func))
        if _is_open(found, most) and _elements(func, found) >= _VECTOR_ELEMENTS_MIN:
            return _propose(func, found, target, {most})[:_CANDIDATES_MAX]
        lanes = {one for one in (sure // 2, sure, sure * 2) if one and is_multiple(found.columns.size, one)}
        return _propose(func, found, target, lanes)[:_CANDIDATES_MAX]

    def _make(self, case: Case[Dataflow], p: ElementwiseParameters) -> tirx.PrimFunc | Refusal:
        func, found = case.func, case.found
        refused = _refuse_parameters(p, found)
        if refused is not None or not _is_open(found, p.lanes):
            return refused or _Kernel(func, found, p).build()
        whole = with_multiple_columns(found, p.lanes)
        other = replace(_propose(func, found, case.target, {_lanes(found, func)})[0], dependent=p.dependent)
        kernels = [_Kernel(func, whole, p).build(), _Kernel(func, found, other).build()]
        divides = tirx.EQ(found.columns.size % p.lanes, tirx.IntImm("int64", 0))
        return launch_first([divides], kernels, found.columns.size, element_checks(func))

    def _predict(self, case: Case[Dataflow], p: ElementwiseParameters, rows: int) -> float | None:
        func, found = case.func, case.found
        blocks = math.ceil(_elements(func, found) / (p.lanes * p.vectors * p.threads))
        accesses, sm_count = accesses_of(func, found, p.lanes), case.limits.likely_sm_count
        return _predicted(p, blocks, accesses, _widest(found, func, p.lanes), tensor_bytes(func, rows), sm_count)


def _propose(
    func: tirx.PrimFunc, flow: Dataflow, target: ResolvedTarget, lanes: AbstractSet[int]
) -> list[ElementwiseParameters]:
    """Return parameters with some numbers of lanes, the most promising first."""
    elements, sm_count = _elements(func, flow), cuda_limits(target).likely_sm_count
    moved = tensor_bytes(func, flow.planned)
    proposals: list[tuple[float, ElementwiseParameters]] = []
    for count in (one for one in lanes if one <= _LANES_MAX):
        accesses, widest = accesses_of(func, flow, count), _widest(flow, func, count)
        for vectors in (1, 2, 4):
            for threads in (64, 128, 256, 512):
                p = ElementwiseParameters(count, vectors, threads, dependent=True)
                blocks = math.ceil(elements / (count * vectors * threads))
                if blocks > 1 or (vectors == 1 and threads == 64):
                    proposals.append((_predicted(p, blocks, accesses, widest, moved, sm_count), p))
    proposals.sort(key=lambda pair: pair[0])
    return [p for _, p in proposals]


def _is_open(flow: Dataflow, lanes: int) -> bool:
    """Whether a number of lanes divides the columns of some calls alone."""
    return not isinstance(flow.columns.size, int) and not is_multiple(flow.columns.size, lanes)


def _refuse_parameters(p: ElementwiseParameters, flow: Dataflow) -> Refusal | None:
    # Of a symbolic number of columns, the lanes divide those of some calls.
    divides = not isinstance(flow.columns.size, int) or flow.columns.size % p.lanes == 0
    if not 1 <= p.lanes <= _LANES_MAX or not divides:
        return Refusal(f"lanes is {p.lanes}, expected 1 to {_LANES_MAX} and a divisor of {flow.columns.size}")
    if not 1 <= p.vectors <= _VECTORS_MAX or p.vectors * p.lanes > _ELEMENTS_MAX:
        return Refusal(f"vectors is {p.vectors}, expected 1 to {_VECTORS_MAX} of {_ELEMENTS_MAX} elements together")
    if p.threads % 32 or not 32 <= p.threads <= _THREADS_MAX:
        return Refusal(f"threads is {p.threads}, expected a multiple of 32 up to {_THREADS_MAX}")
    return None


def _vector_lanes(flow: Dataflow, func: tirx.PrimFunc) -> int:
    """Return how many elements of the largest dtype take 16 bytes."""
    outputs = [str(func.params[output.param].ty.dtype) for output in flow.outputs]
    loads = [access.dtype for access in accesses_of(func, flow, 1).found if not access.per_row]
    return VECTOR_BYTES // max(element_bytes(dtype) for dtype in (*outputs, *loads))


def _lanes(flow: Dataflow, func: tirx.PrimFunc) -> int:
    """Return how many elements of the largest dtype take 16 bytes, as far as they surely divide a row."""
    lanes = _vector_lanes(flow, func)
    while not is_multiple(flow.columns.size, lanes):
        lanes //= 2
    return lanes


def _widest(flow: Dataflow, func: tirx.PrimFunc, lanes: int) -> int:
    """Return the lanes of vectors that are as wide as can be, in calls whose columns a number of lanes divides."""
    return max(lanes, _lanes(flow, func)) if _is_open(flow, lanes) else _lanes(flow, func)


def _elements(func: tirx.PrimFunc, flow: Dataflow) -> int:
    """Return the elements of the output; of a symbolic number of rows, about as many as are planned for."""
    if not flow.planned:
        return int(math.prod(axis.size for axis in flow.axes))
    last = [(shape_of(func.params[output.param]) or (1,))[-1] for output in flow.outputs]
    return flow.planned * max((size for size in last if isinstance(size, int)), default=flow.planned)


def _predicted(
    p: ElementwiseParameters, blocks: int, accesses: Accesses, widest: int, moved_bytes: int, sm_count: int
) -> float:
    elements = p.lanes * p.vectors
    held = sum(element_bytes(access.dtype) for access in accesses.found if not access.per_row)
    uneven = math.ceil(blocks / sm_count) * sm_count / blocks - 1 if blocks > sm_count else 0.0
    best_vectors = 2 if blocks * p.vectors > 8 * sm_count else 1
    # Narrow accesses, and wide ones that leave holes between the threads', take more of them.
    odd = abs(math.log2(p.lanes / widest))
    shape = Shape(
        moved_bytes=moved_bytes,
        blocks=blocks,
        threads=p.threads,
        registers=24 + math.ceil(elements * held / 4),
        accesses=elements * len(accesses.found),
        waste=(1 + 0.15 * odd) * (1 + 0.3 * uneven) * (1 + (0.0 if p.vectors == best_vectors else 0.04)),
    )
    return predicted_us(shape, sm_count)


class _Kernel:
    """One kernel under construction."""

    def __init__(self, func: tirx.PrimFunc, flow: Dataflow, p: ElementwiseParameters) -> None:
        self._func, self._flow, self._p = func, flow, p
        self._accesses = Accesses(flow, p.lanes)
        last = Axis(self._accesses.vector, flow.columns.size // p.lanes)
        fast = _contiguous_axis(flow, self._accesses)
        self._order = [axis for axis in flow.axes[:-1] if axis is not fast] + [last] + ([fast] if fast else [])
        self._total = math.prod(axis.size for axis in self._order)

    def build(self) -> tirx.PrimFunc:
        return build_function(self._func, self._p.threads, self._p.dependent, self._begin)

    def _begin(self, params: list[tirx.Var]) -> tuple[Size, EmitBody]:
        each = self._p.threads * self._p.vectors
        self._divisors = {axis.var: Divisor.of(axis.size) for axis in self._order[1:]}
        blocks = narrow((self._total + (each - 1)) // each)
        return blocks, partial(self._emit, Frame(self._func, self._flow, params))

    def _emit(self, frame: Frame, block: tirx.Expr, thread: tirx.Expr) -> None:
        p, flow = self._p, self._flow
        places = [(block * p.vectors + turn) * p.threads + thread for turn in range(p.vectors)]
        ragged = not isinstance(self._total, int) or self._total % (p.threads * p.vectors) != 0
        total = narrow(self._total)
        lanes = [self._lanes(frame, tirx.min(place, total - 1) if ragged else place) for place in places]
        early = [access for access in self._accesses.found if p.dependent and frame.is_constant(access)]
        self._load(lanes, early)
        wait_for_predecessor(p.dependent)
        self._load(lanes, [access for access in self._accesses.found if access not in early])
        in_order = [axis.var for axis in self._order[:-1]] == [axis.var for axis in flow.axes[:-1]]
        for output in flow.outputs:
            dtype = str(self._func.params[output.param].ty.dtype)
            for place, one in zip(places, lanes, strict=True):
                values = [one.value(output.value, lane) for lane in range(p.lanes)]
                with when([place < total] if ragged else []):
                    at = place * p.lanes if in_order else one.position()
                    one.store(frame.written[output.param], at, values, dtype)

    def _lanes(self, frame: Frame, place: tirx.Expr) -> Lanes:
        outer = dict(unflatten(place, self._order, self._divisors))
        vector = outer.pop(self._accesses.vector)
        return Lanes(self._flow, self._accesses, self._p.lanes, frame.flat, outer, vector, {})

    def _load(self, lanes: Sequence[Lanes], accesses: Sequence[Access]) -> None:
        for access in accesses:
            for one in lanes:
                one.load(access)


def _contiguous_axis(flow: Dataflow, accesses: Accesses) -> Axis | None:
    """Return the axis along which a load that is scattered over the last axis is contiguous, if there is one."""
    for access in accesses.found:
        if not access.scattered or access.inner:
            continue
        for axis in flow.axes[:-1]:
            following = substitute(access.indices[0], {axis.var: axis.var + 1})
            if constant_value(accesses.simplify(following - access.indices[0])) == 1:
                return axis
    return None
