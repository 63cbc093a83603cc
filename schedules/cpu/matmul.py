"""Matrix multiplication on a CPU: plain, batched, vector times matrix, right operand either way round, any epilogue.

    C[..., m, n] = sum over k of A[..., m, k] * B[..., k, n]    or  B[..., n, k]    or a packed weight, see `packing`

The vector axis is the last axis of the output. `contraction` has the picture of the tile; this file says which
functions are matmuls.
"""

from __future__ import annotations

from tvm.ir.expr import TensorLoad
from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc, Var

from relaxtune.schedules.cpu.base import CpuRule, cpu_limits, inline_spatial, schedule_elementwise
from relaxtune.schedules.cpu.contraction import Tile, TiledContraction, choose_tile, classify, find_panel
from relaxtune.schedules.cpu.generic import schedule_reduction_plainly
from relaxtune.schedules.cpu.tiling import ContractionRule, schedule_contraction
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.contraction import find_operands
from relaxtune.schedules.tir.expressions import used_vars
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock, find_path_to, is_canonical, list_blocks


class Matmul(ContractionRule):
    """Functions with one reduction, which is a matmul by its index expressions."""

    name = "cpu-matmul"

    def find(self, block: ScheduledBlock, limits: CpuLimits) -> tuple[TiledContraction, Tile] | None:
        """Return the roles of a matmul's loops and its tile, None when the block is not one."""
        con = find_matmul(block)
        return None if con is None else (con, choose_tile(con, limits))


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


# Matmuls that norms were taken into, on a CPU: what their kernels on a GPU are compared with.
#
# The product and its epilogue are scheduled as in `matmul`; statistics of rows before it, and partial sums of its
# result after it (`schedules.tir.row_norm`), are loops of their own.


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
