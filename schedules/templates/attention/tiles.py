"""Tiles of queries of an attention, their blocks of keys, and the keys that each row sees, for all its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions.attention import AttentionSpec
from relaxtune.schedules.sizes import Size, is_positive, simplify
from relaxtune.schedules.templates.attention.sizes import ceil_div, least
from relaxtune.schedules.templates.emit.division import Divisor
from relaxtune.schedules.templates.emit.registers import in_register

ELEMENT_BYTES = 2
# Of the L2 cache, what the keys and values of the tiles that are made together may take.
_SECTION_BYTES = 16 << 20


class TileParameters(Protocol):
    """The parameters that say how tiles are shared out."""

    @property
    def block_k(self) -> int:
        """Keys at a time."""

    @property
    def split(self) -> int:
        """Blocks, one cluster, that share the keys of a tile of queries."""

    @property
    def blocks(self) -> int:
        """Thread blocks; each makes every `blocks`-th tile. 0 for a block (with `split`, a cluster) per tile."""


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

    def first_key(self, position: tirx.Expr) -> tirx.Expr:
        """Return the first key that a query at a position among the keys sees, where some are hidden."""
        return position - self.spec.window + 1 if self.spec.spans is None else self.span(position)[0]

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
        return simplify(self.spec.keys - self.spec.queries)

    @property
    def whole_blocks(self) -> bool:
        """Whether each block of keys is surely whole."""
        keys = self.spec.keys
        return isinstance(keys, int) and keys % self.parameters.block_k == 0

    @property
    def sees_nothing(self) -> bool:
        """Whether there may be queries before all keys."""
        ahead = self.ahead
        return self.spec.causal and (ahead < 0 if isinstance(ahead, int) else not is_positive(ahead + 1))


def section_of(spec: AttentionSpec, heads: int) -> int:
    """Return how many of all groups of heads have tiles that are made together: their keys fit the L2 cache."""
    total = spec.batch * heads
    each = spec.keys * (spec.head_dim + spec.value_dim) * ELEMENT_BYTES
    most = max(1, _SECTION_BYTES // each * (heads // min(heads, spec.kv_heads)))
    return max(size for size in range(1, min(total, most) + 1) if total % size == 0)


@dataclass(frozen=True)
class Tile:
    """A tile of queries, and the part of its keys that one thread block sums."""

    turn: tirx.Expr  # The tile's number among those of its thread block.
    # Its batch element, first head and first query.
    batch: tirx.Expr
    head: tirx.Expr
    query: tirx.Expr
    kv_head: tirx.Expr  # Head of K and V.
    # Blocks of keys; at least one.
    first_block: tirx.Expr
    block_count: tirx.Expr
    key_end: tirx.Expr | int  # No key from here on is seen.

    def end_at(self, plan: TilePlan, position: tirx.Expr) -> tirx.Expr | int:
        """Return the key after the last that a query at a position among the keys sees."""
        if plan.spec.spans is not None:
            return tirx.min(plan.span(position)[1], self.key_end)
        if plan.spec.causal:
            return tirx.min(position + 1, self.key_end)
        return tirx.min(position + plan.spec.window, self.key_end) if plan.spec.window else self.key_end


@dataclass(frozen=True)
class Rows:
    """The two rows of a thread: their query and head, and the keys they may see (`first <= key < end`)."""

    batch: tirx.Expr
    query: tuple[tirx.Expr, tirx.Expr]
    head: tuple[tirx.Expr, tirx.Expr]
    first: tirx.Var
    end: tirx.Var

    @classmethod
    def of(cls, plan: TilePlan, at: Tile, line: tirx.Expr) -> Rows:
        """Emit what a row of a tile and the one 8 below see: row r is query `r // group`, head `r % group`."""
        lines = [line + row * 8 for row in range(2)]
        queries = [in_register(at.query + one // plan.group, name="row_query") for one in lines]
        heads = [in_register(at.head + one % plan.group, name="row_head") for one in lines]
        first, end = T.alloc_local([2], "int32"), T.alloc_local([2], "int32")
        for row in range(2):
            position = queries[row] + plan.ahead
            T.buffer_store(first, plan.first_key(position), [row])
            T.buffer_store(end, at.end_at(plan, position), [row])
        return cls(at.batch, (queries[0], queries[1]), (heads[0], heads[1]), first, end)


@dataclass(frozen=True)
class WholeKeys:
    """The keys that all of some rows of a tile see: before `end`, and from `first` on where earlier ones are hidden."""

    end: tirx.Expr
    first: tirx.Expr | None

    @classmethod
    def of(cls, plan: TilePlan, at: Tile, top: tirx.Expr, count: int) -> WholeKeys:
        """Emit those of `count` rows from `top` on."""
        position = at.query + top // plan.group + plan.ahead
        bottom = at.query + (top + count - 1) // plan.group + plan.ahead
        end = in_register(at.end_at(plan, position), name="whole_end")
        return cls(end, in_register(plan.first_key(bottom), name="whole_first") if plan.spec.hides_earlier else None)

    def exceeded_by(self, plan: TilePlan, block: tirx.Expr) -> tirx.Expr:
        """Return whether some of the rows do not see all of a block of keys."""
        block_k = plan.parameters.block_k
        beyond = (block + 1) * block_k > self.end
        return beyond if self.first is None else tirx.any(beyond, block * block_k < self.first)


def each_tile(plan: TilePlan, block: tirx.Expr, make: Callable[[Tile], None]) -> None:
    """Emit the loop over the tiles of a thread block, by its number; `make` emits what is done with one."""
    if plan.query_stages == 1:
        work, rank = block // plan.parameters.split, block % plan.parameters.split
        if plan.spec.causal:
            # The longest tiles first, of as many heads as have their keys in the L2 cache together.
            inside = work % (plan.section * plan.tiles)
            heads = work // (plan.section * plan.tiles) * plan.section + inside % plan.section
            tile = plan.tiles - 1 - inside // plan.section
        else:
            tile, heads = _divided(plan, work)
        make(_locate(plan, tirx.IntImm("int32", 0), tile, heads, rank))
        return
    items = (plan.items - block + plan.blocks - 1) // plan.blocks
    with T.serial(items * 2 if plan.paired else items) as turn:
        item = block + (turn // 2 if plan.paired else turn) * plan.blocks
        tile, heads = _divided(plan, item)
        if plan.paired:
            tile = tirx.Select(turn % 2 == 0, plan.tiles - 1 - tile, tile)
        make(_locate(plan, turn, tile, heads, None))


def _divided(plan: TilePlan, item: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """Return an item's number within its group of heads, and the group's of all heads."""
    if plan.divisor is None:
        return item % plan.head_items, item // plan.head_items
    heads, tile = plan.divisor.divide(item)
    return tile, heads


def _locate(plan: TilePlan, turn: tirx.Expr, tile: tirx.Expr, heads: tirx.Expr, rank: tirx.Expr | None) -> Tile:
    """Emit where a tile lies, and which blocks of keys this thread block, of a rank in its cluster, sums for it."""
    spec, p = plan.spec, plan.parameters
    batch = in_register(heads // plan.heads, name="batch")
    head = in_register(heads % plan.heads * plan.group, name="head")
    query = in_register(tile * plan.tile_queries, name="query")
    first, end = _visible_blocks(plan, query)
    if p.split == 1 or rank is None:
        start, count = in_register(first, name="first_block"), in_register(tirx.max(end - first, 1), name="block_count")
        return Tile(turn, batch, head, query, head // spec.group, start, count, spec.keys)
    share = in_register((end - first + p.split - 1) // p.split, name="share")
    start = in_register(first + rank * share, name="start")
    stop = in_register(tirx.min(start + share, end), name="stop")
    count = in_register(tirx.max(stop - start, 1), name="block_count")
    # A block without a share makes one block of keys that it does not see.
    key_end = in_register(tirx.Select(start < stop, tirx.min(stop * p.block_k, spec.keys), 0), name="key_end")
    return Tile(turn, batch, head, query, head // spec.group, start, count, key_end)


def _visible_blocks(plan: TilePlan, query: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """Return the first block of keys that a tile's queries may see, and the one after the last."""
    spec, block_k = plan.spec, plan.parameters.block_k
    first: tirx.Expr = tirx.IntImm("int32", 0)
    key_blocks = plan.key_blocks
    end: tirx.Expr = tirx.IntImm("int32", key_blocks) if isinstance(key_blocks, int) else key_blocks
    position = query + plan.ahead
    last = tirx.min(position + plan.tile_queries, spec.keys) - 1
    if spec.spans is not None:
        return plan.span(query)[0] // block_k, (plan.span(last)[1] + block_k - 1) // block_k
    if spec.window:
        first = tirx.max(position - spec.window + 1, 0) // block_k
    if spec.causal or spec.window:
        reach = 1 if spec.causal else spec.window
        end = tirx.min(tirx.max(last + reach, 0) + block_k - 1, spec.keys + block_k - 1) // block_k
    return first, end
