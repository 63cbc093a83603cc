"""Matrix multiplication with an elementwise epilogue for GPUs with mma.sync and cp.async (sm_80 on), in TIRx.

B may be quantised, in 4 or 8 bits (`schedules.functions.quantised_matmul`): it is copied as it is stored, and a warp
dequantises what it multiplies (`multiply_stored.py`).

Where tiles are fewer than multiprocessors, blocks share the sum of a tile (`split_k`, `emit.sums_exchange`). There is
no stream-K as on Hopper: two or more blocks fit on a multiprocessor, so that one ends while others sum up, and tiles of
34 sizes leave less of a last round idle.

Norms of A's rows, of the residual's and of the output's are taken in as for the template gemm_sm90
(`schedules.tir.row_norm`): statistics are made from partial sums before the sum over K.

In float32, threads multiply themselves, and exactly so: also where the target has wgmma, which has no float32.

Notation
--------
::

    C[m, n] = epilogue(sum_k A[m, k] * B[k, n], m, n)

    A   [M, K]            row major; float16, bfloat16, float32, int8 or uint8, from sm_89 on float8 (e4m3, e5m2)
    B   [K, N] or [N, K]  row major, of A's dtype; of 8 bits, of either integer or either float8, as [N, K]
    C   [M, N]            row major; leading axes of A and C are flattened into M

A thread block makes one tile of `block_m` x `block_n`. Tiles are counted column by column in groups of `group` rows of
tiles, so that what runs at a time shares rows of A and columns of B in L2. Its `warps_m` x `warps_n` warps each make a
part of the tile, in instructions of 16 x 8 x 16 (m16n8k16) with sums in float32; of 8-bit integers, of 16 x 8 x 32 with
sums in int32; in float32, by fused multiply-adds of the same 16 x 8 sums, 4 along K (`multiply_float.py`). Warp w has
the rows of `w % warps_m` and the columns of `w / warps_m`, so that warps with the same columns follow each other.

Float8 is multiplied 16 x 8 x 32 where a warp has tensor cores for it (sm_89, sm_120, sm_121). They keep 13 bits of a
sum, so that a stage's sums are added up in float32 registers, as on Hopper (`schedules.templates.gemm_sm90.plan`).
Elsewhere (sm_90, sm_100) a warp makes halves of both operands, exactly, and multiplies those. This has not run on a
GPU yet.

Shared memory is a ring of `stages` stages of `block_k` along K (dynamic; the chunks of 16 bytes of a row change places,
see `schedules.templates.emit.tensor_cores`):

    tile_a   [stages, block_m, block_k]
    tile_b   [stages, block_k, block_n]     B as [K, N]
             [stages, block_n, block_k]     B as [N, K]; where it is quantised, its bytes
    scales   [stages, 1 or block_k / 32, block_n]
    patches and copies of `schedules.templates.output.output_tile`

All threads copy (cp.async), up to `stages` tiles ahead. Along K, a step is one instruction deep: while a warp
multiplies a step's fragments, it loads those of the next one (ldmatrix), across the border of two stages too. There is
one barrier for each stage: then the next one has arrived, and all warps have loaded the last fragments of this one.

With `dependent`, the kernel may start while the one before it in the stream ends (programmatic dependent launch, from
sm_90 on): it waits for it before it reads or writes global memory, but for the first tiles of a constant B. It is not
proposed: small models in which all kernels start so were slower on an H200
(`benchmarks/results/h200-mma-sync-models.json`).

Copies are of 16 bytes: K has to be a multiple of 8 (of 4 in float32; of 16 where B has 8 bits, of 32 where it has 4),
and N too where B is [K, N] or quantised. Rows and columns outside C are not written.

Sources: PTX ISA 9.0, "mma.m16n8k16", "mma.m16n8k32", "ldmatrix", "cp.async". NVIDIA CUTLASS, `mma_multistage.h`, has
the same pipeline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CudaLimits, Feature, ResolvedTarget
from relaxtune.schedules.targets.gpus import H200
from relaxtune.schedules.templates.base import OPEN_ROWS, Case, KernelTemplate, cuda_limits, refuse_target
from relaxtune.schedules.templates.emit.async_copy import COPY_BYTES
from relaxtune.schedules.templates.emit.tensor_cores import BYTE_KINDS, FLOAT8_KINDS
from relaxtune.schedules.templates.gemm_sm80.kernel import build_kernel
from relaxtune.schedules.templates.gemm_sm80.plan import (
    COLUMNS,
    FEATURES,
    ROWS,
    GemmParameters,
    GemmPlan,
    is_plain,
    make_plan,
    refuse_stored,
)
from relaxtune.schedules.templates.matmul_by_rows import OUTPUTS, recognise_matmul_by_rows, refuse_matmul
from relaxtune.schedules.tir.blocks import element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.expressions import dtype_of
from relaxtune.schedules.tir.matmul import recognise_matmul

_OPERANDS = (*OUTPUTS, *BYTE_KINDS, *FLOAT8_KINDS)
_CANDIDATES_MAX = 24
# Candidates in which blocks share sums, and how many share one.
_SPLIT_MAX = 6
_SPLITS = (2, 3, 4, 6, 8)
# Rows of tiles in a group: what they read stays in L2.
_ROWS = 8
# Tile and warps: block_m, block_n, block_k, warps_m, warps_n. Of equals, the first is proposed first. Heights between
# powers of two let tiles fill the multiprocessors: 4096 x 768 has 192 tiles of 128 x 128 and 132 of 192 x 128, as many
# as an H200 has multiprocessors.
TILES = (
    *((256, 128, 32, 4, 2), (256, 128, 64, 4, 2), (128, 256, 32, 2, 4), (128, 256, 64, 2, 4)),
    *((192, 128, 32, 4, 2), (192, 128, 64, 4, 2), (96, 256, 32, 2, 4), (96, 256, 64, 2, 4)),
    *((160, 128, 32, 2, 4), (160, 128, 64, 2, 4)),
    *((128, 128, 32, 2, 2), (128, 128, 64, 2, 2), (128, 128, 32, 2, 4), (96, 128, 32, 2, 2), (96, 128, 64, 2, 2)),
    *((112, 128, 64, 1, 4), (80, 128, 64, 1, 4), (64, 256, 32, 1, 4), (64, 128, 32, 2, 2), (64, 128, 64, 2, 2)),
    *((160, 64, 64, 2, 2), (128, 64, 32, 2, 2), (128, 64, 64, 2, 2), (96, 64, 64, 2, 2)),
    *((48, 128, 64, 1, 4), (64, 64, 64, 2, 2), (48, 64, 64, 1, 4), (64, 32, 64, 2, 2)),
    *((32, 128, 64, 1, 4), (32, 64, 64, 2, 2), (32, 32, 64, 2, 2)),
    *((16, 128, 64, 1, 4), (16, 64, 64, 1, 4), (16, 32, 64, 1, 2)),
)
# A stage of 8-bit integers has as many bytes.
BYTE_TILES = tuple((m, n, 2 * k, warps_m, warps_n) for m, n, k, warps_m, warps_n in TILES)
# Of float8, a thread holds sums twice: more warps for the largest tiles.
FLOAT8_TILES = ((128, 128, 128, 2, 4), (96, 128, 128, 2, 4), (64, 256, 128, 1, 8), (64, 128, 128, 1, 4), *BYTE_TILES)
# In float32: a thread has 8 x 8 sums, or 4 x 8, 2 x 8, 2 x 4 where there are few tiles.
FLOAT_TILES = (
    *((128, 128, 16, 2, 4), (128, 128, 8, 2, 4), (128, 64, 16, 2, 2), (64, 128, 16, 1, 4)),
    *((64, 64, 16, 1, 2), (64, 64, 16, 2, 2), (64, 32, 32, 2, 1), (32, 64, 32, 1, 2), (32, 64, 32, 2, 2)),
    *((32, 32, 32, 2, 1), (32, 32, 32, 2, 2), (16, 64, 32, 1, 2), (16, 64, 32, 1, 4), (16, 32, 32, 1, 2)),
)
# Where B is quantised: warps side by side, since those one above another dequantise the same weights.
STORED_TILES = (
    *((128, 128, 64, 2, 4), (64, 256, 64, 1, 8), (64, 128, 64, 1, 4), (128, 64, 64, 2, 2)),
    *((64, 64, 64, 1, 2), (64, 64, 64, 1, 4), (32, 256, 64, 1, 4), (32, 128, 64, 1, 4), (32, 64, 64, 1, 2)),
    *((32, 64, 64, 1, 4), (32, 32, 64, 1, 2), (16, 128, 64, 1, 4), (16, 64, 64, 1, 4), (16, 32, 64, 1, 2)),
)
_STAGES = (3, 4, 5, 6, 8)
# Of a tile, depths of the ring that are proposed before other tiles.
_DEPTHS = 2
_NORM = 4
# Cycles a microsecond; multiply-adds and bytes of shared memory of a multiprocessor in a cycle.
_CLOCK = 1700.0
_MULTIPLY_ADDS = 890.0
# In float32, by the threads themselves: four schedulers of 32 lanes, less what loads and addresses take of them.
_FLOAT_MULTIPLY_ADDS = 110.0
_SHARED_BYTES = 128.0
# A multiprocessor has as many schedulers, each with tensor cores of its own.
_SCHEDULERS = 4
# Cycles of an instruction of a warp beside those of its arithmetic, for each step along K.
_STEP_CYCLES = 40.0
# A scheduler's, to make 8 weights of a lane of 4 or 8 bits: 4 pairs by 4 instructions, some at half the rate (counted,
# not measured).
_UNPACK_CYCLES = 24.0
# From memory, in a microsecond.
_MEMORY_BYTES = 3.7e6
_LATENCY_US = 1.2
_START_US, _BLOCK_US = 1.9, 0.6


class GemmSm80(KernelTemplate[MatmulFunction, GemmParameters]):
    """The template; see `schedules.templates.base.KernelTemplate`."""

    parameters = GemmParameters

    def _propose(self, case: Case[MatmulFunction]) -> Sequence[GemmParameters] | Refusal:
        found, limits, target = case.found, case.limits, case.target
        made = (_plan(found, one, target) for one in _proposals(found))
        plans = [plan for plan in made if isinstance(plan, GemmPlan)]
        plans.sort(key=lambda plan: predicted_us(found, plan, limits))
        split = [plan for one in plans for plan in _splits(found, one, target)]
        split.sort(key=lambda plan: predicted_us(found, plan, limits))
        # The model knows nothing of the exchange of sums: what is split is worth measuring, and never comes first.
        chosen = _various(plans)[: _CANDIDATES_MAX - min(len(split), _SPLIT_MAX)] + _various(split)[:_SPLIT_MAX]
        return [plan.parameters for plan in chosen] or Refusal("no tile fits this shape")

    def _make(self, case: Case[MatmulFunction], p: GemmParameters) -> tirx.PrimFunc | Refusal:
        plan, func = _plan(case.found, p, case.target), case.func
        return plan if isinstance(plan, Refusal) else build_kernel(func, case.found, plan)

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> MatmulFunction | Refusal:
        return _for_target(_recognise(func), target)

    def _recognise_rows(self, func: tirx.PrimFunc, target: ResolvedTarget, rows: int) -> MatmulFunction | Refusal:
        found = _for_target(_recognise(func, OPEN_ROWS), target)
        return found if isinstance(found, Refusal) else replace(found, m=rows)

    def _predict(self, case: Case[MatmulFunction], p: GemmParameters, rows: int) -> float | None:
        plan = _plan(case.found, p, case.target)
        return None if isinstance(plan, Refusal) else predicted_us(case.found, plan, case.limits)


def _plan(found: MatmulFunction, parameters: GemmParameters, target: ResolvedTarget) -> GemmPlan | Refusal:
    return make_plan(found, parameters, cuda_limits(target), float8_cores=Feature.FLOAT8_CORES in target.features)


def _for_target(found: MatmulFunction | Refusal, target: ResolvedTarget) -> MatmulFunction | Refusal:
    """Return a matmul where this template is the one to make it for a target, else why it is not."""
    refused = refuse_target(target, *FEATURES)
    if refused is None and isinstance(found, MatmulFunction) and found.input_dtype in FLOAT8_KINDS:
        refused = refuse_target(target, Feature.MMA_FLOAT8)
    in_halves = isinstance(found, Refusal) or not is_plain(found)
    if refused is None and in_halves and Feature.WGMMA in target.features:
        refused = Refusal("the target has wgmma, which the template gemm_sm90 multiplies by")
    return refused or found


# One of a symbolic number of rows is looked for again and again.
@lru_cache(maxsize=4)
def _recognise(func: tirx.PrimFunc, rows: int | None = None) -> MatmulFunction | Refusal:
    matmul = recognise_matmul(func, rows)
    if isinstance(matmul, Refusal) and rows is None and any(dtype_of(one) == "uint8" for one in func.params):
        matmul = recognise_matmul_by_rows(func)
    if isinstance(matmul, Refusal):
        return matmul
    for dtype in (matmul.input_dtype, matmul.b_dtype):
        if dtype not in _OPERANDS:
            return Refusal(f"the operands are {dtype}, expected one of {', '.join(_OPERANDS)}")
    integer = matmul.input_dtype in BYTE_KINDS
    if element_bytes(matmul.input_dtype) == 1 and not matmul.b_transposed:
        reason = "expected [N, K] (ldmatrix does not turn bytes); turn the weight"
        return Refusal(f"B of {matmul.b_dtype} is [K, N], {reason}")
    stored = matmul.stored
    if stored is not None and (refused := refuse_stored(matmul.n, matmul.k, stored.bits, stored.group)):
        return refused
    vector = COPY_BYTES // element_bytes(matmul.input_dtype)
    return refuse_matmul(matmul, integer=integer, vector=vector, reason="copies of 16 bytes") or matmul


def _splits(matmul: MatmulFunction, plan: GemmPlan, target: ResolvedTarget) -> Iterator[GemmPlan]:
    """Yield the plan with blocks that share its sums, where there are too few tiles for the multiprocessors."""
    tiles, count = plan.tiles_m * plan.tiles_n, cuda_limits(target).likely_sm_count
    for split in _SPLITS if tiles < count else ():
        made = _plan(matmul, replace(plan.parameters, split_k=split), target)
        # At least as many tiles of K as the ring has stages.
        if isinstance(made, GemmPlan) and tiles * split < 2 * count and made.k_tiles >= plan.parameters.stages:
            yield made


def _various(plans: Sequence[GemmPlan]) -> list[GemmPlan]:
    """Return the plans in their order, those first that are not the third or later of their tile.

    The depths of a ring are often predicted to be equal, and would leave few tiles to measure.
    """
    seen: Counter[GemmParameters] = Counter()
    first: list[GemmPlan] = []
    later: list[GemmPlan] = []
    for plan in plans:
        tile = replace(plan.parameters, stages=0)
        (first if seen[tile] < _DEPTHS else later).append(plan)
        seen[tile] += 1
    return first + later


def _proposals(matmul: MatmulFunction) -> Iterator[GemmParameters]:
    """Yield tiles and depths that may suit a shape; some do not fit."""
    tiles: tuple[tuple[int, int, int, int, int], ...] = FLOAT_TILES if is_plain(matmul) else TILES
    if matmul.input_dtype in (*FLOAT8_KINDS, *BYTE_KINDS):
        tiles = FLOAT8_TILES if matmul.input_dtype in FLOAT8_KINDS else BYTE_TILES
    for block_m, block_n, block_k, warps_m, warps_n in STORED_TILES if matmul.stored is not None else tiles:
        if (block_m > 16 and block_m >= 2 * matmul.m) or (block_n > 32 and block_n >= 2 * matmul.n):
            continue
        group = min(-(-matmul.m // block_m), _ROWS)
        for stages in _STAGES:
            if stages > 3 and (stages - 1) * block_k >= 2 * matmul.k:
                continue
            yield GemmParameters(block_m, block_n, block_k, stages, warps_m, warps_n, group)


def predicted_us(matmul: MatmulFunction, plan: GemmPlan, limits: CudaLimits) -> float:
    """Return a time to order candidates by, in microseconds.

    It is what each of five things would take alone, in a sum that leans to the longest, and what comes on top::

        (arithmetic^4 + shared memory^4 + dequantisation^4 + memory^4 + chain^4)^(1/4) + blocks, one after another

    `chain` is one step along K after another: a warp's own instructions, or the latency of loads as far as the ring
    does not hide it. Constants are a fit (10 % root mean square) to 72 medians of an H200 without its wgmma. For
    another GPU, clock, bandwidth and multiply-adds are scaled by what `schedules.targets.gpus` states of both: that is
    on paper, since none was measured.
    """
    p, sm_count = plan.parameters, limits.likely_sm_count
    blocks = plan.tiles_m * plan.tiles_n * p.split_k
    resident = limits.resident_blocks(plan.threads, plan.registers, plan.shared_bytes)
    on_one = math.ceil(blocks / sm_count)
    together = min(on_one, resident)
    in_turn = math.ceil(blocks / (sm_count * resident))
    warps = plan.threads // 32
    steps, depth, element = plan.k_tiles * p.block_k // plan.depth, plan.depth, element_bytes(matmul.input_dtype)
    weight = matmul.weight_bits / 8
    # Of operands of half the bytes, twice as many; but of float8 as halves, as many as of halves.
    as_halves = matmul.input_dtype in FLOAT8_KINDS and not plan.sums_outside
    gpu = limits.gpu or H200
    clock, bandwidth = _CLOCK * gpu.clock_mhz / H200.clock_mhz, _MEMORY_BYTES * gpu.bandwidth_gb_s / H200.bandwidth_gb_s
    rate = _MULTIPLY_ADDS * gpu.multiply_adds / H200.multiply_adds * (1 if as_halves else 2 / element)
    if is_plain(matmul):
        rate = _FLOAT_MULTIPLY_ADDS * gpu.float_multiply_adds / H200.float_multiply_adds
    # A scheduler without a warp does nothing.
    used = min(1.0, together * warps / _SCHEDULERS)
    arithmetic = on_one * steps * p.block_m * p.block_n * depth / rate / used
    rows, columns = warps * plan.m_steps * ROWS + p.block_m, warps * plan.n_steps * COLUMNS + p.block_n
    shared = on_one * steps * (rows * element + columns * weight) * depth / _SHARED_BYTES
    # A lane dequantises 8 weights of each 8 columns and 32 of K.
    unpacked = on_one * steps * warps / _SCHEDULERS * plan.n_steps * _UNPACK_CYCLES / used if matmul.stored else 0.0
    own = plan.m_steps * plan.n_steps * ROWS * COLUMNS * depth / (rate / _SCHEDULERS)
    chain = max(
        in_turn * steps * (own + _STEP_CYCLES) / clock, in_turn * plan.k_tiles * _LATENCY_US / max(1, p.stages - 1)
    )
    moved = (matmul.m * matmul.k + matmul.m * matmul.n) * element + matmul.n * matmul.k * weight
    parts = (arithmetic / clock, shared / clock, unpacked / clock, moved / bandwidth, chain)
    longest: float = sum(part**_NORM for part in parts) ** (1 / _NORM)
    return longest + _START_US + in_turn * _BLOCK_US
