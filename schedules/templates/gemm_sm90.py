"""Matrix multiplication with an elementwise epilogue for Hopper (sm_90a): TMA, mbarriers and wgmma, in TIRx.

Notation
--------
::

    C[m, n] = epilogue(sum_k A[m, k] * B[k, n], m, n)        A, B: float16 or bfloat16; the sum: float32

    A   [M, K]            row major
    B   [K, N] or [N, K]  row major ("MN-major" or "K-major" to wgmma)
    C   [M, N]            row major, any dtype; leading axes of A and C are flattened into M

One thread block makes tiles of `block_m` x `block_n`: one, or where `blocks` is given, every `blocks`-th. Its threads:

- consumers: `consumers` warpgroups of 128 threads, each `block_m / consumers` rows of the tile, in `m64nNk16` wgmma
  instructions. Thread t of a warpgroup holds of rows `16 * (t / 32) + (t % 32) / 4` and 8 below, in each 8 columns,
  columns `2 * (t % 4)` and the next: 4 accumulators for every 8 columns of an instruction.
  With `pingpong`, each of two warpgroups makes whole tiles, by turns: one multiplies while the other writes.
- producer: one warp after them, of which one thread issues every TMA load.

Shared memory is a ring of `stages` stages (dynamic; each tile 1024-byte aligned, which a swizzle atom needs):

    tile_a   [stages, block_m, 64]               128-byte rows of K, swizzled 128 bytes
    tile_b   [stages, block_n/w, 64, w]          [K, N]: chunks of w columns, rows of K, swizzled 2*w bytes
             [stages, block_n, 64]               [N, K]: as A
    full     [stages] mbarrier: one arrival (the producer) and the bytes of both tiles
    empty    [stages] mbarrier: one arrival by each warpgroup that reads the stage
    turn     [2] mbarrier: whose turn it is to multiply (`pingpong`)
    partial  in place of the ring: the accumulators, for the other blocks of the cluster (`split_k`)
    patches and copies of `schedules.templates.output_tile`

With `split_k`, the blocks of a cluster share one tile: each sums a part of K, then each adds up, in the order of ranks,
its part of the columns from the shared memory of all, and writes it.
With `dependent`, the kernel may start while the one before it in the stream ends (programmatic dependent launch): it
waits for it before it reads or writes global memory, but for the first tiles of B where B is known to be constant.

TMA fills what lies outside A and B with zeros, so K may be ragged; rows and columns outside C are not written.

Limits and encodings: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (shapes,
register fragments, matrix descriptors, swizzle modes) and "Tensor Memory Access" (cp.async.bulk.tensor); CUDA driver
API, cuTensorMapEncodeTiled (16-byte aligned address and strides, box sides of at most 256).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tvm import tirx

from schedules.targets import CudaLimits, ResolvedTarget
from schedules.templates.base import Parameters, Refusal, TemplateError
from schedules.templates.epilogue import MatmulFunction, recognise_matmul
from schedules.templates.gemm_sm90_kernel import build_kernel
from schedules.templates.gemm_sm90_plan import BLOCK_K, ELEMENT_BYTES, PTX_TYPES, GemmParameters, GemmPlan, make_plan

# A PrimFunc's attribute: positions of the parameters that no kernel writes (weights).
CONSTANT_PARAMS_ATTR = "relaxtune.constant_params"

_OUTPUT_DTYPES = ("float16", "bfloat16", "float32")
_TMA_ALIGNMENT = 16
_INDEX_MAX = 2**31 - 1
# Of H100 SXM and H200, where the target was given by name.
_SM_COUNT = 132
_GROUP = 16
_STAGES_MAX = 12
_CANDIDATES_MAX = 32


class GemmSm90:
    """The template; see `schedules.templates.base.Template`."""

    name = GemmParameters.template

    def candidates(self, func: tirx.PrimFunc, target: ResolvedTarget) -> Sequence[GemmParameters] | Refusal:
        """Return the parameters worth measuring, the most promising first, or why there are none."""
        matmul = _recognise(func, target)
        if isinstance(matmul, Refusal):
            return matmul
        limits = _limits(target)
        sm_count = limits.sm_count or _SM_COUNT
        deepest = [_deepest(matmul, one, limits) for one in _proposals(matmul, sm_count)]
        fitting = [plan for plan in deepest if plan is not None]
        fitting.sort(key=lambda plan: _predicted_cycles(plan, sm_count))
        return [plan.parameters for plan in fitting[:_CANDIDATES_MAX]] or Refusal("no tile fits this shape")

    def apply(self, func: tirx.PrimFunc, target: ResolvedTarget, parameters: Parameters) -> tirx.PrimFunc | Refusal:
        """Return the scheduled PrimFunc, or why it cannot be made."""
        if not isinstance(parameters, GemmParameters):
            raise TemplateError(f"template {self.name} got {parameters!r}; expected GemmParameters.")
        matmul = _recognise(func, target)
        if isinstance(matmul, Refusal):
            return matmul
        plan = make_plan(matmul, parameters, _limits(target), constant_b=matmul.b in _constant_params(func))
        return plan if isinstance(plan, Refusal) else build_kernel(func, matmul, plan)

    def parse(self, decision: str) -> GemmParameters:
        """Return the parameters of a decision; TemplateError when it is not one of this template's."""
        return GemmParameters.from_json(decision)


