"""Attention for GPUs with mma.sync and cp.async (sm_80 on) in one kernel with an online softmax, in TIRx.

Notation
--------
The function of `schedules.functions.attention`, with Q, K, V and O float16 or bfloat16::

    S = Q K^T                       float32, registers; `warps * m_steps * 16` rows and `block_k` keys at a time
    P = exp(mask(scale * S) - m)    float32, then 2 bytes a value, registers; m the rows' largest scores so far
    O = O * exp(m_before - m) + P V     float32, registers; divided by the sum of P in the end

A thread block makes one tile of queries of one head, or with `pack` of the `heads / kv_heads` heads that share a head
of K and V: row r of the tile is query `r // group`, head `r % group`. Blocks of keys that none of its queries sees
(`causal`, `window`) are skipped. Each warp has `m_steps` times 16 rows, multiplied by m16n8k16; its lane l holds of
rows `l / 4` and 8 below, in each 8 columns, columns `2 * (l % 4)` and the next, of S, P and O alike. This is
FlashAttention-2's division of work (Dao, 2023, arXiv:2307.08691, section 3.3).

Shared memory is dynamic; the chunks of 16 bytes of a row change places (`schedules.templates.emit.tensor_cores`). Heads
take 32 columns or a multiple of 64, filled with zeros:

    tile_q   [rows, width]                 later O
    tile_k   [stages, block_k, width]
    tile_v   [stages, block_k, value_width]

All threads copy (cp.async): while a block of keys is worked on, the next ones are on their way. The values of a block
are waited for after its softmax.

With `dependent`, the kernel may start while the one before it in the stream ends (programmatic dependent launch, from
sm_90 on); `gemm_sm80` says why it is not proposed. Masks are those of
`schedules.templates.attention_sm90.template`. With `split`, blocks share the keys of a tile (`SplitKeys`). Where
caches grow (`schedules.functions.attention.CacheGrowth`), the kernel writes K and V too (`copies.py`). Symbolic sizes
are not made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import AttentionSpec
from relaxtune.schedules.targets import CudaLimits, Feature, ResolvedTarget
from relaxtune.schedules.targets.gpus import H200
from relaxtune.schedules.templates.attention.recognise import bias_bytes, recognise_attention
from relaxtune.schedules.templates.attention.tiles import ELEMENT_BYTES
from relaxtune.schedules.templates.attention_sm80.kernel import build_kernel
from relaxtune.schedules.templates.attention_sm80.plan import AttentionParameters, AttentionPlan, make_plan
from relaxtune.schedules.templates.base import Case, KernelTemplate
from relaxtune.schedules.templates.emit.tensor_cores import CHUNK

_CANDIDATES_MAX = 12
# Candidates in which blocks share keys, and how many share them.
_SPLIT_MAX = 4
_SPLITS = (4, 2, 8, 16)
# Of a multiprocessor in a cycle: multiply-adds, bytes of shared memory, powers of 2.
_MULTIPLY_ADDS, _SHARED_BYTES, _POWERS = 1200, 128, 16
# Cycles that a warp waits for on its own in a step, and a block before and after its steps.
_STEP_CYCLES, _TILE_CYCLES = 500, 3000
# Where one tile alone reads its keys, they come from memory: cycles of a step, bytes that a warp copies in a cycle, and
# what each block that shares keys adds to the exchange of sums. A fit to 45 medians of an H200
# (`h200-attention-decode-sm80.json`).
_COPY_CYCLES, _COPIED_BYTES, _EXCHANGE_CYCLES = 220, 14, 900
# Cycles of a step more where caches grow: they are written from shared memory. A second warp, of no rows, halves what
# copies and writes take. A fit to 80 medians of an H200 (`h200-decode-sm80.json`).
_KEEP_CYCLES = 1000


class AttentionSm80(KernelTemplate[AttentionSpec, AttentionParameters]):
    """The template; see `schedules.templates.base.KernelTemplate`."""

    parameters = AttentionParameters

    def _propose(self, case: Case[AttentionSpec]) -> Sequence[AttentionParameters] | Refusal:
        found, limits = case.found, case.limits
        mask_bytes = bias_bytes(case.func, found)
        made = (make_plan(found, one, limits, bias_bytes=mask_bytes) for one in _proposals(found))
        plans = [plan for plan in made if isinstance(plan, AttentionPlan)]
        if not plans:
            return Refusal("no tile fits this shape")
        plans.sort(key=lambda plan: predicted_cycles(plan, limits))
        split = [one for plan in plans for one in _splits(plan, limits)]
        if _reads_keys_once(plans[0]):
            split.sort(key=lambda plan: predicted_cycles(plan, limits))
        del split[_SPLIT_MAX:]
        del plans[_CANDIDATES_MAX - len(split) :]
        # Where tiles share keys, the model knows nothing of sharing sums: it is worth measuring, and never comes first.
        if split and _reads_keys_once(plans[0]):
            first, second = sorted((split, plans), key=lambda some: predicted_cycles(some[0], limits))
        else:
            first, second = plans, split
        return [plan.parameters for plan in (*first, *second)]

    def _make(self, case: Case[AttentionSpec], p: AttentionParameters) -> tirx.PrimFunc | Refusal:
        plan = make_plan(case.found, p, case.limits, bias_bytes=bias_bytes(case.func, case.found))
        return plan if isinstance(plan, Refusal) else build_kernel(case.func, plan)

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> AttentionSpec | Refusal:
        if Feature.WGMMA in target.features:
            return Refusal("the target has wgmma, which the template attention_sm90 multiplies by")
        spec = recognise_attention(func, target, Feature.MMA, Feature.CP_ASYNC, Feature.LDMATRIX)
        if isinstance(spec, Refusal):
            return spec
        if not spec.is_static:
            return Refusal("its sizes are symbolic")
        return spec if spec.spans is None else Refusal("its keys are in spans, which this template does not make")


def _proposals(spec: AttentionSpec) -> Iterator[AttentionParameters]:
    """Yield tiles that may suit a shape; some do not fit."""
    packs = (True, False) if spec.group > 1 and spec.queries * spec.group <= 128 else (False,)
    for pack in packs:
        # A cache that grows has work for a second warp.
        rows = max(spec.queries * (spec.group if pack else 1), 16 if spec.growth is None else 17)
        for warps, m_steps in ((1, 1), (2, 1), (4, 1), (4, 2), (8, 1), (8, 2)):
            if warps * m_steps > 1 and warps * m_steps * 16 >= 2 * rows:
                continue
            for block_k in (32, 64, 128):
                if block_k > 32 and block_k >= 2 * spec.keys:
                    continue
                for stages in (2, 3):
                    if stages == 2 or spec.keys > 2 * block_k:
                        yield AttentionParameters(warps, m_steps, block_k, stages, pack)


def _splits(plan: AttentionPlan, limits: CudaLimits) -> Iterator[AttentionPlan]:
    """Yield the plan with blocks that share its keys, where there are too few tiles for the multiprocessors."""
    blocks, count = int(plan.items), limits.likely_sm_count
    for split in _SPLITS if blocks < count else ():
        made = make_plan(plan.spec, replace(plan.parameters, split=split), limits)
        if isinstance(made, AttentionPlan) and blocks * split < 2 * count and 2 * split <= int(plan.key_blocks):
            yield made


def _reads_keys_once(plan: AttentionPlan) -> bool:
    """Whether one tile has all queries of its heads: a step of decoding."""
    return plan.tiles == 1


def predicted_cycles(plan: AttentionPlan, limits: CudaLimits) -> float:
    """Return a time to order candidates by, in cycles of a multiprocessor."""
    p, spec = plan.parameters, plan.spec
    tiles, sm_count = int(plan.items) * p.split, limits.likely_sm_count
    resident = limits.resident_blocks(plan.threads, plan.registers, plan.shared_bytes)
    together = min(resident, math.ceil(tiles / sm_count))
    rounds = math.ceil(tiles / (sm_count * together))
    depth = plan.depth_steps * 16 + plan.value_pairs * 16
    arithmetic = plan.rows * p.block_k * depth / _MULTIPLY_ADDS / min(1.0, together * p.warps / 4)
    shared = 2 * (p.warps + 1) * p.block_k * depth / _SHARED_BYTES
    powers = plan.rows * p.block_k / _POWERS
    # Blocks that a multiprocessor holds together fill each other's waits.
    busy = together * (max(arithmetic, shared) + 0.5 * powers)
    alone = _STEP_CYCLES + max(arithmetic, shared) + powers
    if _reads_keys_once(plan):
        gpu = limits.gpu or H200
        share = gpu.bandwidth_gb_s * 1e3 / gpu.clock_mhz / min(tiles, sm_count)
        # Caches that grow are written as often as they are read.
        moved = p.block_k * (plan.width + plan.value_width) * CHUNK * ELEMENT_BYTES * (1 if spec.growth is None else 2)
        copying = _COPY_CYCLES + (0 if spec.growth is None else _KEEP_CYCLES)
        alone = max(alone, copying + moved / min(_COPIED_BYTES * p.warps, share / together))
    once = _TILE_CYCLES + (_EXCHANGE_CYCLES * p.split if p.split > 1 else 0)
    steps = math.ceil(_mean_steps(plan) / p.split)
    # Stages more take shared memory, and are worth it where keys come from memory.
    worth = 0.05 if spec.growth is None else -0.01
    return rounds * (once + steps * max(busy, alone)) * (1 + worth * (p.stages - 2))


def _mean_steps(plan: AttentionPlan) -> float:
    """Return the blocks of keys of a tile, on average."""
    spec, block_k = plan.spec, plan.parameters.block_k
    keys = spec.keys
    if spec.causal:
        keys = max(1, spec.keys - max(0, spec.queries - plan.tile_queries) // 2)
    if spec.window:
        keys = min(keys, (1 if spec.causal else 2) * spec.window + plan.tile_queries)
    return math.ceil(keys / block_k)
