"""Tiles of queries of an attention, and their blocks of keys: sizes, as every kernel of attention counts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tvm import tirx

from relaxtune.schedules.functions.attention import AttentionSpec
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.attention.sizes import ceil_div, is_not_negative, least, simplified
from relaxtune.schedules.templates.emit.division import Divisor

ELEMENT_BYTES = 2
# Of the L2 cache, what the keys and values of the tiles that are made together may take.
_SECTION_BYTES = 16 << 20


class TileParameters(Protocol):
    """The parameters that say how tiles are shared out."""

    @property
    def block_k(self) -> int:
        """Keys at a time."""
        ...

    @property
    def split(self) -> int:
        """Blocks, one cluster, that share the keys of a tile of queries."""
        ...

    @property
    def blocks(self) -> int:
        """Thread blocks; each makes every `blocks`-th tile. 0 for a block (with `split`, a cluster) per tile."""
        ...


@dataclass(frozen=True)
class TilePlan:
    """Sizes of tiles: numbers, or where they are symbolic int32 expressions of the host."""

    spec: AttentionSpec  # The attention that it computes.
    parameters: TileParameters  # The parameters that it is made from.
    group: int  # Heads in one tile of queries.
    tile_queries: int  # Queries of a tile.
    heads: int  # Groups of heads of one batch element.
    section: int  # Of all groups of heads, those whose tiles are made together, the longest tiles first (`causal`).
    # The kernel's flat view of the spans of keys, once there is a kernel.
    spans: tirx.Var | None = field(default=None, kw_only=True)
    # Division by `head_items`, once there is a kernel, where they are symbolic.
    divisor: Divisor | None = field(default=None, kw_only=True)

    def span(self, query: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the first key that a query sees, and the one after the last; those of the last query beyond it."""
        assert self.spans is not None
        at = tirx.min(query, self.spec.queries - 1) * 2
        return self.spans[at], self.spans[at + 1]

    @property
    def symbolic(self) -> bool:
        """Whether some sizes are known only when the kernel is called."""
        return not self.spec.is_static

    @property
    def tiles(self) -> Size:
        """Tiles of all queries."""
        return ceil_div(self.spec.queries, self.tile_queries)

    @property
    def key_blocks(self) -> Size:
        """Blocks of keys."""
        return ceil_div(self.spec.keys, self.parameters.block_k)

    @property
    def paired(self) -> bool:
        """Whether a block makes tiles in pairs, a long and a short one, so that all pairs take the same time."""
        several = not isinstance(self.tiles, int) or self.tiles > 1
        return self.parameters.blocks > 0 and self.spec.causal and several

    @property
    def head_items(self) -> Size:
        """Tiles, or pairs of them, of one group of heads."""
        return ceil_div(self.tiles, 2) if self.paired else self.tiles

    @property
    def items(self) -> Size:
        """Tiles, or pairs of them, of all heads."""
        return self.spec.batch * self.heads * self.head_items

    @property
    def blocks(self) -> Size:
        """Thread blocks of the grid."""
        p = self.parameters
        return least(p.blocks, self.items) if p.blocks else self.items * p.split

    @property
    def query_stages(self) -> int:
        """Tiles of Q in shared memory: 2 where the next one is loaded while the last is worked on."""
        if self.symbolic:
            return 2 if self.parameters.blocks else 1
        return 2 if self.paired or self.blocks < self.items else 1

    @property
    def ahead(self) -> Size:
        """Position of the first query among the keys."""
        return simplified(self.spec.keys - self.spec.queries)

    @property
    def whole_blocks(self) -> bool:
        """Whether each block of keys is surely whole."""
        keys = self.spec.keys
        return isinstance(keys, int) and keys % self.parameters.block_k == 0

    @property
    def sees_nothing(self) -> bool:
        """Whether there may be queries before all keys."""
        ahead = self.ahead
        return self.spec.causal and (ahead < 0 if isinstance(ahead, int) else not is_not_negative(ahead))


def section_of(spec: AttentionSpec, heads: int) -> int:
    """Return how many of all groups of heads have tiles that are made together: their keys fit the L2 cache."""
    total = spec.batch * heads
    each = spec.keys * (spec.head_dim + spec.value_dim) * ELEMENT_BYTES
    most = max(1, _SECTION_BYTES // each * (heads // min(heads, spec.kv_heads)))
    return max(size for size in range(1, min(total, most) + 1) if total % size == 0)