def _limits(target: ResolvedTarget) -> CudaLimits:
    if not isinstance(target.limits, CudaLimits):
        raise TemplateError(f"template {GemmParameters.template} needs a CUDA target, got {target.kind}.")
    return target.limits


def _recognise(func: tirx.PrimFunc, target: ResolvedTarget) -> MatmulFunction | Refusal:
    """Return the function's matmul when this template can make it with some parameters."""
    if target.kind != "cuda" or target.arch != "sm_90a":
        return Refusal(f"the target is {target.kind} {target.arch}, expected cuda sm_90a (wgmma and TMA)")
    matmul = recognise_matmul(func)
    if isinstance(matmul, Refusal):
        return matmul
    if matmul.input_dtype not in PTX_TYPES:
        return Refusal(f"the operands are {matmul.input_dtype}, expected one of {', '.join(PTX_TYPES)}")
    if matmul.output_dtype not in _OUTPUT_DTYPES:
        return Refusal(f"the output is {matmul.output_dtype}, expected one of {', '.join(_OUTPUT_DTYPES)}")
    for name, size in (("K", matmul.k), ("N", matmul.n)):
        if size * ELEMENT_BYTES % _TMA_ALIGNMENT:
            return Refusal(f"{name} is {size}, expected a multiple of 8 (TMA strides are multiples of 16 bytes)")
    if max(matmul.m * matmul.n, matmul.m * matmul.k, matmul.n * matmul.k) > _INDEX_MAX:
        return Refusal("a matrix has 2**31 elements or more, the kernel counts in 32 bits")
    return matmul


def _constant_params(func: tirx.PrimFunc) -> frozenset[int]:
    """Return the positions of parameters that were marked as constant."""
    marked = func.attrs.get(CONSTANT_PARAMS_ATTR, ()) if func.attrs else ()
    return frozenset(int(position) for position in marked)


def _proposals(matmul: MatmulFunction, sm_count: int) -> Iterator[GemmParameters]:
    """Yield tiles and roles that may suit a shape, with the deepest ring; some do not fit."""
    for block_m, consumers, pingpong in (
        (64, 1, False),
        (64, 2, True),
        (128, 2, False),
        (128, 2, True),
        (256, 2, False),
    ):
        for block_n in (32, 48, 64, 96, 128, 192, 256):
            tiles = math.ceil(matmul.m / block_m) * math.ceil(matmul.n / block_n)
            if (block_m > 64 and block_m >= 2 * matmul.m) or (block_n > 32 and block_n >= 2 * matmul.n):
                continue
            blocks = sm_count if tiles > sm_count else 0
            if pingpong and not blocks:
                blocks = math.ceil(tiles / 2)
            for split_k in (1, 2, 3, 4, 6, 8) if not blocks else (1,):
                yield GemmParameters(block_m, block_n, _STAGES_MAX, consumers, blocks, split_k, pingpong, True)


def _deepest(matmul: MatmulFunction, p: GemmParameters, limits: CudaLimits) -> GemmPlan | None:
    """Return the plan with as many stages as fit and are of use, or None."""
    share = math.ceil(math.ceil(matmul.k / BLOCK_K) / p.split_k)
    for stages in range(min(p.stages, max(share, 2)), 1, -1):
        plan = make_plan(matmul, replace(p, stages=stages), limits)
        if isinstance(plan, GemmPlan):
            return plan
    return None


def _predicted_cycles(plan: GemmPlan, sm_count: int) -> float:
    """Return a time to order candidates by, in cycles of a multiprocessor.

    The figures are a least-squares fit (16 % root mean square) to 120 kernels of BERT-base's shapes with 128 and 4096
    rows, each timed on an H200 with cold L2.
    """
    p = plan.parameters
    available = float(sm_count)
    if p.split_k > 1:
        # A cluster stays within a group of 16 multiprocessors or a few more, not all of which are whole.
        available = 0.775 * (sm_count // _GROUP) * (_GROUP // p.split_k * p.split_k)
    waves = math.ceil(plan.blocks * p.split_k / available) * math.ceil(plan.tiles / plan.blocks)
    # 2048 multiply-adds a cycle, instructions of few columns like those of 64; 57 bytes a cycle from L2.
    arithmetic = p.block_m * max(p.block_n, 64) * BLOCK_K / 2048
    loads = (p.block_m + p.block_n) * BLOCK_K * ELEMENT_BYTES / 57
    # A ring hides the latency of loads only as far as it is deep.
    step = max(arithmetic, loads, 2150 / p.stages if plan.k_share > p.stages else 0)
    write = 0.3 * p.block_m * plan.shares.columns / p.consumers
    reduce = 150 * p.split_k if p.split_k > 1 else 0
    return waves * (1270 + plan.k_share * step + write * (0.5 if p.pingpong else 1.0)) + reduce
