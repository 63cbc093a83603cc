"""Matrix multiplication on a CPU: plain, batched, vector times matrix, right operand either way round, any epilogue.

    C[..., m, n] = sum over k of A[..., m, k] * B[..., k, n]    or  B[..., n, k]    or a packed weight, see `packing`

The vector axis is the last axis of the output. `contraction` says how the tile is made; this file says which
functions are matmuls, and what happens to the blocks around one.
"""

from __future__ import annotations

from tvm.ir.expr import TensorLoad
from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc, Var

from relaxtune.schedules.cpu.analysis import ScheduledBlock, find_path_to, is_canonical, list_blocks
from relaxtune.schedules.cpu.base import CpuRule, cpu_limits, inline_spatial, schedule_elementwise
from relaxtune.schedules.cpu.contraction import TiledContraction, choose_tile, classify, find_panel
from relaxtune.schedules.cpu.tiling import schedule_contraction
from relaxtune.schedules.tir.contraction import find_operands
from relaxtune.schedules.tir.expressions import used_vars


class Matmul(CpuRule):
    """Functions with one reduction, which is a matmul by its index expressions."""

    name = "cpu-matmul"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return the schedule, None when the only reduction is not a matmul or there is not exactly one."""
        sch = Schedule(func)
        blocks = list_blocks(sch)
        reductions = [block for block in blocks if not block.is_spatial]
        if len(reductions) != 1 or not all(is_canonical(sch, block) for block in blocks):
            return None
        if find_matmul(reductions[0]) is None:
            return None
        inline_spatial(sch, keep=find_path_to(sch, reductions[0]))
        block = next(block for block in list_blocks(sch) if block.name == reductions[0].name)
        con = find_matmul(block)
        if con is None:
            return None
        limits = cpu_limits(target)
        done = schedule_contraction(sch, con, choose_tile(con, limits), limits)
        for other in list_blocks(sch):
            if other.name not in done and other.is_spatial:
                schedule_elementwise(sch, other, limits)
        return sch


def find_matmul(block: ScheduledBlock) -> TiledContraction | None:
    """Return the roles of a matmul's loops, None when the block is not one.

    Every index of both operands has to be an iterator or a constant (a convolution's are sums), except those of a
    packed weight, and the vector axis is the last one of the output, whichever operand it belongs to.
    """
    operands = find_operands(block.store) if block.is_reduction else None
    spatial = [index for index, kind in enumerate(block.kinds) if kind == "S"]
    if operands is None or not spatial:
        return None
    column = block.axes[spatial[-1]]
    if not all(_has_plain_indices(load) or find_panel(load, column) for load in operands):
        return None
    left, right = operands
    return classify(block, left, right, spatial[-1]) or classify(block, right, left, spatial[-1])


def _has_plain_indices(load: TensorLoad) -> bool:
    return all(isinstance(index, Var) or not used_vars(index) for index in load.indices)
