"""Matmuls of up to 16 rows by weights that stream through shared memory, for GPUs of sm_80 on.

The function, the notation and the arithmetic are those of `template.py`. There a block makes one tile of
rows of W from registers; here as many blocks as fit onto the GPU at once share all tiles, and the steps of W that come
next, of the tiles that follow too, are on their way to shared memory meanwhile, `depth` of each warp. Each lane copies
the bytes that it multiplies, so that no lane waits for another's. A warp keeps its part of x in registers, or with
`held` some steps of it, and loads the next one when it has used one. Norms of x are made of these registers.

Weights of 16 bits stream where the target has no wgmma: kernels for those start early, and `template.py` is as fast.
Llama-1B's decode step then takes 0.96 of the time of `template.py` with one sequence, 0.86 with 16
(`benchmarks/results/h100-decode-sm80.json`).

With `dependent`, the copies begin before the kernel before has ended, and depend on no registers.
With `early`, x, which has to wait for the kernel before, is asked for before the last of these steps instead of behind
them all. With `collected`, the block's warps meet once, when all tiles are made, instead of at each tile's end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import Feature, ResolvedTarget
from relaxtune.schedules.templates.base import Case
from relaxtune.schedules.templates.gemv.plan import TILE, GemvStreamParameters, GemvStreamPlan, make_stream_plan
from relaxtune.schedules.templates.gemv.stream_kernel import build_gemv_stream_kernel
from relaxtune.schedules.templates.gemv.template import GemvTemplate
from relaxtune.schedules.tir.epilogue import MatmulFunction

_FEW_WARPS, _MANY_WARPS = 4, 16
# Tiles, warps, depth, blocks a multiprocessor, steps asked for before x, and whether sums are collected. The first one
# is the fastest in 14 cases on an H200 of 16 shares that do neither. The next four have nearly all best times of 7
# cases with up to 45 shares. The last ones serve a short K, and x that takes many registers.
_SHARES = (
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
    """The template; see `schedules.templates.base.KernelTemplate`."""

    parameters = GemvStreamParameters

    def _propose(self, case: Case[MatmulFunction]) -> Sequence[GemvStreamParameters] | Refusal:
        found, limits = case.found, case.limits
        refusal = Refusal(f"K is {found.k}, too short for {_FEW_WARPS} warps to share")
        proposed: list[GemvStreamPlan] = []
        for p in _proposals(found, limits.likely_sm_count, Feature.DEPENDENT_LAUNCH in case.target.features):
            plan = make_stream_plan(found, p, limits)
            if isinstance(plan, Refusal):
                refusal = plan
            # All warps have work, and no more steps are on their way than there are.
            elif p.warps <= plan.steps and p.depth < 2 * plan.turns * plan.rounds and plan not in proposed:
                proposed.append(plan)
        if found.stored is None:
            tiles_min = _TILES_MIN * limits.likely_sm_count
            proposed.sort(key=lambda plan: (_is_uneven(plan), not _is_preferred(plan, tiles_min), not _shares_x(plan)))
        return [plan.parameters for plan in proposed] or refusal

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> MatmulFunction | Refusal:
        found = super()._recognise(func, target)
        if isinstance(found, MatmulFunction) and found.stored is None and Feature.WGMMA in target.features:
            return Refusal("the weights have 16 bits, expected 8 or 4 (template gemv reads those as fast)")
        return found

    def _make(self, case: Case[MatmulFunction], p: GemvStreamParameters) -> tirx.PrimFunc | Refusal:
        plan = make_stream_plan(case.found, p, case.limits)
        return plan if isinstance(plan, Refusal) else build_gemv_stream_kernel(case.func, case.found, plan)


def _proposals(matmul: MatmulFunction, sm_count: int, dependent: bool) -> Iterator[GemvStreamParameters]:
    """Yield shares that may suit a shape; some do not fit."""
    if matmul.stored is None:
        for tiles, warps, depth, resident, split, held in _PLAIN_SHARES:
            blocks = split * min(math.ceil(matmul.n / (TILE * tiles)), sm_count * resident // split)
            collected = split > 1
            yield GemvStreamParameters(tiles, warps, depth, blocks, dependent, 0, collected, split, held)
        return
    for tiles, warps, depth, resident, early, collected in _SHARES:
        blocks = min(math.ceil(matmul.n / (TILE * tiles)), sm_count * resident)
        yield GemvStreamParameters(tiles, warps, depth, blocks, dependent, early, collected)


def _is_uneven(plan: GemvStreamPlan) -> bool:
    """Whether the last round of tiles leaves many blocks idle."""
    return plan.rounds * plan.parameters.groups > _UNEVEN_MAX * plan.row_tiles


def _is_preferred(plan: GemvStreamPlan, tiles_min: float) -> bool:
    """Whether warps make two tiles, so that half as many blocks read x; of few rows and a long K, x is little of it."""
    p, long = plan.parameters, plan.turns >= _LONG_TURNS
    if p.warps != _MANY_WARPS or p.split > 1 or plan.row_tiles * p.tiles < tiles_min:
        return False
    if long and plan.column_tiles == 1:
        return (p.tiles, p.depth, p.held) == (1, 6, 0)
    return (p.tiles, p.depth, p.held) == (2, 3 if long else 2, 4)


def _shares_x(plan: GemvStreamPlan) -> bool:
    """Whether many warps share x where it takes as many loads as the block's only tile of W."""
    p = plan.parameters
    return plan.rounds == 1 and plan.column_tiles > 1 and (p.tiles, p.warps) == (1, _MANY_WARPS)
