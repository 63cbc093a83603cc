"""Matrix multiplication with an elementwise epilogue for Hopper (sm_90a): TMA, mbarriers and wgmma, in TIRx.

Notation
--------
::

    C[m, n] = epilogue(sum_k A[m, k] * B[k, n], m, n)

    A   [M, K]            row major; 16-bit floats, or of 8 bits: see `schedules.templates.gemm_sm90.plan`
    B   [K, N] or [N, K]  row major ("MN-major" or "K-major" to wgmma); of 8 bits [N, K] alone
    C   [M, N]            row major; leading axes of A and C are flattened into M

One thread block makes tiles of `block_m` x `block_n`: one, or where `blocks` is given, every `blocks`-th. Tiles are
counted column by column in groups of `group` rows of tiles, so that what runs at a time shares rows of A and columns of
B in L2. Its threads:

- consumers: `consumers` warpgroups of 128 threads, each `block_m / consumers` rows of the tile, in `m64nNk16` wgmma
  instructions (of 8 bits `m64nNk32`). Thread t of a warpgroup holds of rows `16 * (t / 32) + (t % 32) / 4` and 8 below,
  in each 8 columns, columns `2 * (t % 4)` and the next: 4 accumulators for every 8 columns of an instruction.
  With `pingpong`, two warpgroups take turns to make whole tiles: one multiplies while the other writes.
- producer: one warp after them; one thread of it issues every TMA load. With two consumers it is a warpgroup: where a
  norm is inside, two more of its warps make statistics of rows (`schedules.templates.gemm_sm90.statistics`).

Shared memory is a ring of `stages` stages (dynamic; each tile 1024-byte aligned, which a swizzle atom needs):

    tile_a   [stages, rows, 64]                  (of 8 bits, 128 in the place of 64)
                                                 128-byte rows of K, swizzled 128 bytes; only rows that exist are loaded
    tile_b   [stages, c, block_n/w, 64/c, w]     [K, N]: chunks of w columns, rows of K, swizzled 2*w bytes
             [stages, block_n, 64]               [N, K]: as A
    full     [stages] mbarrier: one arrival (the producer) and the bytes of both tiles
    empty    [stages] mbarrier: one arrival by each warpgroup that reads the stage, in all c blocks
    turn     [2] mbarrier: whose turn it is to multiply (`pingpong`)
    statistics, made, read                       of the rows of two tiles, and mbarriers: they are there, they were read
    partial  in place of the ring: the accumulators, for the other blocks of the cluster (`split_k`)
    patches and copies of `schedules.templates.output.output_tile`

With `split_k`, the blocks of a cluster share one tile: each sums a part of K, then each adds up, in the order of ranks,
its part of the columns from the shared memory of all, and writes it.
With `stream_k`, `blocks` blocks share the sums of all tiles evenly, through global memory, whatever that number is and
wherever that cuts a sum: see `schedules.templates.gemm_sm90.tiles`.
With `multicast`, the c blocks of a cluster make tiles one below the other; each loads a part of B's tile for all.
With `dependent`, the kernel may start while the one before it in the stream ends (programmatic dependent launch): it
waits for it before it reads or writes global memory, but for what is known to be constant: the first tiles of B, and
what the epilogue reads of the columns of a block's only tile (a bias).

TMA fills what lies outside A and B with zeros, so K may be ragged; rows and columns outside C are not written.
TMA's strides are multiples of 16 bytes: K has to be a multiple of 8 (of 8 bits, of 16), and N too where B is [K, N]; as
[N, K], B may have any N, such as a vocabulary's 50257. Fewer than 64 rows (a token or a few, in decoding) waste
arithmetic, which is not what such matmuls wait for: they read B at memory bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import constant_params
from relaxtune.schedules.targets import CudaLimits, Feature, ResolvedTarget
from relaxtune.schedules.templates.base import OPEN_ROWS, Case, KernelTemplate, refuse_target
from relaxtune.schedules.templates.gemm_sm90.cost import predicted_us, predictor
from relaxtune.schedules.templates.gemm_sm90.kernel import build_kernel
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters, GemmPlan, loaded_rows, make_plan, operands_of
from relaxtune.schedules.templates.matmul_by_rows import refuse_matmul
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul

_TMA_ALIGNMENT = 16
# Shared memory with which two blocks fit into a multiprocessor.
_HALF_BYTES = 115_200
_STAGE_BARRIERS_BYTES = 16
# Rows of tiles in a group: what they read stays in L2.
_ROWS = 8
_STAGES_MAX = 24
_CANDIDATES_MAX = 32
# Tiles a multiprocessor below which sharing the last ones may pay; with fewer than one, it is slower than others.
_STREAM_WAVES = 3
# With fewer, turns of 64 rows were not measured: such matmuls wait for their weights.
_SHORT_TURNS_ROWS = 1024


class GemmSm90(KernelTemplate[MatmulFunction, GemmParameters]):
    """The template; see `schedules.templates.base.KernelTemplate`."""

    parameters = GemmParameters

    def _propose(self, case: Case[MatmulFunction]) -> Sequence[GemmParameters] | Refusal:
        matmul, limits = case.found, case.limits
        sm_count = limits.likely_sm_count
        constant_b = matmul.b in constant_params(case.func)
        deepest = [_deepest(matmul, one, limits, sm_count, constant_b) for one in _proposals(matmul, sm_count)]
        fitting = [plan for plan in deepest if plan is not None]
        fitting.sort(key=lambda plan: predicted_us(matmul, plan, sm_count))
        return [plan.parameters for plan in fitting[:_CANDIDATES_MAX]] or Refusal("no tile fits this shape")

    def _make(self, case: Case[MatmulFunction], p: GemmParameters) -> tirx.PrimFunc | Refusal:
        plan = make_plan(case.found, p, case.limits, constant_b=case.found.b in constant_params(case.func))
        return plan if isinstance(plan, Refusal) else build_kernel(case.func, case.found, plan)

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> MatmulFunction | Refusal:
        return refuse_target(target, Feature.WGMMA, Feature.TMA) or _recognise(func)

    def _recognise_rows(self, func: tirx.PrimFunc, target: ResolvedTarget, rows: int) -> MatmulFunction | Refusal:
        refusal = refuse_target(target, Feature.WGMMA, Feature.TMA)
        found = refusal or _recognise(func, OPEN_ROWS)
        return found if isinstance(found, Refusal) else replace(found, m=rows)

    def _predict(self, case: Case[MatmulFunction], p: GemmParameters, rows: int) -> float | None:
        predicted = _predictor(case.func, p, case.limits, loaded_rows(rows, p))
        return None if isinstance(predicted, Refusal) else predicted(rows)


@lru_cache(maxsize=512)
def _predictor(
    func: tirx.PrimFunc, parameters: GemmParameters, limits: CudaLimits, loaded: int
) -> Callable[[int], float] | Refusal:
    """Return what predicts the time for a number of rows, as many of which are loaded at a time."""
    found = _recognise(func, OPEN_ROWS)
    if isinstance(found, Refusal):
        return found
    found = replace(found, m=loaded)
    plan = make_plan(found, parameters, limits)
    return plan if isinstance(plan, Refusal) else predictor(found, plan, limits.likely_sm_count)


# One of a symbolic number of rows is looked for again and again.
@lru_cache(maxsize=4)
def _recognise(func: tirx.PrimFunc, rows: int | None = None) -> MatmulFunction | Refusal:
    matmul = recognise_matmul(func, rows)
    if isinstance(matmul, Refusal):
        return matmul
    operands = operands_of(matmul.input_dtype, matmul.b_dtype, transposed=matmul.b_transposed)
    if isinstance(operands, Refusal):
        return operands
    vector, reason = _TMA_ALIGNMENT // operands.bytes, "TMA strides are multiples of 16 bytes"
    return refuse_matmul(matmul, integer=operands.integer, vector=vector, reason=reason) or matmul


def _proposals(matmul: MatmulFunction, sm_count: int) -> Iterator[GemmParameters]:
    """Yield tiles and roles that may suit a shape, with the deepest ring; some do not fit."""
    for block_m, consumers, pingpong in (
        (64, 1, False),
        (64, 2, True),
        (128, 2, False),
        (128, 2, True),
        (256, 2, False),
    ):
        rows = math.ceil(matmul.m / block_m)
        if pingpong and block_m == 64 and matmul.m < _SHORT_TURNS_ROWS:
            continue
        for block_n in (32, 64, 96, 128, 192, 256):
            if (block_m > 64 and block_m >= 2 * matmul.m) or (block_n > 32 and block_n >= 2 * matmul.n):
                continue
            tiles = rows * math.ceil(matmul.n / block_n)
            one = GemmParameters(block_m, block_n, _STAGES_MAX, consumers, 0, 1, pingpong, True, 1, min(rows, _ROWS))
            if tiles > sm_count:
                yield replace(one, blocks=sm_count)
            if pingpong:
                continue
            if tiles <= 2 * sm_count or consumers == 1:
                yield one
            for split_k in (2, 3, 4, 6, 8) if tiles <= sm_count else ():
                yield replace(one, split_k=split_k)
            whole = tiles % sm_count == 0 or matmul.rows is not None
            if block_m == 128 and block_n >= 128 and not whole and 1 < tiles / sm_count < _STREAM_WAVES:
                yield replace(one, blocks=sm_count, stream_k=True)
            if tiles > sm_count and block_m == 128 and block_n >= 192 and rows % 2 == 0:
                yield replace(one, blocks=sm_count // 2, multicast=2, group=min(rows // 2, _ROWS // 2))


def _deepest(
    matmul: MatmulFunction, p: GemmParameters, limits: CudaLimits, sm_count: int, constant_b: bool
) -> GemmPlan | None:
    """Return the plan with as many stages as fit and are of use, or None."""
    least = make_plan(matmul, replace(p, stages=2), limits)
    if not isinstance(least, GemmPlan):
        return None
    # Where there are more blocks than multiprocessors, two of one consumer each share one.
    halved = p.consumers == 1 and least.blocks * least.cluster > sm_count
    room = (min(limits.shared_bytes_optin, _HALF_BYTES) if halved else limits.shared_bytes_optin) - least.shared_bytes
    deepest = 2 + room // (least.stage_bytes + _STAGE_BARRIERS_BYTES)
    for stages in range(min(p.stages, deepest if p.blocks else min(deepest, max(2, least.k_share))), 1, -1):
        plan = make_plan(matmul, replace(p, stages=stages), limits, constant_b=constant_b)
        if isinstance(plan, GemmPlan):
            return plan
    return None
