"""Sizes of the kernel of `template.py` for a shape and parameters, or a refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CudaLimits, Feature
from relaxtune.schedules.templates.base import POSITIVE, Parameters, added, among, refuse_registers, refuse_shared
from relaxtune.schedules.templates.emit.async_copy import COPY_BYTES
from relaxtune.schedules.templates.emit.tensor_cores import FLOAT8_KINDS
from relaxtune.schedules.templates.output.output_shares import (
    Shares,
    has_vectors,
    residual_registers,
    share_unit,
    shared_bytes,
)
from relaxtune.schedules.tir.blocks import element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.row_norm import COUNT

#: Along K of a step of the kernel where B is quantised: each has one scale a column.
STORED_DEPTH = 32
#: Features of a GPU that the kernel needs.
FEATURES = frozenset({Feature.MMA, Feature.CP_ASYNC, Feature.LDMATRIX})
# Of a quantised B: scales in a copy of 16 bytes, and what a lane reads along K at a time.
_SCALES, _NEIGHBOURS = 8, 8
WARP = 32
# Of an instruction of tensor cores: rows, columns, depth of halves, and bytes of a row.
ROWS, COLUMNS, DEPTH = 16, 8, 16
_STEP_BYTES = 2 * DEPTH
_ROW_BYTES = 128
# Where B is quantised, of its scales in float16.
_SCALE_BYTES = 2
# In float32, a thread multiplies as it has sums of such an instruction: a chunk of 16 bytes along K at a time.
FLOAT_DEPTH = 4
_WARPS_MAX = 16
# Registers of a thread beside accumulators and fragments (addresses, the epilogue's values), measured.
_REGISTERS_BESIDE = 46
# With fewer left, the epilogue evaluates fewer columns side by side; least where rows are written by element.
_REGISTERS_TO_EVALUATE = 130
_BATCH, _SMALL_BATCH, _LEAST_BATCH = 32, 16, 8


@dataclass(frozen=True)
class GemmParameters(Parameters):
    """Tile sizes and warps of one kernel."""

    template: ClassVar[str] = "gemm_sm80"

    block_m: int = 128  # Rows of the tile of C that a block makes.
    block_n: int = 128  # Its columns.
    block_k: int = 32  # Depth of a stage.
    stages: int = among(4, range(2, 9))  # Of the ring of tiles in shared memory.
    # Warps of a block along the rows and the columns of its tile.
    warps_m: int = 2
    warps_n: int = 2
    group: int = among(1, POSITIVE)  # Rows of tiles that are made column by column before the next ones are begun.
    dependent: bool = False  # Whether the kernel may start before the one before it has ended.
    split_k: int = added(1)  # Blocks that share the sum of a tile.


@dataclass(frozen=True)
class GemmPlan:
    """Sizes of one kernel."""

    parameters: GemmParameters  # Parameters of the plan.
    threads: int  # Of a block.
    # Rows and columns of tiles; of a symbolic number of rows, those of the number that was planned for.
    tiles_m: int
    tiles_n: int
    k_tiles: int  # Tiles of K of a block's sum.
    depth: int  # Of a step along K.
    # Instructions, or parts of their size, that make a warp's rows and columns.
    m_steps: int
    n_steps: int
    shares: Shares  # Who writes what of a tile.
    registers: int  # Of a thread, about.
    tile_bytes: tuple[int, int, int]  # Of A, of B and of its scales in one stage.
    scale_rows: int  # Rows of scales in a stage, 0 where B is not quantised.
    shared_bytes: int  # Of a block.
    # Whether a stage's sums are added up outside the tensor cores, which keep too few bits of those of float8.
    sums_outside: bool

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold sums."""
        return self.m_steps * self.n_steps * 4


