"""Matmuls of up to 16 rows by 8- or 4-bit weights that stream through shared memory, for GPUs of sm_80 on.

The function, the notation and the arithmetic are those of `template.py`. There a block makes one tile of
rows of W from registers; here as many blocks as fit onto the GPU at once share all tiles, and the steps of W that come
next, of the tiles that follow too, are on their way to shared memory meanwhile, `depth` of each warp. Each lane copies
the bytes that it multiplies, so that no lane waits for another's. A warp keeps its part of x in registers.

With `dependent`, that begins before the kernel before has ended. What is on its way then does not depend on registers.
With `early`, x, which has to wait for the kernel before, is asked for before the last of these steps instead of behind
them all. With `collected`, the block's warps meet once, when all tiles are made, instead of at each tile's end.

Still a call takes some 2 us more than its bytes do: x comes behind the weights that are on their way already, and a
kernel sees the end of the one before a microsecond late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.gemv.plan import TILE
from relaxtune.schedules.templates.gemv.stream_kernel import build_gemv_stream_kernel
from relaxtune.schedules.templates.gemv.stream_plan import GemvStreamParameters, GemvStreamPlan, make_stream_plan
from relaxtune.schedules.templates.gemv.template import GemvTemplate
from relaxtune.schedules.tir.epilogue import MatmulFunction

_FEW_WARPS = 4
# Tiles, warps, depth, blocks a multiprocessor, steps asked for before x, and whether sums are collected. The first one
# is the fastest in 14 cases on an H200 of 16 shares that do neither (6 % longer than a case's best of these, 16 % at
# most). The next four have nearly all best times of 7 cases with up to 45 shares, where the first takes 10 % longer,
# 14 % at most. The last ones serve a short K, and x that takes many registers.
_SHARES = (
    (1, 16, 2, 1, 0, False),
    (1, 16, 4, 1, 2, True),
    (2, 16, 3, 1, 1, True),
    (1, 16, 4, 1, 3, False),
    (1, 16, 4, 1, 0, False),
    (1, 16, 2, 2, 0, False),
    (1, 8, 4, 1, 0, False),
    (1, 8, 4, 2, 0, False),
    (2, 4, 4, 2, 0, False),
    (1, 8, 2, 2, 0, False),
    (2, 8, 2, 2, 0, False),
    (2, 8, 4, 1, 0, False),
    (1, _FEW_WARPS, 4, 2, 0, False),
    (1, _FEW_WARPS, 1, 1, 0, False),
    (1, 8, 8, 1, 3, True),
)


class GemvStream(GemvTemplate[GemvStreamParameters]):
    """The template; see `schedules.templates.base.KernelTemplate`."""

    parameters = GemvStreamParameters

    def propose(
        self, func: tirx.PrimFunc, found: MatmulFunction, target: ResolvedTarget
    ) -> Sequence[GemvStreamParameters] | Refusal:
        """Return the parameters worth measuring, the most promising first, or why there are none."""
        limits = cuda_limits(target)
        refusal = Refusal(f"K is {found.k}, too short for {_FEW_WARPS} warps to share")
        proposed: list[GemvStreamParameters] = []
        for tiles, warps, depth, resident, early, collected in _SHARES:
            blocks = min(math.ceil(found.n / (TILE * tiles)), limits.likely_sm_count * resident)
            parameters = GemvStreamParameters(tiles, warps, depth, blocks, True, early, collected)
            plan = make_stream_plan(found, parameters, limits)
            if isinstance(plan, Refusal):
                refusal = plan
            elif _is_sensible(plan) and plan.parameters not in proposed:
                proposed.append(plan.parameters)
        return proposed or refusal

    def make(
        self, func: tirx.PrimFunc, found: MatmulFunction, target: ResolvedTarget, parameters: GemvStreamParameters
    ) -> tirx.PrimFunc | Refusal:
        """Return the scheduled PrimFunc, or why it cannot be made."""
        plan = make_stream_plan(found, parameters, cuda_limits(target))
        return plan if isinstance(plan, Refusal) else build_gemv_stream_kernel(func, found, plan)


def _is_sensible(plan: GemvStreamPlan) -> bool:
    """Whether all warps have work, and no more steps are on their way than there are."""
    p = plan.parameters
    return p.warps <= plan.steps and p.depth < 2 * plan.turns * plan.rounds
