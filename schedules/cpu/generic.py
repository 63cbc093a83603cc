"""The CPU rule for every function that no other rule takes: valid and modest.

Data-parallel blocks are inlined and scheduled as in `elementwise`; a reduction gets its data-parallel loops fused and
parallel, and keeps its reduction loops serial inside, where LLVM may vectorise them. Anything that is not a plain
loop nest over one store (sorts, scans, extern calls) stays as it came, which is valid code already.
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
        """Return a valid schedule; None only for a target that is no CPU."""
        if not self.is_target_available(target):
            return None
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
