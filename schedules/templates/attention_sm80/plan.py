"""Sizes of the kernel of `template.py` for an attention and parameters, or a refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import AttentionSpec
from relaxtune.schedules.targets import CudaLimits
from relaxtune.schedules.templates.attention.tiles import ELEMENT_BYTES, TilePlan, section_of
from relaxtune.schedules.templates.base import Parameters, added, among, refuse_registers, refuse_shared
from relaxtune.schedules.templates.emit.tensor_cores import CHUNK

WARP = 32
# Of an instruction: rows, and depth.
ROWS, DEPTH = 16, 16
# Chunks of a row of shared memory: half a line of banks, or whole ones.
_HALF_LINE, _LINE = 4, 8
# Registers of a thread beside scores, weights, output and fragments (addresses, row statistics), measured.
_REGISTERS_BESIDE = 44
# Of a tile whose caches grow, as on Hopper: more rows are worth more tiles, which use more multiprocessors.
_GROWTH_ROWS_MAX = 64
# Of Q, kept from the first block of keys on where it takes no more than this.
_HELD_MAX = 32


@dataclass(frozen=True)
class AttentionParameters(Parameters):
    """Tile sizes of one kernel."""

    template: ClassVar[str] = "attention_sm80"

    warps: int = among(4, (1, 2, 4, 8))  # Warps of a block.
    m_steps: int = among(1, (1, 2))  # Times 16 rows of queries that a warp has.
    block_k: int = among(64, range(16, 129, 16))  # Keys at a time.
    stages: int = among(2, range(2, 5))  # Blocks of keys in shared memory.
    pack: bool = False  # Whether the heads that share a head of K and V are rows of one tile.
    dependent: bool = False  # Whether the kernel may start before the one before it has ended.
    split: int = added(1)  # Blocks that share the keys of a tile.

    @property
    def blocks(self) -> int:
        """A block makes one tile, or its part of the keys of one."""
        return 0


@dataclass(frozen=True)
class AttentionPlan(TilePlan):
    """Sizes of one kernel."""

    parameters: AttentionParameters
    width: int  # Chunks of a row of Q and K in shared memory.
    value_width: int  # Chunks of a row of V and O.
    threads: int  # Of a block.
    holds_queries: bool  # Whether the fragments of Q stay in registers.
    registers: int  # Of a thread, about.

    @property
    def rows(self) -> int:
        """Rows of a tile of queries."""
        return self.parameters.warps * self.parameters.m_steps * ROWS

    @property
    def depth_steps(self) -> int:
        """Instructions along a head of Q and K."""
        return math.ceil(self.spec.head_dim / DEPTH)

    @property
    def value_pairs(self) -> int:
        """Pairs of 8 columns of V and O."""
        return math.ceil(self.spec.value_dim / 16)

    @property
    def query_elements(self) -> int:
        """Elements of shared memory for a tile of Q, which O takes later."""
        return self.rows * max(self.width, self.value_width) * CHUNK

    @property
    def exchanged(self) -> int:
        """Fours of numbers that a thread hands over where blocks share keys: sums, and two rows' statistics."""
        return self.parameters.m_steps * (self.value_pairs * 2 + 1)

    @property
    def shared_bytes(self) -> int:
        """Of a block's dynamic shared memory."""
        p = self.parameters
        keys = p.stages * p.block_k * (self.width + self.value_width) * CHUNK
        return (self.query_elements + keys) * ELEMENT_BYTES


def make_plan(
    spec: AttentionSpec, p: AttentionParameters, limits: CudaLimits, *, bias_bytes: int = 0
) -> AttentionPlan | Refusal:
    """Return the sizes of the kernel for an attention, or why there is none with these parameters.

    `bias_bytes` are the bytes of an element of the mask.
    """
    refusal = p.refuse_values()
    if refusal is not None:
        return refusal
    rows = p.warps * p.m_steps * ROWS
    group = spec.group if p.pack else 1
    if rows % group:
        return Refusal(f"pack puts {group} heads into {rows} rows, expected a divisor")
    steps, pairs = math.ceil(spec.head_dim / DEPTH), math.ceil(spec.value_dim / 16)
    held = 4 * steps * p.m_steps
    holds = held <= _HELD_MAX
    mask = 0 if spec.bias is None else p.m_steps * p.block_k // 4 * max(1, bias_bytes // 2)
    each = p.block_k // 2 + p.block_k // 8 + pairs * 8
    registers = p.m_steps * each + (held if holds else 4) + mask + _REGISTERS_BESIDE
    refusal = refuse_registers(registers, p.warps * WARP, limits)
    if refusal is not None:
        return refusal
    heads = spec.heads // group
    plan = AttentionPlan(
        spec=spec,
        parameters=p,
        group=group,
        tile_queries=rows // group,
        heads=heads,
        section=section_of(spec, heads),
        width=_width(spec.head_dim),
        value_width=_width(spec.value_dim),
        threads=p.warps * WARP,
        holds_queries=holds,
        registers=registers,
    )
    # Blocks that share keys each have some, of every tile.
    split, count = p.split, int(plan.key_blocks)
    if split < 1 or (split - 1) * math.ceil(count / split) >= count:
        return Refusal(f"split is {split}, of {count} blocks of keys some would have none")
    if split > 1 and (spec.window or (spec.causal and plan.tiles != 1)):
        return Refusal("blocks share keys, but tiles see different ones")
    # Each element of a cache that grows is loaded by one block, once.
    one_tile = plan.tiles == 1 and plan.group == spec.group and rows <= _GROWTH_ROWS_MAX and not spec.window
    if spec.growth is not None and not one_tile:
        return Refusal(f"caches that grow take one tile of {_GROWTH_ROWS_MAX} rows at most, and no window")
    return refuse_shared(plan.shared_bytes, limits) or plan


def _width(columns: int) -> int:
    chunks = math.ceil(columns / CHUNK)
    return _HALF_LINE if chunks <= _HALF_LINE else _LINE * math.ceil(chunks / _LINE)
