"""Sizes of the kernel of `template.py` for a function and parameters, or a refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CudaLimits
from relaxtune.schedules.templates.base import Parameters, added, refuse_registers
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.row_norm import COUNT

# Of W in a tile: the m of mma.m16n8k16. Of x in one: its n.
TILE, COLUMNS = 16, 8
# Bytes of a load; 4 lanes read neighbouring parts of a row.
LOAD_BYTES, LANES = 16, 4
WARP = 32
# Elements after each row of partial sums: lanes that store different rows of x then hit different banks.
SHARED_PAD = 4
# Halves after each row of x, 16 bytes: so do lanes that read different rows.
X_PAD = 8
# Shared memory with which two blocks fit into a multiprocessor.
_SHARED_MAX = 110_000
# Registers that a thread needs beside what is listed in `make_plan`, measured.
_REGISTERS_BESIDE = 40


@dataclass(frozen=True)
class GemvParameters(Parameters):
    """Shares of one kernel."""

    template: ClassVar[str] = "gemv"

    tiles: int = 1  # Of 16 rows of W, that a warp makes.
    warps: int = 8  # Of a block, which share the sum over K.
    unroll: int = 4  # Steps along K whose loads are in flight together.
    # Whether the part of x that a round of loads needs is copied to shared memory; else each warp reads its own.
    staged: bool = True
    dependent: bool = False  # Whether the kernel may start before the one before it has ended.
    split: int = added(1)  # Blocks that share the sum over K.


class Tiled(Protocol):
    """Parameters of a kernel whose warps make so many tiles of 16 rows of W together."""

    @property
    def tiles(self) -> int:
        """How many."""
        ...


class StepSizes:
    """Sizes of a step along K, from the weights in a load and the tiles."""

    length: int
    parameters: Tiled

    @property
    def step(self) -> int:
        """Weights of a row in a step."""
        return self.length * LANES

    @property
    def rows(self) -> int:
        """Rows of W that a warp makes together."""
        return TILE * self.parameters.tiles

    @property
    def words_x(self) -> int:
        """Registers of x for a step and 8 rows."""
        return self.length // 2


@dataclass(frozen=True)
class GemvPlan(StepSizes):
    """Sizes of one kernel."""

    parameters: GemvParameters  # What it is made from.
    length: int  # Weights of a row that a lane reads with one load.
    k: int  # Of the sum over K, what a block makes.
    steps: int  # Steps along it: 4 loads of each row.
    turns: int  # Steps of one warp.
    column_tiles: int  # Tiles of 8 rows of x.
    blocks: int  # Of the grid.
    threads: int  # Of a block.
    registers: int  # Of a thread, estimated.
    shared_bytes: int  # Of a block.
    grouped: bool  # Whether a step is within a group of scales, so that sums are scaled; else weights are.

    @property
    def rounds(self) -> int:
        """Times that loads are issued and waited for."""
        return math.ceil(self.turns / self.parameters.unroll)

    @property
    def span(self) -> int:
        """Weights of a row in a round, those of all warps."""
        return self.step * self.parameters.warps * self.parameters.unroll

    @property
    def in_flight(self) -> int:
        """Bytes of W that a block's threads wait for together."""
        p = self.parameters
        return self.threads * min(p.unroll, self.turns) * p.tiles * 2 * LOAD_BYTES


def load_length(matmul: MatmulFunction) -> int:
    """Return the weights in a load of 16 bytes."""
    return 8 * LOAD_BYTES // matmul.weight_bits


def make_plan(matmul: MatmulFunction, p: GemvParameters, limits: CudaLimits) -> GemvPlan | Refusal:
    """Return the sizes of the kernel for a function, or why there is none with these parameters."""
    if min(p.tiles, p.warps, p.unroll, p.split) < 1:
        return Refusal(f"tiles {p.tiles}, warps {p.warps}, unroll {p.unroll}, split {p.split}, expected 1 or more")
    if p.warps * WARP > limits.max_threads_per_block:
        return Refusal(f"{p.warps} warps, expected {limits.max_threads_per_block // WARP} at most")
    stored = matmul.stored
    length = load_length(matmul)
    step = length * LANES
    if p.split > 1 and (stored is not None or matmul.k % (p.split * step)):
        return Refusal(f"split is {p.split}, of 16-bit weights expected a divisor of the steps along K")
    k = matmul.k // p.split
    steps = math.ceil(k / step)
    column_tiles = math.ceil(matmul.m / COLUMNS)
    words = p.unroll * p.tiles * (2 * LOAD_BYTES // 4 + (1 if stored else 0))
    words += (1 if p.staged else p.unroll) * column_tiles * length // 2
    # Registers that a pair of rows is unpacked into.
    unpacked = length if stored else 0
    registers = _REGISTERS_BESIDE + words + unpacked + p.tiles * column_tiles * 4
    refusal = refuse_registers(registers, p.warps * WARP, limits)
    if refusal is not None:
        return refusal
    refusal = refuse_groups(matmul, TILE * p.tiles)
    if refusal is not None:
        return refusal
    span = step * p.warps * p.unroll
    shared = 4 * p.warps * matmul.m * (TILE * p.tiles + SHARED_PAD)
    if p.staged:
        shared += 2 * matmul.m * (span + X_PAD)
    if matmul.norm is not None:
        shared += 4 * COUNT * matmul.m * (matmul.norm.groups + 1)
    most = min(limits.shared_bytes_optin, _SHARED_MAX)
    if shared > most:
        return Refusal(f"{shared} bytes of shared memory, expected {most} at most")
    return GemvPlan(
        parameters=p,
        length=length,
        k=k,
        steps=steps,
        turns=math.ceil(steps / p.warps),
        column_tiles=column_tiles,
        blocks=math.ceil(matmul.n / (TILE * p.tiles)) * p.split,
        threads=p.warps * WARP,
        registers=registers,
        shared_bytes=shared,
        grouped=stored is not None and (stored.group % step == 0 or stored.group >= matmul.k),
    )


def refuse_groups(matmul: MatmulFunction, rows: int) -> Refusal | None:
    """Return why no kernel writes a function's partial sums: lanes make each, of some of the `rows` of a block."""
    partials = matmul.partials
    if partials is None or (partials.group in (16, 32) and rows % partials.group == 0):
        return None
    return Refusal(f"sums of groups of {partials.group} columns, expected 16 or 32 that divide the {rows} of a block")
