"""The default rules for CUDA: TVM's dlight and ours, in the order in which they are asked, held to binding every block.

dlight's transpose rule takes a function for its last transpose alone and leaves every block after that one unbound (the
halves of a concatenation, say). A schedule like that is no answer: the function goes to the next rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Var
from tvm.ir.expr import TensorLoad
from tvm.s_tir import SBlock, Schedule, ScheduleError, dlight
from tvm.s_tir.dlight.analysis import SBlockInfo, get_root_block, normalize_prim_func
from tvm.s_tir.dlight.base import ScheduleRule, try_inline
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.gpu.binding import launches_threads, list_unbound_blocks
from relaxtune.schedules.gpu.launch_limits import exceeded_limit
from relaxtune.schedules.gpu.recurrence import recurrence
from relaxtune.schedules.tir.blocks import list_blocks
from relaxtune.schedules.tir.expressions import BINARY

logger = logging.getLogger(__name__)

# Reductions over axes of one place, as the assignments that they are.
#
# dlight inlines what follows into such a reduction as if it were elementwise, and so applies it twice, to the start and
# to the one step: a bias behind a matmul of K = 1 was added twice, `x - mean(x)` of one place read memory that nothing
# wrote.


def without_unit_reductions(func: PrimFunc) -> PrimFunc:
    """Return a function whose sums, products, maxima and minima over one place are assignments."""

    def assigned(block: SBlock) -> SBlock:
        body = _assigned(block)
        if body is None:
            return block
        axes = [tirx.IterVar(axis.dom, axis.var, tirx.IterVar.DataPar, axis.thread_tag) for axis in block.iter_vars]
        return SBlock(
            axes, block.reads, block.writes, block.name_hint, body, None, block.alloc_buffers, block.match_buffers,
            block.annotations,
        )  # fmt: skip

    units = [block.stmt for block in list_blocks(func) if _assigned(block.stmt) is not None]
    return func.with_body(tvm_ffi.structural_map(func.body, (SBlock, assigned))) if units else func


def _assigned(block: SBlock) -> tirx.BufferStore | None:
    """Return the assignment that a reduction over one place is, None for any other block."""
    store, start = block.body, block.init
    reduced = [axis for axis in block.iter_vars if axis.iter_type == tirx.IterVar.CommReduce]
    one = all(isinstance(axis.dom.extent, tirx.IntImm) and int(axis.dom.extent) == 1 for axis in reduced)
    if not one or not isinstance(start, tirx.BufferStore) or not isinstance(store, tirx.BufferStore):
        return None
    value = store.value
    if not isinstance(value, BINARY) or not isinstance(value.a, TensorLoad) or not value.a.source.same_as(store.buffer):
        return None
    return tirx.BufferStore(store.buffer, type(value)(start.value, value.b), store.indices)


# dlight's rules check their assumptions with Python's asserts and whatever their Python code runs into.
_MISJUDGED = (AssertionError, AttributeError, LookupError, TypeError, ValueError)


class Transpose(dlight.gpu.Transpose):  # type: ignore[misc]  # dlight has no type information
    """dlight's rule, which compares indices with `==` and so raises on a constant one (an axis of length 1)."""

    def is_transpose(self, sch: Schedule, block_rv: SBlockRV) -> bool:
        """Whether a block copies with the same iterators in another order."""
        store = sch.get(block_rv).body
        if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, TensorLoad):
            return False
        written, read = list(store.indices), list(store.value.indices)
        if len(written) != len(read) or not all(isinstance(index, Var) for index in (*written, *read)):
            return False
        moved = any(not left.same_as(right) for left, right in zip(written, read, strict=True))
        return moved and set(written) == set(read)


Rule = Callable[[PrimFunc, Target], Schedule | None]


def binding_rule(rule: ScheduleRule) -> Rule:
    """Return a dlight rule whose schedules count only where GPU threads run every block, and do not ask for too much.

    It raises `tvm.s_tir.ScheduleError` where dlight runs into a function that it does not understand.
    """

    def apply(func: PrimFunc, target: Target) -> Schedule | None:
        try:
            sch = rule.apply(without_unit_reductions(func), target, False)
        except _MISJUDGED as error:
            raise ScheduleError(f"{type(error).__name__} in dlight: {error}") from error
        return None if sch is None or list_unbound_blocks(sch.mod["main"]) or not _fits(sch, target) else sch

    return apply


