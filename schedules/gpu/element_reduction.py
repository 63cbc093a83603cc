"""Reductions and what follows them element by element, one thread an element, as one kernel.

The pattern: one reduction (spatial axes, then reduced ones) and one block that reads each of its elements once, at the
element's own place: scores of one query, scaled and masked. Where an axis is a sum (`past + 1` keys), dlight's rules
for reductions do not see that loops cover it; its last rule launches a kernel for each of the two blocks.

1. Inline what comes before the reduction, and make one block of what follows.
2. Compute the reduction inside the loops of what follows, in a register.
3. Fuse these loops, and bind them to blocks of threads.

Left out: several reductions, and elements that are read more than once, which would be computed as often.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Var
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.dlight.analysis import SBlockInfo, get_root_block, normalize_prim_func
from tvm.s_tir.dlight.base import try_inline
from tvm.s_tir.dlight.base.schedule_rule import ScheduleRule
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.gpu.unit_reductions import without_unit_reductions

_THREADS = 256


class ElementReduction(ScheduleRule):  # type: ignore[misc]  # dlight has no type information
    """Schedules a reduction and what follows it as one kernel, a thread for each element."""

    name = "element-reduction"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return a schedule, None for a function that is not of the pattern."""
        del target, tunable
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
    return _reads_once(sch.get(following.block_rv), written[0])


def _reads_once(block: SBlock, buffer: tirx.Var) -> bool:
    """Whether each element of a block reads one element of a buffer, and no other one reads that."""
    read = [region.region for region in block.reads if region.source.same_as(buffer)]
    if len(read) != 1 or any(axis.extent != 1 for axis in read[0]):
        return False
    places = [axis.min for axis in read[0]]
    if not all(isinstance(place, Var | tirx.IntImm) for place in places):
        return False
    return all(any(axis.var.same_as(place) for place in places) for axis in block.iter_vars)
