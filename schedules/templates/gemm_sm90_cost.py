"""A time to order the candidates of `schedules.templates.gemm_sm90` by: the first is taken where nothing was measured.

It is what each of three things would take alone, in a sum that leans to the longest, and what comes on top::

    (arithmetic^4 + memory^4 + chain^4)^(1/4) + tiles, one after another + blocks + writing + reduction

`chain` is one stage of the ring after another. L2's bandwidth never decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedules.templates.epilogue import MatmulFunction
from schedules.templates.gemm_sm90_plan import BLOCK_K, ELEMENT_BYTES, GemmPlan

_NORM = 4
# Clusters stay within a group of multiprocessors, not all of which are whole.
_GROUP = 16
_GROUPS_WHOLE = 0.775
# Loading parts of B for each other cost what it saved of L2, and 0 to 5 % more.
_MULTICAST = 1.03
_SHARED_BYTES = 233_472
_RESERVED_BYTES = 1024
_REGISTERS = 65_536
# Beside the accumulators, and threads of a block with one consumer.
_REGISTERS_BESIDE = 56
_SMALL_BLOCK_THREADS = 160


@dataclass(frozen=True)
class CostModel:
    """Constants of one GPU.

    Attributes
    ----------
    multiply_adds
        In a microsecond, of a multiprocessor.
    memory_bytes
        In a microsecond, of the GPU.
    latency_us
        Of a load; a ring hides it as far as it is deep.
    step_us
        Of one stage of the ring at least.
    tile_us
        Of beginning and ending a tile.
    block_us
        Of each block that a multiprocessor gets.
    write_us
        Of an element of a tile, evaluated and written by a warpgroup (hidden with `pingpong`).
    cluster_us, share_us, sum_us
        Of a reduction by a cluster, of each of its blocks, and of an element of each.
    """

    multiply_adds: float
    memory_bytes: float
    latency_us: float
    step_us: float
    tile_us: float
    block_us: float
    write_us: float
    cluster_us: float
    share_us: float
    sum_us: float


# A least-squares fit (10 % root mean square) to 802 medians, cold L2, of kernels of the shapes of
# benchmarks/bench_gemm_sm90.py. Of those of a shape, the one it puts first takes 2 % longer than the fastest (geometric
# mean).
H200 = CostModel(2.866e6, 4.097e6, 1.534, 0.1342, 0.9436, 0.604, 7.908e-05, 0.4158, 0.1237, 0.0001782)


def predicted_us(matmul: MatmulFunction, plan: GemmPlan, sm_count: int, model: CostModel = H200) -> float:
    """Return a kernel's time in microseconds as the model has it."""
    p = plan.parameters
    resident = _resident(plan)
    blocks = plan.blocks * plan.cluster
    slots: float = sm_count * resident
    if p.split_k > 1:
        slots = _GROUPS_WHOLE * (sm_count // _GROUP) * (_GROUP * resident // p.split_k * p.split_k)
    tiles_each = math.ceil(plan.tiles / plan.blocks)
    in_turn = math.ceil(blocks / slots) * tiles_each
    on_one = math.ceil(blocks / sm_count) * tiles_each
    if resident > 1 and blocks > sm_count:
        on_one = math.ceil(blocks * tiles_each / sm_count)
    # Instructions of few columns take as long as those of 64.
    work = p.block_m * max(p.block_n, 64) * BLOCK_K
    arithmetic = on_one * plan.k_share * work / model.multiply_adds
    moved = matmul.m * matmul.k + matmul.n * matmul.k + matmul.m * matmul.n
    memory = moved * ELEMENT_BYTES / model.memory_bytes
    chain = in_turn * plan.k_share * model.step_us
    if plan.k_share > p.stages:
        chain = max(chain, in_turn * plan.k_share * model.latency_us / p.stages)
    longest: float = sum(one**_NORM for one in (arithmetic, memory, chain)) ** (1 / _NORM)
    columns = plan.shares.columns
    write = 0.0 if p.pingpong else on_one * p.block_m * columns / p.consumers * model.write_us
    reduce = 0.0
    if p.split_k > 1:
        elements = min(p.block_m, matmul.m) * columns
        reduce = model.cluster_us + p.split_k * (model.share_us + elements * model.sum_us)
    total = longest + in_turn * model.tile_us + blocks / sm_count * model.block_us + write + reduce
    return total * (_MULTICAST if p.multicast > 1 else 1.0)


def _resident(plan: GemmPlan) -> int:
    """Return how many blocks a multiprocessor holds at a time."""
    p = plan.parameters
    if p.consumers > 1:
        return 1
    registers = plan.m_blocks * p.block_n // 2 + _REGISTERS_BESIDE
    by_memory = _SHARED_BYTES // (plan.shared_bytes + _RESERVED_BYTES)
    return max(1, min(by_memory, _REGISTERS // (_SMALL_BLOCK_THREADS * registers)))
