"""Tiles that a thread block of the kernel of `template.py` makes, and the keys that each sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.attention.tile_plan import TilePlan


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
        if plan.spec.window:
            return tirx.min(position + plan.spec.window, self.key_end)
        return self.key_end


def each_tile(plan: TilePlan, block: tirx.Expr, make: Callable[[Tile], None]) -> None:
    """Emit the loop over the tiles of a thread block, by its number; `make` emits what is done with one."""
    if plan.query_stages == 1:
        split = plan.parameters.split
        tile, heads = _only_tile(plan, block // split)
        make(_locate(plan, tirx.IntImm("int32", 0), tile, heads, block % split))
        return
    items = (plan.items - block + plan.blocks - 1) // plan.blocks
    with T.serial(items * 2 if plan.paired else items) as turn:
        item = block + (turn // 2 if plan.paired else turn) * plan.blocks
        tile, heads = _divided(plan, item)
        if plan.paired:
            tile = tirx.Select(turn % 2 == 0, plan.tiles - 1 - tile, tile)
        make(_locate(plan, turn, tile, heads, None))


def named(name: str, value: tirx.Expr) -> tirx.Expr:
    """Emit the storing of an int32 in a register, and return that."""
    register = T.alloc_local([1], "int32")
    IRBuilder.name(name, register)
    T.buffer_store(register, value, [0])
    return register[0]


def _divided(plan: TilePlan, item: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """Return an item's number within its group of heads, and the group's of all heads."""
    if plan.divisor is None:
        return item % plan.head_items, item // plan.head_items
    heads, tile = plan.divisor.divide(item)
    return tile, heads


def _only_tile(plan: TilePlan, work: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """Return a block's only tile, and its group of all heads."""
    if not plan.spec.causal:
        return _divided(plan, work)
    # The longest tiles first, of as many heads as have their keys in the L2 cache together.
    inside = work % (plan.section * plan.tiles)
    heads = work // (plan.section * plan.tiles) * plan.section + inside % plan.section
    return plan.tiles - 1 - inside // plan.section, heads


def _locate(plan: TilePlan, turn: tirx.Expr, tile: tirx.Expr, heads: tirx.Expr, rank: tirx.Expr | None) -> Tile:
    """Emit where a tile lies, and which blocks of keys this thread block, of a rank in its cluster, sums for it."""
    spec, p = plan.spec, plan.parameters
    batch = named("batch", heads // plan.heads)
    head = named("head", heads % plan.heads * plan.group)
    query = named("query", tile * plan.tile_queries)
    first, end = _visible_blocks(plan, query)
    if p.split == 1 or rank is None:
        start, count = named("first_block", first), named("block_count", tirx.max(end - first, 1))
        return Tile(turn, batch, head, query, head // spec.group, start, count, spec.keys)
    share = named("share", (end - first + p.split - 1) // p.split)
    start = named("start", first + rank * share)
    stop = named("stop", tirx.min(start + share, end))
    count = named("block_count", tirx.max(stop - start, 1))
    # A block without a share makes one block of keys that it does not see.
    key_end = named("key_end", tirx.Select(start < stop, tirx.min(stop * p.block_k, spec.keys), 0))
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
