"""The CPU rules for functions of data-parallel blocks, and for every function that no other rule takes.

1. Data-parallel blocks are inlined into their readers. A block of costly calls that is read twice stays apart.
2. Each remaining one: outer loops fused and parallel, innermost elements in vectors of the target's width.
3. A reduction gets its data-parallel loops fused and parallel, and keeps its reduction loops serial inside, where LLVM
   may vectorise them. Anything that is not a plain loop nest over one store (sorts, scans, extern calls) stays as it
   came, which is valid code already.

Reads that are not contiguous along the last output axis (a transpose's) become per-lane loads: the vector unit
still computes and stores, and the writes stay contiguous.
"""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.base import (
    CpuRule,
    cpu_limits,
    inline_spatial,
    schedule_elementwise,
    work_of,
    worth_parallel,
)
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock, is_canonical, list_blocks


class Generic(CpuRule):
    """Everything that no other rule took."""

    name = "cpu-generic"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return a valid schedule."""
        sch = Schedule(func)
        inline_spatial(sch)
        limits = cpu_limits(target)
        for block in list_blocks(sch):
            if not is_canonical(sch, block):
                continue
            if block.is_spatial:
                schedule_elementwise(sch, block, limits)
            elif block.is_reduction:
                schedule_reduction_plainly(sch, block)
        return sch


class Elementwise(Generic):
    """Functions in which every block is data parallel; it goes first, so that no other rule looks at them."""

    name = "cpu-elementwise"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return the schedule, None when a block reduces or is opaque."""
        sch = Schedule(func)
        blocks = list_blocks(sch)
        fits = bool(blocks) and all(block.is_spatial and is_canonical(sch, block) for block in blocks)
        return super().apply(func, target, tunable) if fits else None


class Plain(CpuRule):
    """Every function as it came: valid, serial code.

    It takes functions in which TVM's own schedule primitives fail: fused loops over sums of symbolic sizes, for
    instance, which TVM cannot prove to divide one another.
    """

    name = "cpu-plain"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return the function unchanged."""
        return Schedule(func)


def schedule_reduction_plainly(sch: Schedule, block: ScheduledBlock) -> None:
    """Run the data-parallel loops of one reduction on all cores, the reduction loops serially inside."""
    loops = sch.get_loops(block.rv)
    spatial = [loop for loop, kind in zip(loops, block.kinds, strict=True) if kind == "S"]
    reduce = [loop for loop, kind in zip(loops, block.kinds, strict=True) if kind == "R"]
    parallel = worth_parallel(work_of(sch, block.rv))
    if spatial:
        sch.reorder(*spatial, *reduce)
        outer = sch.fuse(*spatial)
        if parallel:
            sch.parallel(outer)
    sch.decompose_reduction(block.rv, reduce[0])
