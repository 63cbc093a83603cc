"""Attention for Hopper (sm_90a) in one kernel: TMA, mbarriers and wgmma with an online softmax, in TIRx.

Notation
--------
The function of `schedules.functions.attention`, with Q, K, V and O float16 or bfloat16::

    S = Q K^T                       float32, registers; a tile of `64 * consumers` rows and `block_k` keys at a time
    P = exp(mask(scale * S) - m)    float32, then 2 bytes a value, registers; m the rows' largest scores so far
    O = O * exp(m_before - m) + P V     float32, registers; divided by the sum of P in the end

A thread block makes one tile of queries of one head, or with `pack` of the `heads / kv_heads` heads that share a head
of K and V: row r of the tile is query `r // group`, head `r % group`. Blocks of keys that none of its queries sees
(`causal`, `window`) are skipped. Its threads:

- consumers: `consumers` warpgroups of 128 threads with 64 rows each, in `m64nNk16` wgmma instructions, Q and K and V in
  shared memory, P in registers. Thread t of a warpgroup holds of rows `16 * (t / 32) + (t % 32) / 4` and 8 below, in
  each 8 columns, columns `2 * (t % 4)` and the next.
- producer: one warp after them; one thread of it issues every TMA load.

Where `blocks` is given, a thread block makes every `blocks`-th tile, and loads the next while it works on the last.

With `overlap`, the scores of the next keys are multiplied while the softmax of the last is computed. With `pingpong`,
besides, the warpgroups take turns to issue their multiplications (named barriers). Both are FlashAttention-3's (Shah
et al., 2024, sections 3.1 and 3.2).

Shared memory is dynamic; every tile is stored in chunks of 64 columns, 128-byte rows swizzled 128 bytes, its start
aligned to 1024 bytes. Heads whose size is no multiple of 64 take whole chunks, filled with zeros by TMA:

    tile_q   [1 or 2, chunks, 64 * consumers, 64]       later O, from where TMA stores it
    tile_k   [stages, chunks, block_k, 64]      "K-major" to wgmma
    tile_v   [stages, value_chunks, block_k, 64]      "MN-major"
    full_q, full_k, full_v          one mbarrier a tile: one arrival (the producer) and the tile's bytes
    empty_q, empty_k, empty_v       one mbarrier a tile: one arrival by each warpgroup
    partial     rows of O, m and the sum of P from every block of the cluster (`split`)

With `split`, the blocks of a cluster share one tile: each sums a part of the keys and sends each row of its O to the
block that adds up that row, in the order of ranks, and writes it. With `dependent`, the kernel may start while the one
before it in the stream ends (programmatic dependent launch): it waits for it before it reads or writes global memory,
but for caches that no kernel writes, and what they are copied to where no other kernel uses it.

With spans, a block of keys that no query of a tile sees is skipped as well: sequences of several lengths that lie one
after another are made as one, and a tile may hold several.

Where caches grow (`schedules.functions.attention.CacheGrowth`), the kernel writes K and V too: it loads the caches and
the new positions, and copies each block of keys from shared memory (`growth.py`).

Masks: an `add` mask of finite numbers, however low, gives an ordinary softmax; a row that sees no key
(all -inf, or not kept) is NaN; +inf or NaN in a row makes it NaN. Rows and keys outside the tensors are neither
read (TMA fills with zeros) nor written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import AttentionSpec
from relaxtune.schedules.targets import CudaLimits, Feature, ResolvedTarget
from relaxtune.schedules.templates.attention.recognise import bias_bytes, recognise_attention
from relaxtune.schedules.templates.attention.tiles import ELEMENT_BYTES
from relaxtune.schedules.templates.attention_sm90.kernel import build_kernel
from relaxtune.schedules.templates.attention_sm90.plan import (
    AttentionParameters,
    AttentionPlan,
    make_plan,
    registers_needed,
    spills,
)
from relaxtune.schedules.templates.base import Case, KernelTemplate
from relaxtune.schedules.templates.emit.wgmma import ROWS

_CANDIDATES_MAX = 16
# Of larger heads, a third warpgroup's share of the registers holds too few keys.
_THIRD_HEAD_DIM_MAX = 96
_STAGES_MAX = 4
# Of a warpgroup's step, what keeps the others from theirs beside the arithmetic.
_STEP_CYCLES = 80
# A kernel that spills comes after others that are predicted to take this much longer. Measured were 1.03 to 1.35
# (`benchmarks/results/h200-attention-against-torch.json`).
_SPILLED = 1.05


class AttentionSm90(KernelTemplate[AttentionSpec, AttentionParameters]):
    """The template; see `schedules.templates.base.KernelTemplate`."""

    parameters = AttentionParameters

    def _propose(self, case: Case[AttentionSpec]) -> Sequence[AttentionParameters] | Refusal:
        proposed = propose_for(case.found, case.limits, bias_bytes(case.func, case.found))
        return proposed or Refusal("no tile fits this shape")

    def _make(self, case: Case[AttentionSpec], p: AttentionParameters) -> tirx.PrimFunc | Refusal:
        plan = make_plan(case.found, p, case.limits, bias_bytes=bias_bytes(case.func, case.found))
        return plan if isinstance(plan, Refusal) else build_kernel(case.func, plan)

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> AttentionSpec | Refusal:
        found = recognise_attention(func, target, Feature.WGMMA, Feature.TMA)
        if isinstance(found, Refusal) or (found.is_static and found.spans is None):
            return found
        return Refusal("its sizes are symbolic, or its keys in spans")


def propose_for(
    spec: AttentionSpec, limits: CudaLimits, mask_bytes: int, *, symbolic: bool = False
) -> list[AttentionParameters]:
    """Return the parameters worth measuring for known sizes, the most promising first.

    With `symbolic`, the kernels are for any sizes, and these are one of their points.
    """
    sm_count = limits.likely_sm_count
    deepest = [_deepest(spec, p, limits, mask_bytes) for p in _proposals(spec, sm_count)]
    plans = [plan for plan in deepest if plan is not None]
    # Of equals, those that are sure of their places come first, and those that take turns.
    plans.sort(
        key=lambda plan: (
            predicted_cycles(plan, limits) * (_SPILLED if not symbolic and spills(plan, limits, mask_bytes) else 1),
            -plan.parameters.residents,
            not plan.parameters.pingpong,
        )
    )
    distinct: dict[tuple[AttentionParameters, int], AttentionParameters] = {}
    for plan in plans:
        # Kernels that differ only in places that no block takes are the same.
        places = min(_blocks_held(plan, limits), math.ceil(plan.blocks / sm_count))
        distinct.setdefault((replace(plan.parameters, residents=1, stages=1), places), plan.parameters)
    return list(distinct.values())[:_CANDIDATES_MAX]


def _proposals(spec: AttentionSpec, sm_count: int) -> Iterator[AttentionParameters]:
    """Yield tiles and roles that may suit a shape, with the deepest ring; some do not fit."""
    # Few queries: the heads of a group together fill the rows of an instruction.
    packs = (True, False) if spec.group > 1 and spec.queries * spec.group <= 4 * ROWS else (False,)
    for pack in packs:
        rows = spec.queries * (spec.group if pack else 1)
        for consumers in (1, 2, 3):
            if consumers > 1 and rows <= ROWS * (consumers - 1):
                continue
            if consumers == 3 and spec.value_dim > _THIRD_HEAD_DIM_MAX:
                continue
            for block_k in (64, 80, 96, 112, 128):
                if block_k > 64 and block_k >= 2 * spec.keys:
                    continue
                for residents in (1, 2, 3, 4) if consumers == 1 else (1,):
                    yield from _roles(
                        spec, AttentionParameters(consumers, block_k, pack=pack, residents=residents), sm_count
                    )


def _roles(spec: AttentionSpec, p: AttentionParameters, sm_count: int) -> Iterator[AttentionParameters]:
    """Yield the forms of one tile: keys split over blocks or not, blocks for one tile or several."""
    overlaps = (True, False) if spec.keys > p.block_k else (False,)
    for overlap in overlaps:
        for split in (1, 2, 3, 4, 6, 8):
            yield replace(p, stages=_STAGES_MAX, split=split, overlap=overlap)
        for turns in (True, False) if p.consumers > 1 and overlap else (False,):
            yield replace(p, stages=_STAGES_MAX, overlap=overlap, pingpong=turns, blocks=sm_count * p.residents)
            if turns:
                yield replace(p, stages=_STAGES_MAX, pingpong=True)


def _deepest(spec: AttentionSpec, p: AttentionParameters, limits: CudaLimits, mask_bytes: int) -> AttentionPlan | None:
    """Return the plan with as many stages as fit beside the other residents and are of use, or None."""
    share = 2 * math.ceil(math.ceil(spec.keys / p.block_k) / p.split) if p.blocks else 0
    share = max(share, math.ceil(math.ceil(spec.keys / p.block_k) / p.split))
    # Of a multiprocessor's shared memory, the system takes 1 KiB a block.
    available = (limits.shared_bytes_optin + 1024) // p.residents - 1024
    for stages in range(min(p.stages, share), 0, -1):
        plan = make_plan(spec, replace(p, stages=stages), limits, bias_bytes=mask_bytes)
        if isinstance(plan, AttentionPlan) and plan.shared_bytes <= available:
            # A fixed number of blocks is for more tiles than that.
            return plan if not p.blocks or plan.query_stages > 1 else None
    return None


def predicted_cycles(plan: AttentionPlan, limits: CudaLimits) -> float:
    """Return a time to order candidates by, in cycles of a multiprocessor.

    The figures are a least-squares fit (16 % root mean square) to 520 kernels of head sizes 64 and 128, with 1 to 8192
    queries, timed on an H200, with a few set by hand where it ranked neighbours wrongly.
    """
    spec, p = plan.spec, plan.parameters
    sm_count = limits.likely_sm_count
    rounds, together = _rounds(plan, limits)
    steps = _mean_steps(plan)
    # 2048 multiply-adds and 16 powers of 2 a cycle at best, by all warpgroups of a multiprocessor.
    products = ROWS * p.block_k * (plan.columns + spec.value_dim) / 2048
    powers = ROWS * p.block_k / 16
    # Cycles that a warpgroup waits for on its own.
    alone = max(products, powers) + 155 if p.overlap else products + powers + 215
    if p.stages == 1 and steps > 1:
        # Each load waits for the step before.
        alone += 800
    shared = together * p.consumers * (_STEP_CYCLES + max(0.59 * products, powers))
    # Instructions of 80, 96 and 112 keys are no faster than those of 128.
    shared *= 1.18 if p.block_k % 64 else 1
    begin = 1800 if p.blocks else 2200 if p.consumers == 1 else 3200
    cycles = rounds * (begin + steps * (alone + shared))
    if p.split > 1:
        cycles += 800 + 40 * plan.used_rows
    heads = spec.heads * spec.queries + spec.kv_heads * spec.keys
    elements = spec.batch * (spec.head_dim + spec.value_dim) * heads
    memory = elements * ELEMENT_BYTES / (16 * sm_count) + 2000
    # Where memory is the limit, what leaves it the most time comes first.
    return max(cycles, memory) + 0.2 * cycles


def _rounds(plan: AttentionPlan, limits: CudaLimits) -> tuple[float, int]:
    """Return how many tiles a block's place makes one after another, and how many a multiprocessor makes at a time."""
    p = plan.parameters
    sm_count = limits.likely_sm_count
    held = _blocks_held(plan, limits)
    if p.blocks:
        each = math.ceil(plan.items / plan.blocks) * (2 if plan.paired else 1)
        return each, min(held, math.ceil(plan.blocks / sm_count))
    # A cluster stays within a group of multiprocessors, and some groups lack members.
    rounds = plan.blocks / (sm_count * held * (0.775 if p.split > 1 else 1))
    # With dependent launch, blocks crowd on the multiprocessors that the kernel before them has left.
    together = min(held, math.ceil(2 * plan.blocks / sm_count))
    return rounds + 0.5 if rounds > 3 else math.ceil(rounds), together


def _blocks_held(plan: AttentionPlan, limits: CudaLimits) -> int:
    p = plan.parameters
    if p.consumers > 1:
        return 1
    needed = max(64, registers_needed(plan.spec, p, 0) + 14)
    by_registers = max(p.residents, limits.registers_per_block // (plan.threads * needed))
    return max(1, min((limits.shared_bytes_optin + 1024) // (plan.shared_bytes + 1024), by_registers))


def _mean_steps(plan: AttentionPlan) -> float:
    """Return the blocks of keys that a thread block sums for a tile, on average."""
    spec, p = plan.spec, plan.parameters
    if not spec.causal and not spec.window:
        return math.ceil(plan.key_blocks / p.split)
    total = 0.0
    for tile in range(plan.tiles):
        first = tile * plan.tile_queries + plan.ahead
        last = min(first + plan.tile_queries, spec.keys) - 1
        end = last + 1 if spec.causal else min(last + spec.window, spec.keys)
        start = max(first - spec.window + 1, 0) if spec.window else 0
        blocks = math.ceil(max(end, 1) / p.block_k) - start // p.block_k
        total += math.ceil(max(blocks, 1) / p.split)
    return total / plan.tiles
