"""Sizes of the kernel of `template.py` for an attention and parameters, or a refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import AttentionSpec
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.targets import CudaLimits
from relaxtune.schedules.templates.attention.sizes import ceil_div, is_zero, least
from relaxtune.schedules.templates.attention.tiles import ELEMENT_BYTES, TilePlan, section_of
from relaxtune.schedules.templates.base import NOT_NEGATIVE, Parameters, among, refuse_shared
from relaxtune.schedules.templates.emit.wgmma import ROWS, WARPGROUP

# Columns of one swizzled row of shared memory: 128 bytes.
CHUNK = 64

_ALIGNMENT = 128
# consumers -> registers of a thread of a consumer and of the producer's warpgroup after setmaxnreg; the file has 65536.
REGISTERS = {2: (240, 24), 3: (160, 32)}
# Registers of a consumer beside scores, weights and output (addresses, row statistics, masks), measured.
_REGISTERS_BESIDE = 27
# For the part of a mask of padding by which a warp sees whether there is anything in it.
_REGISTERS_TO_SCAN = 8


@dataclass(frozen=True)
class AttentionParameters(Parameters):
    """Tile sizes and roles of one kernel."""

    template: ClassVar[str] = "attention_sm90"

    consumers: int = among(2, range(1, 4))  # Warpgroups that compute, 64 rows of queries each.
    block_k: int = among(128, range(16, 257, 16))  # Keys at a time.
    stages: int = among(2, range(1, 9))  # Depth of the rings of K and of V in shared memory.
    # Blocks, one cluster, that share the keys of a tile of queries: as many as every sm_90 device runs (CUDA C++
    # Programming Guide 13.0, "Thread Block Clusters").
    split: int = among(1, range(1, 9))
    pack: bool = False  # Whether the heads that share a head of K and V are rows of one tile.
    # Whether the scores of the next keys are multiplied while the softmax of the last is computed.
    overlap: bool = True
    pingpong: bool = False  # Whether the warpgroups take turns to multiply, one while the others compute their softmax.
    # Thread blocks; each makes every `blocks`-th tile. 0 for a block (with `split`, a cluster) per tile.
    blocks: int = among(0, NOT_NEGATIVE)
    residents: int = among(1, range(1, 5))  # Blocks a multiprocessor should hold at a time: fewer registers a thread.
    dependent: bool = True  # Whether the kernel may start before the one before it has ended.


@dataclass(frozen=True)
class AttentionPlan(TilePlan):
    """Sizes of one kernel."""

    parameters: AttentionParameters
    chunks: int  # Parts of 64 columns of a head of Q and K.
    value_chunks: int  # Parts of 64 columns of a head of V and O.
    columns: int  # Columns of a head of Q and K, rounded up to what an instruction sums.
    threads: int  # Of a block: the consumers, and a warp or a warpgroup for the producer.

    @property
    def rows(self) -> int:
        """Rows of a tile of queries in shared memory."""
        return ROWS * self.parameters.consumers

    @property
    def query_chunks(self) -> int:
        """Parts of 64 columns of a tile of Q in shared memory, which O takes later."""
        return max(self.chunks, self.value_chunks)

    @property
    def shared_bytes(self) -> int:
        """Of a block's dynamic shared memory."""
        p = self.parameters
        queries = self.query_stages * self.rows * self.query_chunks
        keys = p.stages * p.block_k * (self.chunks + self.value_chunks)
        partial = _ALIGNMENT * math.ceil(self.partial_floats * 4 / _ALIGNMENT) if p.split > 1 else 0
        return (queries + keys) * CHUNK * ELEMENT_BYTES + partial + 8 * (4 * p.stages + 4)

    @property
    def used_rows(self) -> Size:
        """Rows of a tile that are a query of some head."""
        return least(self.tile_queries, self.spec.queries) * self.group

    @property
    def share_rows(self) -> Size:
        """Rows that one block of a cluster sums."""
        return ceil_div(self.used_rows, self.parameters.split)

    @property
    def share_rows_max(self) -> int:
        """Rows that one block of a cluster sums at most: those that there is memory for."""
        share = self.share_rows
        return share if isinstance(share, int) else math.ceil(self.tile_queries * self.group / self.parameters.split)

    @property
    def statistics_start(self) -> int:
        """Floats of partial output in shared memory, before the rows' statistics."""
        return self.parameters.split * self.share_rows_max * partial_columns(self.spec)

    @property
    def partial_floats(self) -> int:
        """Floats of the parts of a cluster's blocks, in each of them."""
        return self.statistics_start + 2 * self.parameters.split * self.share_rows_max


