"""Functions with reductions over rows for CUDA, from FuseTIR's output to a TIRx kernel.

Layer norm, RMS norm, softmax, mean, with any elementwise producers and consumers (residual, bias, casts, masks):

::

    s_0[i] = combine_j value_0(i, j)                       rows i, columns j, after `dataflow`
    s_1[i] = combine_j value_1(i, j, s_0[i])
    Y[i, j] = value(i, j, s_0[i], s_1[i], ...)             or Y[i] = value(i, s_0[i], ...)
    thread t of the `threads` of row i: vectors c * threads + t of `lanes` columns, c = 0 .. chunks - 1

One pass over global memory: a thread loads its part of a row once, in accesses of up to 16 bytes, and keeps it in
registers for all reductions and the output. Rows that are too long for that are read again for each (`held` is false),
from the caches as far as those reach. Reductions are in float32: in each thread as a tree over a vector, then
over vectors, then over a warp by shuffles, then over the row's warps, if several, through shared memory. Their order
is fixed, so results repeat bit by bit. A variance is summed as the function says, from centred values.

With `dependent`, the kernel may start while the one before it in the stream ends (programmatic dependent launch), and
waits for it before it reads what is not known to be constant, and before it writes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import Case, KernelTemplate, Own, refuse_target
from relaxtune.schedules.templates.emit.accesses import VECTOR_BYTES, Accesses
from relaxtune.schedules.templates.emit.kernel_frame import tensor_bytes
from relaxtune.schedules.templates.emit.lanes import refuse_dtypes
from relaxtune.schedules.templates.rows.kernel import LANES_MAX, RowsParameters, RowsPlan, build_rows_kernel, make_plan
from relaxtune.schedules.tir.blocks import element_bytes
from relaxtune.schedules.tir.dataflow import Dataflow, Reduction, recognise_dataflow
from relaxtune.schedules.tir.expressions import UnsupportedExpressionError, list_loads


class DataflowTemplate(KernelTemplate[Dataflow, Own]):
    """A template of functions that are read as a `Dataflow`, of known sizes or of a symbolic number of rows."""

    @staticmethod
    @abstractmethod
    def refuse(func: tirx.PrimFunc, flow: Dataflow) -> Refusal | None:
        """Return why the template cannot make what a function computes."""

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> Dataflow | Refusal:
        refusal, flow = refuse_target(target), recognise_dataflow(func)
        return refusal or (flow if isinstance(flow, Refusal) else self.refuse(func, flow) or flow)

    def _recognise_rows(self, func: tirx.PrimFunc, target: ResolvedTarget, rows: int) -> Dataflow | Refusal:
        found = refuse_target(target) or _recognise_any(self, func)
        return found if isinstance(found, Refusal) else replace(found, planned=rows)


@lru_cache(maxsize=8)
def _recognise_any(template: DataflowTemplate[Own], func: tirx.PrimFunc) -> Dataflow | Refusal:
    """Return what a function of a symbolic number of rows computes; many of those are asked for, one after another."""
    flow = recognise_dataflow(func, symbolic=True)
    return flow if isinstance(flow, Refusal) else template.refuse(func, flow) or flow


@lru_cache(maxsize=16)
def _accesses_of_any(func: tirx.PrimFunc, lanes: int) -> Accesses | None:
    flow = recognise_dataflow(func, symbolic=True)
    return None if isinstance(flow, Refusal) else Accesses(flow, lanes)


def accesses_of(func: tirx.PrimFunc, flow: Dataflow, lanes: int) -> Accesses:
    """Return the accesses of a function, to count them."""
    known = _accesses_of_any(func, lanes) if flow.planned else None
    return known or Accesses(flow, lanes)


_CANDIDATES_MAX = 24
# Of a row that need not be held: chunks at least, and threads.
_LONG, _LONG_THREADS = 16, 256


class Rows(DataflowTemplate[RowsParameters]):
    """The template; see `schedules.templates.base.KernelTemplate`."""

    parameters = RowsParameters

    @staticmethod
    def refuse(func: tirx.PrimFunc, flow: Dataflow) -> Refusal | None:
        """Return why the template cannot make what a function computes."""
        if not flow.reductions:
            return Refusal("it has no reductions (the template for elementwise functions makes those)")
        if any(_is_contraction(one) for one in flow.reductions):
            return Refusal("it sums products of two tensors (the templates for matmuls make those)")
        try:
            refuse_dtypes([str(param.ty.dtype) for param in func.params])
            scattered = [access for access in Accesses(flow, 2 - flow.columns.size % 2).found if access.scattered]
        except UnsupportedExpressionError as reason:
            return Refusal(str(reason))
        return Refusal(f"{scattered[0].buffer.name} is not contiguous along the rows") if scattered else None

    def _propose(self, case: Case[Dataflow]) -> Sequence[RowsParameters] | Refusal:
        func, flow, limits = case.func, case.found, case.limits
        moved = tensor_bytes(func, flow.planned)
        plans: list[tuple[float, RowsParameters]] = []
        loads = [access.dtype for access in accesses_of(func, flow, 1).found if not access.per_row]
        outputs = [str(func.params[one.param].ty.dtype) for one in flow.outputs if not one.per_row]
        widths = {VECTOR_BYTES // element_bytes(dtype) for dtype in (*loads, *outputs)} or {1}
        for lanes in sorted({math.gcd(width, flow.columns.size) for width in widths}):
            accesses = accesses_of(func, flow, lanes)
            for threads, rows in _shares():
                for held in (True, False):
                    p = RowsParameters(lanes, threads, rows, held, dependent=True)
                    plan = make_plan(flow, accesses, p, limits)
                    if isinstance(plan, Refusal) or p.threads >= 2 * plan.vectors:
                        continue
                    # Only long rows are read more than once.
                    if held or (plan.chunks >= _LONG and p.threads >= _LONG_THREADS):
                        plans.append((_predicted(plan, moved, accesses, limits.likely_sm_count), p))
        plans.sort(key=lambda pair: pair[0])
        return [p for _, p in plans[:_CANDIDATES_MAX]] or Refusal(
            f"rows of {flow.columns.size} do not fit the registers of a block"
        )

    def _make(self, case: Case[Dataflow], p: RowsParameters) -> tirx.PrimFunc | Refusal:
        if not 1 <= p.lanes <= LANES_MAX or case.found.columns.size % p.lanes:
            return Refusal(f"lanes is {p.lanes}, expected 1 to {LANES_MAX} and a divisor of the row")
        accesses = Accesses(case.found, p.lanes)
        plan = make_plan(case.found, accesses, p, case.limits)
        return plan if isinstance(plan, Refusal) else build_rows_kernel(case.func, case.found, accesses, plan)

    def _predict(self, case: Case[Dataflow], p: RowsParameters, rows: int) -> float | None:
        accesses = accesses_of(case.func, case.found, p.lanes)
        plan = make_plan(case.found, accesses, p, case.limits)
        if isinstance(plan, Refusal):
            return None
        return _predicted(plan, tensor_bytes(case.func, rows), accesses, case.limits.likely_sm_count)


def _is_contraction(reduction: Reduction) -> bool:
    """Whether a reduction sums the products of elements of two tensors."""
    element = reduction.element
    if reduction.combine != "sum" or not isinstance(element, tirx.Mul):
        return False
    left, right = ({load.source for load in list_loads(side)} for side in (element.a, element.b))
    return bool(left) and bool(right) and left.isdisjoint(right)


def _shares() -> Iterator[tuple[int, int]]:
    for threads in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
        for rows in (1, 2, 4, 8, 16, 32):
            if threads * rows % 32 == 0 and (threads * rows <= 256 or rows == 1):
                yield threads, rows


def _predicted(plan: RowsPlan, moved_bytes: int, accesses: Accesses, sm_count: int) -> float:
    p = plan.parameters
    streams = sum(1 for access in accesses.found if not access.per_row)
    elements = plan.chunks * p.lanes
    idle = plan.chunks * p.threads / plan.vectors - 1
    # Of very many elements a thread's passes take turns with its accesses.
    turns = 0.03 * max(0.0, elements / 64 - 1) if p.held else 0.0
    # The rows of a block wait for each other where a row is more than a warp's.
    waiting = 0.15 if plan.warps > 1 and p.rows > 1 else 0.0
    # A second read comes from the caches, but a thread waits for it.
    again = 0.0 if p.held else 1.0
    shape = Shape(
        moved_bytes=moved_bytes,
        blocks=plan.blocks,
        threads=plan.threads,
        registers=plan.registers,
        accesses=elements * streams,
        waste=(1 + 0.3 * idle) * (1 + waiting) * (1 + turns) * (1 + again),
    )
    return predicted_us(shape, sm_count)


# A GPU starts one block after another.
_LAUNCH_US = 1.23e-3
# Bytes a microsecond: from memory, and of tensors that stay in the L2 cache from the kernel before.
_MEMORY, _CACHE = 4.1e6, 5.1e6
_CACHE_BYTES = 50e6
_THREADS_PER_SM, _BLOCKS_PER_SM, _REGISTERS_PER_SM = 2048, 32, 65536
# Of a kernel that does nothing, and of one access to an element more in a thread, alone and for each warp beside it.
_BASE_US, _ACCESS_US, _BESIDE = 1.0, 1.5e-3, 0.133
_SHARPNESS = 4
_EARLY_PER_SM = 2


@dataclass(frozen=True)
class Shape:
    """The sizes that a kernel's time depends on."""

    moved_bytes: float  # Read and written.
    # Of the grid, of a block, of a thread.
    blocks: int
    threads: int
    registers: int
    accesses: float  # Elements of tensors that a thread reads.
    waste: float = 1.0  # 1 plus what is lost to idle threads and to threads that wait for each other.


