"""Matmuls that norms were taken into, on a CPU: what their kernels on a GPU are compared with.

The product and its epilogue are scheduled as in `tiling`; statistics of rows before it, and partial sums of its result
after it (`schedules.tir.row_norm`), are loops of their own.
"""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.base import CpuRule, cpu_limits, inline_spatial, schedule_elementwise
from relaxtune.schedules.cpu.contraction import choose_tile, find_matmul
from relaxtune.schedules.cpu.generic import schedule_reduction_plainly
from relaxtune.schedules.cpu.tiling import schedule_contraction
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.scheduled_blocks import find_path_to, is_canonical, list_blocks


class NormedMatmul(CpuRule):
    """Functions that `recognise_matmul` takes, with statistics of rows or partial sums."""

    name = "cpu-normed-matmul"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return the schedule, None for any other function."""
        found = recognise_matmul(func)
        if isinstance(found, Refusal) or (found.norm is None and found.partials is None):
            return None
        sch = Schedule(func)
        blocks = list_blocks(sch)
        products = [block for block in blocks if find_matmul(block) is not None]
        if len(products) != 1 or not all(is_canonical(sch, block) for block in blocks):
            return None
        statistics = [block.name for block in found.norm.blocks] if found.norm is not None else []
        inline_spatial(sch, keep=[*statistics, *find_path_to(sch, products[0])])
        if found.norm is not None:
            # What reads statistics cannot be moved under the product's loops; a copy of the sums is, in its place.
            sch.cache_write(products[0].rv, 0, "global")
        con = find_matmul(next(block for block in list_blocks(sch) if block.name == products[0].name))
        if con is None:
            return None
        limits = cpu_limits(target)
        done = schedule_contraction(sch, con, choose_tile(con, limits), limits)
        for other in list_blocks(sch):
            if other.name in done:
                continue
            if other.is_reduction:
                schedule_reduction_plainly(sch, other)
            elif other.is_spatial:
                schedule_elementwise(sch, other, limits)
        return sch