def make_plan(
    spec: AttentionSpec, p: AttentionParameters, limits: CudaLimits, *, bias_bytes: int = 0
) -> AttentionPlan | Refusal:
    """Return the sizes of the kernel for an attention, or why there is none with these parameters.

    `bias_bytes` are the bytes of an element of the mask.
    """
    refusal = p.refuse_values() or _refuse_parameters(p)
    if refusal is not None:
        return refusal
    group = spec.group if p.pack else 1
    if group > ROWS or (p.consumers > 1 and ROWS % group):
        return Refusal(f"pack puts {group} heads into {p.consumers} times {ROWS} rows, expected a divisor of {ROWS}")
    key_blocks = math.ceil(spec.keys / p.block_k)
    if p.split > key_blocks:
        return Refusal(f"split is {p.split}, there are {key_blocks} blocks of {p.block_k} keys")
    refusal = refuse_registers(registers_needed(spec, p, bias_bytes), p, limits)
    if refusal is not None:
        return refusal
    heads = spec.heads // group
    plan = AttentionPlan(
        spec=spec,
        parameters=p,
        group=group,
        tile_queries=ROWS * p.consumers // group,
        heads=heads,
        section=section_of(spec, heads),
        chunks=math.ceil(spec.head_dim / CHUNK),
        value_chunks=math.ceil(spec.value_dim / CHUNK),
        columns=16 * math.ceil(spec.head_dim / 16),
        threads=p.consumers * WARPGROUP + (WARPGROUP if p.consumers > 1 else 32),
    )
    return refuse_shared(plan.shared_bytes, limits) or _refuse_growth(plan) or plan


def _refuse_growth(plan: AttentionPlan) -> Refusal | None:
    """Return why a kernel that writes K and V does not: each of their elements is to be loaded by one block, once."""
    spec, p = plan.spec, plan.parameters
    if spec.growth is None:
        return None
    if plan.tiles > 1 or plan.group != spec.group or plan.query_stages > 1:
        return Refusal("caches that grow take one tile for all queries of the heads that share a head of K and V")
    if spec.window or p.consumers > 1:
        return Refusal("caches that grow go with 1 consumer and no window")
    if p.stages < 2 and plan.key_blocks > p.split:
        return Refusal("caches that grow take 2 stages or more for several blocks of keys")
    return None


def registers_needed(spec: AttentionSpec, p: AttentionParameters, bias_bytes: int) -> int:
    """Return the registers of a consumer's thread: scores, mask, output, and what lies beside.

    With `overlap`, the weights in 2 bytes live beside the next scores, else they take their place.
    """
    weights = p.block_k // 4 if p.overlap else 0
    if spec.bias is not None and spec.bias.kind == "add" and spec.bias.of_padding:
        # Caches that grow by symbolic lengths: not measured with fewer.
        weights += _REGISTERS_TO_SCAN * (3 if spec.growth is not None and not isinstance(spec.keys, int) else 1)
    elif spec.bias is not None:
        # Of each 8 keys a pair, for each row of a thread unless one row of the mask serves all; some are used up before
        # the last is there.
        lines = 1 if is_zero(spec.bias.query_stride) and (not p.pack or is_zero(spec.bias.head_stride)) else 2
        weights += lines * p.block_k // 8 * max(1, bias_bytes // 2) * 3 // 4
    return p.block_k // 2 + weights + spec.value_dim // 2 + _REGISTERS_BESIDE


def spills(plan: AttentionPlan, limits: CudaLimits, bias_bytes: int) -> bool:
    """Whether a kernel of known sizes likely keeps some values in memory for want of registers.

    The loop over two blocks of keys, a number known beforehand, is straight code. ptxas then multiplies the scores of
    the second block before it has made weights of the first one's. The registers for it are a fit to 72 kernels of CUDA
    13.5. Kernels whose blocks make several tiles are left out: they hardly spill.
    """
    spec, p = plan.spec, plan.parameters
    if not p.overlap or p.split > 1 or p.blocks or spec.causal or spec.hides_earlier or plan.key_blocks != 2:
        return False
    beside = 3 * p.block_k // 4 - 32
    return registers_needed(spec, p, bias_bytes) + beside > registers_available(p, limits)


def refuse_registers(needed: int, p: AttentionParameters, limits: CudaLimits) -> Refusal | None:
    """Return why a consumer's thread does not have the registers that it needs, None where it has."""
    available = registers_available(p, limits)
    return Refusal(f"a thread needs {needed} registers, {available} exist") if needed > available else None


def registers_available(p: AttentionParameters, limits: CudaLimits) -> int:
    """Return the registers that a consumer's thread may have."""
    if p.consumers in REGISTERS and p.residents == 1:
        return REGISTERS[p.consumers][0]
    # A multiprocessor has four parts with a quarter of the registers each; they take its warps in rotation.
    warps = p.residents * (p.consumers * 4 + (4 if p.consumers > 1 else 1))
    each = limits.registers_per_block // 4 // (math.ceil(warps / 4) * 32)
    return min(limits.registers_per_thread, each // 8 * 8)


def partial_columns(spec: AttentionSpec) -> int:
    """Return the floats of a row of partial output: padded so that rows start in different banks."""
    return spec.value_dim + 4


def _refuse_parameters(p: AttentionParameters) -> Refusal | None:
    if p.blocks and p.split > 1:
        return Refusal("split does not go with a fixed number of blocks")
    if p.pingpong and p.consumers == 1:
        return Refusal("pingpong has 1 consumer, expected 2 or 3")
    if p.residents > 1 and p.consumers > 1:
        return Refusal(f"residents is {p.residents} with {p.consumers} consumers, expected 1 (setmaxnreg)")
    return Refusal("overlap has 1 stage, expected 2 or more") if p.overlap and p.stages < 2 else None