def predicted_us(shape: Shape, sm_count: int) -> float:
    """Return a time to compare kernels of one function by.

    The figures are fits to 350 kernels (norms, softmax, elementwise chains; 12 kB to 450 MB moved) that were timed in
    CUDA graphs on an H200. By them the first candidates of the 23 cases took 2 % longer than the best ones (geometric
    mean), 9 % at most. Starting the blocks and moving the bytes go on at the same time; the latency of one thread's
    work comes on top.
    """
    fitting = (_BLOCKS_PER_SM, _THREADS_PER_SM // shape.threads, _REGISTERS_PER_SM // (shape.registers * shape.threads))
    resident = max(1, min(*fitting, math.ceil(shape.blocks / sm_count)))
    # One block alone cannot read while it writes.
    overlap = resident**2 / (resident**2 + 0.27)
    rate = _MEMORY if shape.moved_bytes > _CACHE_BYTES else _CACHE
    moving = shape.moved_bytes / rate / overlap * shape.waste
    work = shape.accesses * _ACCESS_US * (1 + _BESIDE * resident * shape.threads / 32)
    latency = (_BASE_US + work) * shape.waste
    # Two blocks a multiprocessor start while the kernel before ends.
    starting = _LAUNCH_US * max(0, shape.blocks - _EARLY_PER_SM * sm_count)
    return float((starting**_SHARPNESS + (moving + latency) ** _SHARPNESS) ** (1 / _SHARPNESS))
