"""Matmuls of up to 16 rows by a matrix that is read once, plain or quantised, for GPUs with mma.m16n8k16 (sm_80 on).

Notation
--------
::

    C[m, n] = epilogue(sum_k x[m, k] * W[n, k], m, n)        x: float16 (or bfloat16), M <= 16; sums: float32
    W[n, k]: of x's dtype, or 8 or 4 bits with a scale for each group along k (`schedules.functions.quantised_matmul`)

Such a matmul takes as long as W takes to be read: a token in decoding. A block makes 16 * `tiles` rows of W; its
`warps` share the sum over K. Along K, a step is 4 loads of 16 bytes in each row, by neighbouring lanes: 32 weights of
16 bits, 64 of 8, 128 of 4. A warp makes every `warps`-th step, `unroll` of them with all loads in flight, and
multiplies with tensor-core instructions (`gemv_multiply`), for which one row of x is as good as eight. With `staged`,
the part of x that such a round needs is copied to shared memory while the loads of W are on their way, which is better
for few rows; else each warp reads its own from the caches. Where a step lies within a group, integers are multiplied,
exactly, and sums scaled in float32; where it does not, weights are scaled and rounded to float16, as the function says.

The warps' sums meet in shared memory and are added up in the order of warps, so results repeat bit by bit; then each
thread evaluates the epilogue of its elements. With `split`, blocks share K: the last of them adds up their sums
(`emit.sums_exchange`). Several rows of x are then read for more rows of W at a time, and less of them by each block.
Norms of x, of the residual and of the output are taken in (`norms.py`, `schedules.tir.row_norm`).

With `dependent`, the kernel may start while the one before it in the stream ends (programmatic dependent launch): the
first loads of W are issued before the wait where W is known to be constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CudaLimits, Feature, ResolvedTarget
from relaxtune.schedules.targets.gpus import H200
from relaxtune.schedules.templates.base import Case, KernelTemplate, Own, refuse_target
from relaxtune.schedules.templates.emit.kernel_frame import tensor_bytes
from relaxtune.schedules.templates.gemv.kernel import build_gemv_kernel
from relaxtune.schedules.templates.gemv.plan import (
    ROWS_MAX,
    TILE,
    GemvParameters,
    GemvPlan,
    GemvStreamParameters,
    GemvStreamPlan,
    load_length,
    make_plan,
    make_stream_plan,
)
from relaxtune.schedules.templates.gemv.stream_kernel import build_gemv_stream_kernel
from relaxtune.schedules.templates.matmul_by_rows import OUTPUTS, recognise_matmul_by_rows
from relaxtune.schedules.tir.epilogue import MatmulFunction

_INPUTS = ("float16", "bfloat16")
_INDEX_MAX = 2**31 - 1
# Candidates, and those of them in which blocks share K.
_CANDIDATES_MAX, _SHARED_MAX = 24, 8
_THREADS_PER_SM, _REGISTERS_PER_SM, _BLOCKS_PER_SM, _SHARED_PER_SM = 2048, 65536, 32, 227_000
# Microseconds, and bytes a microsecond from memory and from the L2 cache: fits to 435 kernels timed on an H200. By them
# the first candidate takes 8 % longer than the best (geometric mean). For another GPU, bytes from memory are scaled by
# its bandwidth: on paper.
_BASE_US, _ROUND_US, _COPY_US, _FEW_WARPS_US = 1.9, 0.38, 0.067, 1.2
_MEMORY, _CACHE = 4.3e6, 6.0e6
_UNEVEN = 0.85
# Blocks that share K, so that each reads less of x, and what each of them but the last adds: set by hand.
_SHARES, _EXCHANGE_US = (2, 4), 1.6
_WARPS_ENOUGH = 8


class GemvTemplate(KernelTemplate[MatmulFunction, Own]):
    """The base of the templates for few rows."""

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> MatmulFunction | Refusal:
        return refuse_target(target, Feature.MMA) or _recognise(func)


class Gemv(GemvTemplate[GemvParameters]):
    """The template; see `schedules.templates.base.KernelTemplate`."""

    parameters = GemvParameters

    def _propose(self, case: Case[MatmulFunction]) -> Sequence[GemvParameters] | Refusal:
        found, limits, moved = case.found, case.limits, tensor_bytes(case.func)
        shares = _SHARES if Feature.WGMMA not in case.target.features else ()
        plans = [
            plan
            for p in _proposals(shares)
            if isinstance(plan := make_plan(found, p, limits), GemvPlan) and _is_sensible(plan, limits)
        ]
        plans.sort(key=lambda plan: _predicted_us(found, plan, moved, limits))
        shared = [plan for plan in plans if plan.parameters.split > 1][_SHARED_MAX:]
        proposed = [plan.parameters for plan in plans if plan not in shared][:_CANDIDATES_MAX]
        return proposed or Refusal("no share fits the registers of a block")

    def _make(self, case: Case[MatmulFunction], p: GemvParameters) -> tirx.PrimFunc | Refusal:
        plan = make_plan(case.found, p, case.limits)
        return plan if isinstance(plan, Refusal) else build_gemv_kernel(case.func, case.found, plan)


def _recognise(func: tirx.PrimFunc) -> MatmulFunction | Refusal:
    matmul = recognise_matmul_by_rows(func)
    if isinstance(matmul, Refusal):
        return matmul
    if matmul.stored is not None and (matmul.norm is not None or matmul.partials is not None):
        return Refusal("it has statistics of rows and quantised weights")
    if matmul.partials is not None and matmul.epilogue.accumulators > 1:
        return Refusal("it has partial sums of columns of two products each")
    if matmul.m > ROWS_MAX:
        return Refusal(f"{matmul.m} rows, expected {ROWS_MAX} at most")
    inputs = _INPUTS if matmul.stored is None else _INPUTS[:1]
    if matmul.input_dtype not in inputs:
        return Refusal(f"the rows are {matmul.input_dtype}, expected {' or '.join(inputs)}")
    if matmul.output_dtype not in OUTPUTS:
        return Refusal(f"the output is {matmul.output_dtype}, expected one of {', '.join(OUTPUTS)}")
    length = load_length(matmul)
    if matmul.k % length:
        return Refusal(f"K is {matmul.k}, expected a multiple of {length}: rows of W start at multiples of 16 bytes")
    if matmul.stored is not None and matmul.stored.group % length:
        group = matmul.stored.group
        return Refusal(f"groups of {group} weights, expected a multiple of {length}: a load of 16 bytes has one scale")
    if matmul.n * matmul.k > _INDEX_MAX:
        return Refusal("W has 2**31 elements or more, the kernel counts in 32 bits")
    return matmul


def _proposals(shares: Sequence[int]) -> Iterator[GemvParameters]:
    """Yield shares that may suit a shape; some do not fit. `shares` are numbers of blocks that may share K."""
    for split, most_tiles in ((1, 2), *((split, 4) for split in shares)):
        for tiles in (1, 2, 4):
            for warps in (1, 2, 4, 8, 16) if tiles <= most_tiles else ():
                for unroll in (1, 2, 4, 8):
                    for staged in (True, False):
                        yield GemvParameters(tiles, warps, unroll, staged, dependent=True, split=split)


def _is_sensible(plan: GemvPlan, limits: CudaLimits) -> bool:
    """Whether all warps have work, no more loads are in flight than there are, and shared sums find multiprocessors."""
    p = plan.parameters
    few = p.split == 1 or plan.blocks <= 2 * limits.likely_sm_count
    return few and p.warps <= plan.steps and (p.unroll == 1 or p.unroll < 2 * plan.turns)


def _predicted_us(matmul: MatmulFunction, plan: GemvPlan, moved_bytes: int, limits: CudaLimits) -> float:
    p, sm_count = plan.parameters, limits.likely_sm_count
    memory = _MEMORY * (limits.gpu or H200).bandwidth_gb_s / H200.bandwidth_gb_s
    by_registers, by_shared = _REGISTERS_PER_SM // (plan.registers * plan.threads), _SHARED_PER_SM // plan.shared_bytes
    resident = max(1, min(_BLOCKS_PER_SM, _THREADS_PER_SM // plan.threads, by_registers, by_shared))
    turns = plan.rounds * max(1.0, plan.blocks / (sm_count * resident))
    uneven = math.ceil(plan.blocks / sm_count) * sm_count / plan.blocks
    copies = math.ceil(matmul.m * plan.span / 8 / plan.threads) if p.staged else 0
    reading = moved_bytes / memory * (1 + _UNEVEN * (uneven - 1))
    reading_x = plan.blocks * matmul.m * plan.k * 2 / _CACHE
    exchange = _EXCHANGE_US * (p.split - 1)
    few = max(0.0, math.log2(_WARPS_ENOUGH / p.warps))
    waits = _ROUND_US * (turns - 1) + _COPY_US * copies * turns + _FEW_WARPS_US * few + exchange
    return _BASE_US + reading + reading_x + waits


_FEW_WARPS, _MANY_WARPS = 4, 16
# Tiles, warps, depth, blocks a multiprocessor, steps asked for before x, and whether sums are collected. The first one
# is the fastest in 14 cases on an H200 of 16 shares that do neither. The next four have nearly all best times of 7
# cases with up to 45 shares. The last ones serve a short K, and x that takes many registers.
_STREAM_SHARES = (
    (1, 16, 2, 1, 0, False),
    *((1, 16, 4, 1, 2, True), (2, 16, 3, 1, 1, True), (1, 16, 4, 1, 3, False), (1, 16, 4, 1, 0, False)),
    *((1, 16, 2, 2, 0, False), (1, 8, 4, 1, 0, False), (1, 8, 4, 2, 0, False), (2, 4, 4, 2, 0, False)),
    *((1, 8, 2, 2, 0, False), (2, 8, 2, 2, 0, False), (2, 8, 4, 1, 0, False)),
    *((1, _FEW_WARPS, 4, 2, 0, False), (1, _FEW_WARPS, 1, 1, 0, False), (1, 8, 8, 1, 3, True)),
)
# Of 16-bit weights: tiles, warps, depth, blocks a multiprocessor, blocks that share K, and steps of x in registers: the
# fastest of 38 to 57 for ten matmuls of Llama-1B's decode step on an H100. The last three come first where all
# multiprocessors have work (`_is_preferred`): for eight such matmuls they take 0 to 3 % more than the best.
_PLAIN_SHARES = (
    *((1, 8, 8, 1, 1, 0), (1, 8, 4, 2, 1, 0), (1, 16, 3, 1, 1, 0), (1, 16, 4, 1, 1, 0), (1, 16, 4, 1, 4, 0)),
    *((1, 16, 4, 1, 1, 4), (1, 16, 4, 1, 1, 8), (2, 8, 4, 1, 1, 0), (2, 16, 2, 1, 1, 0), (1, 8, 4, 2, 4, 0)),
    *((2, 16, 2, 1, 4, 0), (1, 8, 8, 1, 2, 0), (1, 4, 8, 2, 1, 0), (1, 8, 2, 2, 1, 0), (1, _FEW_WARPS, 1, 1, 1, 0)),
    *((2, 16, 2, 1, 1, 4), (2, 16, 3, 1, 1, 4), (1, 16, 6, 1, 1, 0)),
)
# Of the rounds that blocks make, what is left idle in the last one.
_UNEVEN_MAX = 1.1
# Steps of a warp from which on K is long, and tiles of 16 rows of W for a multiprocessor that has work.
_LONG_TURNS, _TILES_MIN = 8, 0.9


class GemvStream(GemvTemplate[GemvStreamParameters]):
    """The template in which weights stream through shared memory; see `schedules.templates.base.KernelTemplate`.

    `Gemv` makes one tile of rows of W from registers in a block. Here as many blocks as fit onto the GPU at once share
    all tiles, and the steps of W that come next, of the tiles that follow too, are on their way to shared memory
    meanwhile, `depth` of each warp. Each lane copies the bytes that it multiplies, so that no lane waits for another's.
    A warp keeps its part of x in registers, or with `held` some steps of it, and loads the next one when it has used
    one. Norms of x are made of these registers.

    Weights of 16 bits stream where the target has no wgmma: kernels for those start early, and `Gemv` is as fast.
    Llama-1B's decode step then takes 0.96 of the time of `Gemv` with one sequence, 0.86 with 16
    (`benchmarks/results/h100-decode-sm80.json`).

    With `dependent`, the copies begin before the kernel before has ended, and depend on no registers. With `early`, x,
    which has to wait for the kernel before, is asked for before the last of these steps instead of behind them all.
    With `collected`, the block's warps meet once, when all tiles are made, instead of at each tile's end.
    """

    parameters = GemvStreamParameters

    def _propose(self, case: Case[MatmulFunction]) -> Sequence[GemvStreamParameters] | Refusal:
        found, limits = case.found, case.limits
        refusal = Refusal(f"K is {found.k}, too short for {_FEW_WARPS} warps to share")
        proposed: list[GemvStreamPlan] = []
        for p in _stream_proposals(found, limits.likely_sm_count, Feature.DEPENDENT_LAUNCH in case.target.features):
            plan = make_stream_plan(found, p, limits)
            if isinstance(plan, Refusal):
                refusal = plan
            # All warps have work, and no more steps are on their way than there are.
            elif p.warps <= plan.steps and p.depth < 2 * plan.turns * plan.rounds and plan not in proposed:
                proposed.append(plan)
        if found.stored is None:
            tiles_min = _TILES_MIN * limits.likely_sm_count

            def rank(plan: GemvStreamPlan) -> tuple[bool, bool, bool]:
                p, several = plan.parameters, plan.rounds > 1 or plan.column_tiles == 1
                # Whether the last round of tiles leaves many blocks idle; and whether not many warps share x where it
                # takes as many loads as the block's only tile of W.
                uneven = plan.rounds * p.groups > _UNEVEN_MAX * plan.row_tiles
                return uneven, not _is_preferred(plan, tiles_min), several or (p.tiles, p.warps) != (1, _MANY_WARPS)

            proposed.sort(key=rank)
        return [plan.parameters for plan in proposed] or refusal

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> MatmulFunction | Refusal:
        found = super()._recognise(func, target)
        if isinstance(found, MatmulFunction) and found.stored is None and Feature.WGMMA in target.features:
            return Refusal("the weights have 16 bits, expected 8 or 4 (template gemv reads those as fast)")
        return found

    def _make(self, case: Case[MatmulFunction], p: GemvStreamParameters) -> tirx.PrimFunc | Refusal:
        plan = make_stream_plan(case.found, p, case.limits)
        return plan if isinstance(plan, Refusal) else build_gemv_stream_kernel(case.func, case.found, plan)


def _stream_proposals(matmul: MatmulFunction, sm_count: int, dependent: bool) -> Iterator[GemvStreamParameters]:
    """Yield shares that may suit a shape; some do not fit."""
    if matmul.stored is None:
        for tiles, warps, depth, resident, split, held in _PLAIN_SHARES:
            blocks = split * min(math.ceil(matmul.n / (TILE * tiles)), sm_count * resident // split)
            collected = split > 1
            yield GemvStreamParameters(tiles, warps, depth, blocks, dependent, 0, collected, split, held)
        return
    for tiles, warps, depth, resident, early, collected in _STREAM_SHARES:
        blocks = min(math.ceil(matmul.n / (TILE * tiles)), sm_count * resident)
        yield GemvStreamParameters(tiles, warps, depth, blocks, dependent, early, collected)


def _is_preferred(plan: GemvStreamPlan, tiles_min: float) -> bool:
    """Whether warps make two tiles, so that half as many blocks read x; of few rows and a long K, x is little of it."""
    p, long = plan.parameters, plan.turns >= _LONG_TURNS
    if p.warps != _MANY_WARPS or p.split > 1 or plan.row_tiles * p.tiles < tiles_min:
        return False
    if long and plan.column_tiles == 1:
        return (p.tiles, p.depth, p.held) == (1, 6, 0)
    return (p.tiles, p.depth, p.held) == (2, 3 if long else 2, 4)
