"""Matrix multiplication on a CPU: plain, batched, vector times matrix, right operand either way round, any epilogue.

    C[..., m, n] = sum over k of A[..., m, k] * B[..., k, n]    or  B[..., n, k]    or a packed weight, see `packing`

The vector axis is the last axis of the output. `contraction` has the picture of the tile; this file says which
functions are matmuls.
"""

from __future__ import annotations

from tvm.ir.expr import TensorLoad
from tvm.tirx import Var

from relaxtune.schedules.cpu.contraction import Tile, TiledContraction, choose_tile, classify, find_panel
from relaxtune.schedules.cpu.tiling import ContractionRule
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.contraction import find_operands
from relaxtune.schedules.tir.expressions import used_vars
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock


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