def _fits(sch: Schedule, target: Target) -> bool:
    """Return whether TVM can lower a schedule, and a launch of the target can have what it then asks for.

    It cannot lower dlight's reduction over threads of a grouped convolution, for one.
    """
    try:
        exceeded = exceeded_limit(sch.mod["main"], target)
    except (tvm.error.InternalError, TypeError, ValueError):
        return False
    if exceeded is not None:
        logger.debug("a schedule of dlight takes %s", exceeded)
    return exceeded is None


def bound(func: PrimFunc, _target: Target) -> Schedule | None:
    """Return code that names its threads itself (TVM's scatters) as it is; None where threads are left to be bound."""
    return Schedule(func) if launches_threads(func) and not list_unbound_blocks(func) else None


def cuda_rules() -> list[tuple[str, Rule]]:
    """Return the rules with their names for reports; the last one takes every function that has blocks."""

    def named(rule: ScheduleRule) -> tuple[str, Rule]:
        return f"dlight-{type(rule).__name__.lower()}", binding_rule(rule)

    rules = (dlight.gpu.Matmul(), dlight.gpu.GEMV(), dlight.gpu.Reduction(), dlight.gpu.GeneralReduction(), Transpose())
    last = named(dlight.gpu.Fallback())
    return [
        ("recurrence", recurrence),
        ("bound", bound),
        *map(named, rules),
        ("element-reduction", element_reduction),
        last,
    ]


# Reductions and what follows them element by element, one thread an element, as one kernel.
#
# The pattern: one reduction (spatial axes, then reduced ones) and one block that reads each of its elements once, at
# the element's own place: scores of one query, scaled and masked. Where an axis is a sum (`past + 1` keys), dlight's
# rules for reductions do not see that loops cover it; its last rule launches a kernel for each of the two blocks.
#
# 1. Inline what comes before the reduction, and make one block of what follows.
# 2. Compute the reduction inside the loops of what follows, in a register.
# 3. Fuse these loops, and bind them to blocks of threads.
#
# Left out: several reductions, and elements that are read more than once, which would be computed as often.

_THREADS = 256


def element_reduction(func: PrimFunc, _target: Target) -> Schedule | None:
    """Return a reduction and what follows it as one kernel, a thread for each element; None for other functions."""
    sch = Schedule(without_unit_reductions(func))
    infos = try_inline(sch, normalize_prim_func(sch) or [])
    if len(infos) != 2 or not _follows(sch, *infos):
        return None
    reduction, following = (info.block_rv for info in infos)
    loops = sch.get_loops(following)
    sch.compute_at(reduction, loops[-1], preserve_unit_loops=True)
    sch.set_scope(reduction, 0, "local")
    blocks, threads = sch.split(sch.fuse(*loops), [None, _THREADS])
    sch.bind(blocks, "blockIdx.x")
    sch.bind(threads, "threadIdx.x")
    sch.decompose_reduction(reduction, sch.get_loops(reduction)[2])
    return sch


def _follows(sch: Schedule, reduction: SBlockInfo, following: SBlockInfo) -> bool:
    """Whether a block reads each element of a reduction, an intermediate, once."""
    spatial, reduced = following.dom_kind(), reduction.dom_kind().lstrip("S")
    if set(spatial) != {"S"} or set(reduced) != {"R"} or reduction.dom_kind() != spatial + reduced:
        return False
    written = [write.source for write in sch.get(reduction.block_rv).writes]
    kept = sch.get(get_root_block(sch)).alloc_buffers
    if len(written) != 1 or not any(buffer.same_as(written[0]) for buffer in kept):
        return False
    block = sch.get(following.block_rv)
    read = [region.region for region in block.reads if region.source.same_as(written[0])]
    if len(read) != 1 or any(axis.extent != 1 for axis in read[0]):
        return False
    places = [axis.min for axis in read[0]]
    if not all(isinstance(place, Var | tirx.IntImm) for place in places):
        return False
    return all(any(axis.var.same_as(place) for place in places) for axis in block.iter_vars)
