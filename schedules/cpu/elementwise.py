"""Elementwise, broadcast and data movement (transpose, reshape, concatenate, gather) on a CPU.

out[i...] = f(in_1[g_1(i...)], ..., in_n[g_n(i...)]), every block data parallel.

1. Inline all intermediate blocks into the outputs; what is costly and read twice stays a stage of its own.
2. Each remaining block: outer loops fused and parallel, innermost elements in vectors of the target's width.

Reads that are not contiguous along the last output axis (a transpose's) become per-lane loads: the vector unit
still computes and stores, and the writes stay contiguous.
"""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.base import CpuRule, cpu_limits, inline_spatial, schedule_elementwise
from relaxtune.schedules.tir.scheduled_blocks import is_canonical, list_blocks


class Elementwise(CpuRule):
    """Functions in which every block is data parallel."""

    name = "cpu-elementwise"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return the schedule, None when a block reduces or is opaque."""
        sch = Schedule(func)
        blocks = list_blocks(sch)
        if not blocks or not all(block.is_spatial and is_canonical(sch, block) for block in blocks):
            return None
        inline_spatial(sch)
        limits = cpu_limits(target)
        for block in list_blocks(sch):
            schedule_elementwise(sch, block, limits)
        return sch
