"""Dense convolutions of one or two dimensions on a CPU (patch embeddings, audio front ends).

    C[n, f, y, x] = sum over c, i, j of D[n, c, y * stride + i, x * stride + j] * W[f, c, i, j]

A convolution is a contraction whose rows are output positions and whose columns are filters. The filters are the vector
axis: W is packed so that a panel of filters is contiguous, D is broadcast, and no stride gets in the way. Where the
filters do not fill whole vectors and positions are contiguous (stride 1), positions are the vector axis instead.
Grouped and depthwise convolutions have no axis of the filters alone and are left to the generic rule.
"""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.analysis import ScheduledBlock, find_path_to, is_canonical, list_blocks
from relaxtune.schedules.cpu.base import CpuRule, cpu_limits, inline_spatial, schedule_elementwise
from relaxtune.schedules.cpu.contraction import Tile, TiledContraction, choose_tile, classify, needs_padding
from relaxtune.schedules.cpu.tiling import schedule_contraction
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.contraction import find_operands


class Convolution(CpuRule):
    """Functions with one reduction, which is a contraction over sums of iterators."""

    name = "cpu-convolution"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return the schedule, None when the only reduction is no dense convolution or there is not exactly one."""
        sch = Schedule(func)
        limits = cpu_limits(target)
        blocks = list_blocks(sch)
        reductions = [block for block in blocks if not block.is_spatial]
        if len(reductions) != 1 or not all(is_canonical(sch, block) for block in blocks):
            return None
        if find_convolution(reductions[0], limits) is None:
            return None
        inline_spatial(sch, keep=find_path_to(sch, reductions[0]))
        block = next(block for block in list_blocks(sch) if block.name == reductions[0].name)
        found = find_convolution(block, limits)
        if found is None:
            return None
        done = schedule_contraction(sch, *found, limits)
        for other in list_blocks(sch):
            if other.name not in done and other.is_spatial:
                schedule_elementwise(sch, other, limits)
        return sch


def find_convolution(block: ScheduledBlock, limits: CpuLimits) -> tuple[TiledContraction, Tile] | None:
    """Return the roles of a convolution's loops and its tile, None where no axis fills whole vectors.

    A tile that does not divide its axis would have to be padded, which TVM does only for indices without sums.
    """
    operands = find_operands(block.store) if block.is_reduction else None
    if operands is None:
        return None
    spatial = [index for index, kind in enumerate(block.kinds) if kind == "S"]
    for column in spatial:
        for left, right in (operands, operands[::-1]):
            con = classify(block, left, right, column)
            if con is None:
                continue
            tile = choose_tile(con, limits, exact=True)
            if not needs_padding(con, tile):
                return con, tile
    return None
