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

from relaxtune.schedules.cpu.base import cpu_limits, inline_spatial, schedule_elementwise, work_of, worth_parallel
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock, is_canonical, list_blocks


def generic(func: PrimFunc, target: Target) -> Schedule | None:
    """Return a valid schedule of any function."""
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


def elementwise(func: PrimFunc, target: Target) -> Schedule | None:
    """Return the schedule of data-parallel blocks alone, so that no other rule looks at them; None for others."""
    sch = Schedule(func)
    blocks = list_blocks(sch)
    fits = bool(blocks) and all(block.is_spatial and is_canonical(sch, block) for block in blocks)
    return generic(func, target) if fits else None


def plain(func: PrimFunc, _target: Target) -> Schedule | None:
    """Return a function as it came: valid, serial code.

    TVM's own schedule primitives fail in some: fused loops over sums of symbolic sizes, for instance, which TVM cannot
    prove to divide one another.
    """
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
