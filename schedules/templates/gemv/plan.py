"""Sizes of the kernels of `template.py` for a function and parameters, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import ClassVar

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CudaLimits, Feature
from relaxtune.schedules.templates.base import Parameters, added, refuse_registers
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.row_norm import COUNT

#: The most rows that templates for few rows take: each weight is read once and multiplied by all of them.
ROWS_MAX = 16
# Of W in a tile: the m of mma.m16n8k16. Of x in one: its n.
TILE, COLUMNS = 16, 8
# Bytes of a load; 4 lanes read neighbouring parts of a row.
LOAD_BYTES, LANES = 16, 4
WARP = 32
# Elements after each row of partial sums: lanes that store different rows of x then hit different banks.
SHARED_PAD = 4
# Halves after each row of x, 16 bytes: so do lanes that read different rows.
X_PAD = 8
# Shared memory with which two blocks fit into a multiprocessor: of this kernel, and of the next one that starts early.
SHARED_MAX = 110_000
# Elements of a copy of scales: a load's bytes of halves.
SCALES = 8
# Steps of a warp for a tile of the template for streams: the code is written out for each.
_TURNS_MAX = 32
# Registers that a thread needs beside what is listed in `make_plan`, measured.
_REGISTERS_BESIDE = 40
# And in `make_stream_plan`: with quantised weights, and with others.
_STREAM_BESIDE, _PLAIN_STREAM_BESIDE = 52, 44


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
class FewRowsPlan:
    """Sizes of a kernel for few rows."""

    parameters: GemvParameters | GemvStreamParameters  # Parameters of the plan.
    length: int  # Weights of a row that a lane reads with one load.
    k: int  # Of the sum over K, what a block makes.
    steps: int  # Steps along it: 4 loads of each row.
    turns: int  # Steps of one warp.
    column_tiles: int  # Tiles of 8 rows of x.
    registers: int  # Of a thread, estimated.
    shared_bytes: int  # Of a block.
    grouped: bool  # Whether a step is within a group of scales, so that sums are scaled; else weights are.

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

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.parameters.warps * WARP


@dataclass(frozen=True)
class GemvPlan(FewRowsPlan):
    """Sizes of one kernel."""

    parameters: GemvParameters
    blocks: int  # Of the grid.

    @property
    def rounds(self) -> int:
        """Times that loads are issued and waited for."""
        return math.ceil(self.turns / self.parameters.unroll)

    @property
    def span(self) -> int:
        """Weights of a row in a round, those of all warps."""
        return self.step * self.parameters.warps * self.parameters.unroll


@dataclass(frozen=True)
class GemvStreamPlan(FewRowsPlan):
    """Sizes of one kernel."""

    parameters: GemvStreamParameters  # Parameters of the plan.
    held: int  # Steps whose x a warp keeps in registers.
    row_tiles: int  # Tiles of the matrix.
    rounds: int  # Tiles of a block at most.
    scale_rows: int  # Rows of scales in a step; 0 where W has none.
    # Whether products are of levels as they lie (`multiply.py`): of 4 bits, where there are registers for it. Of 8 it
    # was no faster, and more registers keep a second block from a multiprocessor.
    levels: bool

    @property
    def buffers(self) -> int:
        """Places for the sums of a tile: one is read while the next is written, or all are kept."""
        return self.rounds if self.collected else min(2, self.rounds)

    @property
    def collected(self) -> bool:
        """Whether the sums of several tiles wait for the last one."""
        return self.parameters.collected and self.rounds > 1


def makes_few_rows(rows: int | None, features: AbstractSet[Feature]) -> bool:
    """Whether a template for few rows is worth a form of its own of a matmul by a constant in half precision.

    It is where the template for many rows multiplies by mma.sync: one row with K 8192 and N 2048 took that one 29 us on
    an H200, this one 11.2 (`benchmarks/results/h200-decode-sm80.json`). Kernels of wgmma are as fast as either.
    """
    return rows is not None and rows <= ROWS_MAX and Feature.MMA in features and Feature.WGMMA not in features


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
    refusal = refuse_registers(registers, p.warps * WARP, limits) or _refuse_groups(matmul, TILE * p.tiles)
    if refusal is not None:
        return refusal
    span = step * p.warps * p.unroll
    shared = 4 * p.warps * matmul.m * (TILE * p.tiles + SHARED_PAD)
    if p.staged:
        shared += 2 * matmul.m * (span + X_PAD)
    if matmul.norm is not None:
        shared += 4 * COUNT * matmul.m * (matmul.norm.groups + 1)
    most = min(limits.shared_bytes_optin, SHARED_MAX)
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
        registers=registers,
        shared_bytes=shared,
        grouped=stored is not None and (stored.group % step == 0 or stored.group >= matmul.k),
    )


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
    registers = (_PLAIN_STREAM_BESIDE if stored is None else _STREAM_BESIDE) + words
    available = min(limits.registers_per_thread, limits.registers_per_block // (p.warps * WARP))
    offsets = turns * column_tiles * 2
    levels = stored is not None and stored.bits == 4 and within and registers + offsets <= available
    registers += offsets if levels else 0
    refusal = refuse_registers(registers, p.warps * WARP, limits) or _refuse_groups(matmul, TILE * p.tiles)
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
        grouped=within,
        registers=registers,
        shared_bytes=shared,
    )


def _refuse_groups(matmul: MatmulFunction, rows: int) -> Refusal | None:
    """Return why no kernel writes a function's partial sums: lanes make each, of some of the `rows` of a block."""
    partials = matmul.partials
    if partials is None or (partials.group in (16, 32) and rows % partials.group == 0):
        return None
    return Refusal(f"sums of groups of {partials.group} columns, expected 16 or 32 that divide the {rows} of a block")