def make_plan(
    matmul: MatmulFunction, p: GemmParameters, limits: CudaLimits, *, float8_cores: bool = False
) -> GemmPlan | Refusal:
    """Return the sizes of the kernel for a matmul, or why there is none with these parameters.

    `float8_cores` says whether the target has such tensor cores; else a warp makes halves of float8.
    """
    size = element_bytes(matmul.input_dtype)
    depth = STORED_DEPTH if matmul.stored else FLOAT_DEPTH if is_plain(matmul) else _STEP_BYTES // size
    refusal = p.refuse_values() or _refuse_parameters(p, 2 * depth, _ROW_BYTES // size)
    refusal = refusal or _refuse_shares(matmul, p)
    if refusal is not None:
        return refusal
    warps = p.warps_m * p.warps_n
    m_steps, n_steps = p.block_m // p.warps_m // ROWS, p.block_n // p.warps_n // COLUMNS
    accumulators = m_steps * n_steps * 4
    # Fragments of two steps along K: those that are multiplied, and those that are loaded meanwhile.
    sums_outside = float8_cores and matmul.input_dtype in FLOAT8_KINDS
    registers = accumulators + 2 * sum(fragment_words(matmul, m_steps, n_steps)) + _REGISTERS_BESIDE
    if sums_outside:
        registers += accumulators
    if matmul.norm is not None:
        # A lane has two rows of 16.
        registers += m_steps * 2 * COUNT
    refusal = refuse_registers(registers, warps * WARP, limits)
    if refusal is not None:
        return refusal
    available = min(limits.registers_per_thread, limits.registers_per_block // (warps * WARP))
    each = matmul.epilogue.accumulators
    columns = n_steps * COLUMNS // each
    held = residual_registers(matmul, m_steps, columns)
    shares = Shares(
        warps=warps,
        m_blocks=m_steps,
        columns=columns,
        # Of blocks that share a tile one alone needs them.
        prefetched=registers + held <= available and p.split_k == 1,
        accumulators=each,
        batch=_batch(matmul, accumulators, available),
        row_step=ROWS,
        group_warps=p.warps_m,
    )
    rows = 0
    if matmul.stored:
        # One row of scales where a stage lies within a group, else one for each step.
        group = matmul.stored.group
        rows = 1 if group >= matmul.k or group % p.block_k == 0 else p.block_k // STORED_DEPTH
    tile_bytes = (
        p.block_m * p.block_k * size,
        p.block_n * p.block_k * matmul.weight_bits // 8,
        p.block_n * rows * _SCALE_BYTES,
    )
    total = p.stages * sum(tile_bytes) + shared_bytes(matmul, shares)
    return refuse_shared(total, limits) or GemmPlan(
        parameters=p,
        threads=warps * WARP,
        tiles_m=math.ceil(matmul.m / p.block_m),
        tiles_n=math.ceil(matmul.n / p.block_n),
        k_tiles=math.ceil(matmul.k / p.block_k) // p.split_k,
        depth=depth,
        m_steps=m_steps,
        n_steps=n_steps,
        shares=shares,
        registers=registers,
        tile_bytes=tile_bytes,
        scale_rows=rows,
        shared_bytes=total,
        sums_outside=sums_outside,
    )


def is_plain(matmul: MatmulFunction) -> bool:
    """Whether operands are float32, which threads multiply themselves: tensor cores would round them to tf32."""
    return matmul.input_dtype == "float32"


def fragment_words(matmul: MatmulFunction, m_steps: int, n_steps: int) -> tuple[int, ...]:
    """Return the registers of a thread for A, B and, where B is quantised, its scales of a step along K."""
    if is_plain(matmul):
        return 2 * m_steps * FLOAT_DEPTH, 2 * n_steps * FLOAT_DEPTH
    if matmul.stored is not None:
        return 8 * m_steps, n_steps * matmul.stored.bits // 4, n_steps
    return 4 * m_steps, 2 * n_steps


def refuse_stored(n: int, k: int, bits: int, group: int) -> Refusal | None:
    """Return why a matrix [K, N], quantised in groups along K, is not read as it is stored; None where it is."""
    length = 8 * COPY_BYTES // bits
    if k % length:
        return Refusal(f"K is {k}, expected a multiple of {length}: rows of B start at multiples of {COPY_BYTES} bytes")
    if n % _SCALES:
        return Refusal(f"N is {n}, expected a multiple of {_SCALES}: scales are copied {COPY_BYTES} bytes at a time")
    if group < k and group % STORED_DEPTH:
        return Refusal(f"groups of {group} weights, expected a multiple of {STORED_DEPTH}: a step has one scale")
    return None


def chunks_together(bits: int) -> int:
    """Return the chunks of 16 bytes of a row that four neighbouring lanes read together: 8 elements each."""
    return 4 * _NEIGHBOURS * bits // 8 // COPY_BYTES


def _batch(matmul: MatmulFunction, accumulators: int, available: int) -> int:
    """Return the columns that the epilogue evaluates side by side."""
    if accumulators + _REGISTERS_TO_EVALUATE <= available:
        return _BATCH
    return _SMALL_BATCH if has_vectors(matmul, matmul.output_dtype) else _LEAST_BATCH


def _refuse_parameters(p: GemmParameters, low: int, high: int) -> Refusal | None:
    warps = p.warps_m * p.warps_n
    if p.warps_m < 1 or p.warps_n < 1 or not 2 <= warps <= _WARPS_MAX:
        return Refusal(f"{p.warps_m} x {p.warps_n} warps, expected 2 to {_WARPS_MAX}")
    if p.block_m < 1 or p.block_m % (ROWS * p.warps_m):
        return Refusal(f"block_m is {p.block_m}, expected a multiple of {ROWS * p.warps_m} (16 rows for each warp)")
    # The pattern of a row in shared memory is made of powers of two.
    if p.block_n // p.warps_n not in (16, 32, 64, 128) or p.block_n % p.warps_n or p.block_n % 32:
        return Refusal(f"block_n is {p.block_n}, expected {p.warps_n} times 16, 32, 64 or 128, a multiple of 32")
    # At least two steps; rows of 128 bytes at most.
    if not low <= p.block_k <= high or p.block_k & (p.block_k - 1):
        expected = f"a power of 2 from {low} to {high}" if low < high else high
        return Refusal(f"block_k is {p.block_k}, expected {expected}")
    return None


def _refuse_shares(matmul: MatmulFunction, p: GemmParameters) -> Refusal | None:
    unit = share_unit(matmul) * matmul.epilogue.accumulators
    if p.block_n // p.warps_n % unit:
        return Refusal(f"a warp has {p.block_n // p.warps_n} columns, expected whole groups of {unit}")
    k_tiles = math.ceil(matmul.k / p.block_k)
    if p.split_k < 1 or k_tiles % p.split_k:
        return Refusal(f"split_k is {p.split_k}, expected a divisor of the {k_tiles} tiles of K")
    if p.split_k > 1 and matmul.rows is not None:
        return Refusal("blocks share sums, but their number is symbolic")
    return None
