"""Sizes of the kernel of `stream.py` for a function and parameters, or a refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CudaLimits
from relaxtune.schedules.templates.base import Parameters, added, refuse_registers
from relaxtune.schedules.templates.gemv.plan import (
    COLUMNS,
    LANES,
    LOAD_BYTES,
    SHARED_PAD,
    TILE,
    WARP,
    StepSizes,
    load_length,
    refuse_groups,
)
from relaxtune.schedules.tir.epilogue import MatmulFunction, Quantisation
from relaxtune.schedules.tir.row_norm import COUNT

# Elements of a copy of scales: a load's bytes of halves.
SCALES = 8
# Shared memory with which two blocks fit into a multiprocessor: this kernel's, and the next one's that starts early.
SHARED_MAX = 110_000
# Steps of a warp for a tile: the code is written out for each.
_TURNS_MAX = 32
# Registers that a thread needs beside what is listed in `make_stream_plan`, measured: quantised weights, and others.
_REGISTERS_BESIDE, _PLAIN_REGISTERS_BESIDE = 52, 44


@dataclass(frozen=True)
class GemvStreamParameters(Parameters):
    """Shares of one kernel."""

    template: ClassVar[str] = "gemv_stream"

    tiles: int = 1  # Of 16 rows of W, that a warp makes together.
    warps: int = 8  # Of a block, which share the sum over K.
    depth: int = 8  # Steps of W on their way to a warp's shared memory.
    blocks: int = 132  # Of the grid, which share the tiles.
    dependent: bool = False  # Whether the kernel may start before the one before it has ended.
    # Steps that are asked for before x, which waits for the kernel before; 0 for all. Loads arrive in their order.
    early: int = added(0)
    # Whether the sums of all tiles of a block wait in shared memory until its last one, so that its warps wait for each
    # other but once.
    collected: bool = added(False)
    split: int = added(1)  # Neighbours among the blocks that share the sum over K.
    # Steps of x that a warp keeps in registers, each of which makes room for a later one; 0 for all.
    held: int = added(0)

    @property
    def groups(self) -> int:
        """Blocks, or neighbours that share K, that share the tiles."""
        return self.blocks // self.split


@dataclass(frozen=True)
class GemvStreamPlan(StepSizes):
    """Sizes of one kernel."""

    parameters: GemvStreamParameters  # What it is made from.
    stored: Quantisation | None  # How W is; None where it is of x's dtype.
    length: int  # Weights of a row that a lane reads with one load.
    k: int  # Of the sum over K, what a block makes.
    steps: int  # Steps along it: 4 loads of each row.
    turns: int  # Steps of one warp.
    held: int  # Steps whose x a warp keeps in registers.
    column_tiles: int  # Tiles of 8 rows of x.
    row_tiles: int  # Tiles of the matrix.
    rounds: int  # Tiles of a block at most.
    scale_rows: int  # Rows of scales in a step; 0 where W has none.
    # Whether products are of levels as they lie (`gemv_multiply`): of 4 bits, where there are registers for it. Of 8 it
    # was no faster, and more registers keep a second block from a multiprocessor.
    levels: bool
    registers: int  # Of a thread, estimated.
    shared_bytes: int  # Of a block.

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.parameters.warps * WARP

    @property
    def grouped(self) -> bool:
        """Whether a step is within a group of scales, so that sums are scaled; else weights are."""
        return self.scale_rows == 1

    @property
    def buffers(self) -> int:
        """Places for the sums of a tile: one is read while the next is written, or all are kept."""
        return self.rounds if self.collected else min(2, self.rounds)

    @property
    def collected(self) -> bool:
        """Whether the sums of several tiles wait for the last one."""
        return self.parameters.collected and self.rounds > 1

    @property
    def ahead(self) -> int:
        """Bytes of W that a block asks for before it uses any."""
        p = self.parameters
        return min(p.depth, self.turns * self.rounds) * self.threads * p.tiles * 2 * LOAD_BYTES


def make_stream_plan(matmul: MatmulFunction, p: GemvStreamParameters, limits: CudaLimits) -> GemvStreamPlan | Refusal:
    """Return the sizes of the kernel for a matmul, or why there is none with these parameters."""
    if min(p.tiles, p.warps, p.depth, p.blocks, p.split) < 1 or not 0 <= p.early <= p.depth:
        shares = f"tiles {p.tiles}, warps {p.warps}, depth {p.depth}, blocks {p.blocks}, split {p.split}"
        return Refusal(f"{shares}, early {p.early}, expected 1 or more and no more early steps than the depth")
    if p.warps * WARP > limits.max_threads_per_block:
        return Refusal(f"{p.warps} warps, expected {limits.max_threads_per_block // WARP} at most")
    stored, length = matmul.stored, load_length(matmul)
    if stored is not None and matmul.n % SCALES:
        return Refusal(
            f"N is {matmul.n}, expected a multiple of {SCALES}: rows of scales start at multiples of 16 bytes"
        )
    step = length * LANES
    if p.split > 1 and (stored is not None or matmul.k % (p.split * step) or p.blocks % p.split):
        return Refusal(f"split is {p.split}, of 16-bit weights expected a divisor of the blocks and steps along K")
    if p.split > 1 and matmul.norm is not None:
        return Refusal(f"split is {p.split}, but statistics of rows are made of whole rows")
    k = matmul.k // p.split
    steps = math.ceil(k / step)
    turns = math.ceil(steps / p.warps)
    if turns > _TURNS_MAX:
        return Refusal(f"{turns} steps of a warp along K, expected {_TURNS_MAX} at most")
    held = min(turns, p.held or turns)
    if turns % held or (held < turns and (stored is not None or matmul.norm is not None)):
        return Refusal(f"held is {held}, expected a divisor of {turns} steps, and all for norms and quantised weights")
    column_tiles = math.ceil(matmul.m / COLUMNS)
    within = stored is not None and (stored.group % step == 0 or stored.group >= matmul.k)
    words = held * column_tiles * length // 2 + p.tiles * (2 * LOAD_BYTES // 4 + column_tiles * 4)
    registers = (_PLAIN_REGISTERS_BESIDE if stored is None else _REGISTERS_BESIDE) + words
    available = min(limits.registers_per_thread, limits.registers_per_block // (p.warps * WARP))
    offsets = turns * column_tiles * 2
    levels = stored is not None and stored.bits == 4 and within and registers + offsets <= available
    registers += offsets if levels else 0
    refusal = refuse_registers(registers, p.warps * WARP, limits) or refuse_groups(matmul, TILE * p.tiles)
    if refusal is not None:
        return refusal
    row_tiles = math.ceil(matmul.n / (TILE * p.tiles))
    if p.groups > row_tiles:
        return Refusal(f"blocks is {p.blocks}, expected {row_tiles * p.split} at most: each makes a tile or more")
    rounds = math.ceil(row_tiles / p.groups)
    if p.split > 1 and rounds > 1 and not p.collected:
        return Refusal(f"split is {p.split}, expected sums of all tiles to be collected: they are exchanged once")
    scale_rows = 0 if stored is None else 1 if within else LANES
    slot = p.tiles * (2 * LOAD_BYTES * WARP + scale_rows * TILE * 2)
    shared = p.warps * (
        p.depth * slot + (rounds if p.collected else min(2, rounds)) * 4 * matmul.m * (TILE * p.tiles + SHARED_PAD)
    )
    if matmul.norm is not None:
        shared += 4 * COUNT * matmul.m * (p.warps + 1)
    # A second block has no place where it finds no registers either, and is not there where none starts early.
    alone = 2 * registers * p.warps * WARP > limits.registers_per_block or not p.dependent
    most = limits.shared_bytes_optin if alone else min(limits.shared_bytes_optin, SHARED_MAX)
    if shared > most:
        return Refusal(f"{shared} bytes of shared memory, expected {most} at most")
    return GemvStreamPlan(
        parameters=p,
        stored=stored,
        length=length,
        k=k,
        steps=steps,
        turns=turns,
        held=held,
        column_tiles=column_tiles,
        row_tiles=row_tiles,
        rounds=rounds,
        scale_rows=scale_rows,
        levels=levels,
        registers=registers,
        shared_bytes=shared,
    )
