"""Dense convolutions of one or two dimensions on a CPU (patch embeddings, audio front ends).

    C[n, f, y, x] = sum over c, i, j of D[n, c, y * stride + i, x * stride + j] * W[f, c, i, j]

A convolution is a contraction whose rows are output positions and whose columns are filters. The filters are the vector
axis: W is packed so that a panel of filters is contiguous, D is broadcast, and no stride gets in the way. Where the
filters do not fill whole vectors and positions are contiguous (stride 1), positions are the vector axis instead.
Grouped and depthwise convolutions have no axis of the filters alone: positions are the vector axis where they fill
whole vectors, else the convolution is left to the generic rule.
"""

from __future__ import annotations

from relaxtune.schedules.cpu.contraction import Tile, TiledContraction, choose_tile, classify, needs_padding
from relaxtune.schedules.cpu.tiling import ContractionRule
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.contraction import find_operands
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock


class Convolution(ContractionRule):
    """Functions with one reduction, which is a contraction over sums of iterators: dense convolutions."""

    name = "cpu-convolution"

    def find(self, block: ScheduledBlock, limits: CpuLimits) -> tuple[TiledContraction, Tile] | None:
        """Return the roles of a convolution's loops and its tile, None where no axis fills whole vectors."""
        return find_convolution(block, limits)


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
