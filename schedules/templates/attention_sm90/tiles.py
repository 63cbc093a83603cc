"""Tiles of Q, K and V of the kernel of `template.py`: their tensor maps, how they lie, are loaded and are multiplied.

Every tile is stored in chunks of 64 columns, 128-byte rows swizzled 128 bytes. Q and K are read along their rows
("K-major" to wgmma): 8 rows ("stride") are 1024 bytes apart, 16 columns 32 bytes further along the row. V is read along
its columns ("MN-major"): 8 rows are 1024 bytes apart ("stride"), chunks of 64 columns `block_k` rows ("leading"), and
16 keys are 16 rows further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions.attention import HeadLayout
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.attention.sizes import most
from relaxtune.schedules.templates.attention.tiles import ELEMENT_BYTES, Tile
from relaxtune.schedules.templates.attention_sm90.plan import CHUNK, AttentionPlan
from relaxtune.schedules.templates.emit.barriers import Barriers, Ring
from relaxtune.schedules.templates.emit.registers import all_of
from relaxtune.schedules.templates.emit.tensor_cores import MMA_KINDS
from relaxtune.schedules.templates.emit.tma import encode_tensor, load_tile, wait_for_stores_to_read
from relaxtune.schedules.templates.emit.wgmma import ROW_UNITS, ROWS, STEP_UNITS, Descriptor, multiply


@dataclass(frozen=True)
class Maps:
    """Tensor maps of Q, K and V; of the output, unless blocks of a cluster share a tile; `to_*` of caches that grow."""

    q: tirx.Var
    k: tirx.Var
    v: tirx.Var
    o: tirx.Var | None = None
    to_k: tirx.Var | None = None
    to_v: tirx.Var | None = None

    @classmethod
    def encode(cls, plan: AttentionPlan, params: Sequence[tirx.Var], dtype: str) -> Maps:
        """Emit the encoding of the maps, with axes d, head, position, batch (host code)."""
        spec, p = plan.spec, plan.parameters

        def encode(name: str, role: str, layout: HeadLayout, positions: Size, box: tuple[int, int, int]) -> tirx.Var:
            # TMA takes no axis of 0; of a cache without positions, what is loaded is not used.
            sizes = (spec.width(role), spec.heads_of(role), most(positions, 1), spec.batch)
            # Of an axis of size 1 any stride will do, but TMA takes no 0.
            strides = (layout.head_stride, layout.position_stride, layout.batch_stride)
            strides_bytes = [most(stride * ELEMENT_BYTES, 16) for stride in strides]
            tensor, empty = params[layout.param], None
            if spec.growth is not None and not isinstance(positions, int):
                # A tensor without elements may have no address.
                empty = positions == 0, params[spec.query.param]
            boxes = (*box, 1)
            return encode_tensor(name, tensor, dtype, sizes, strides_bytes, boxes, 3, offset=layout.offset, empty=empty)

        queries, keys = (CHUNK, plan.group, plan.tile_queries), (CHUNK, 1, p.block_k)
        stored = (CHUNK, plan.group, ROWS // plan.group)
        q = encode("map_q", "query", spec.query, spec.queries, queries)
        key, value, loaded = spec.key, spec.value, spec.keys
        to_k = to_v = None
        if spec.growth is not None:
            key, value, loaded = spec.growth.past_key, spec.growth.past_value, spec.growth.past
            to_k = encode("to_k", "key", spec.key, loaded, keys)
            to_v = encode("to_v", "value", spec.value, loaded, keys)
        k, v = encode("map_k", "key", key, loaded, keys), encode("map_v", "value", value, loaded, keys)
        o = encode("map_o", "output", spec.output, spec.queries, stored) if p.split == 1 else None
        return cls(q, k, v, o, to_k, to_v)


@dataclass(frozen=True)
class QueryTiles:
    """Tiles of Q in shared memory, one or two, which tiles have in turn and O takes later; barriers and map of Q."""

    plan: AttentionPlan
    tile: tirx.Var
    full: Barriers
    empty: Barriers
    source: tirx.Var

    def stage(self, at: Tile) -> tuple[tirx.Expr, tirx.Expr]:
        """Return stage and parity of a tile."""
        return at.turn % self.full.count, at.turn // self.full.count % 2

    def load(self, at: Tile) -> None:
        """Emit the loads of a tile's queries, once the stage is empty."""
        plan, (stage, phase) = self.plan, self.stage(at)
        if plan.query_stages > 1:
            self.empty.wait(stage, phase ^ 1)
        self.full.expect(stage, plan.tile_queries * plan.group * plan.chunks * CHUNK * ELEMENT_BYTES)
        for chunk in range(plan.chunks):
            to = self.tile.ptr_to([stage, chunk * plan.rows * CHUNK])
            load_tile(to, self.source, (chunk * CHUNK, at.head, at.query, at.batch), self.full.at(stage))

    def release(self, at: Tile, when: tirx.Expr) -> None:
        """Emit, under a condition, the release of the tile before, once its output is copied from there."""
        if self.plan.query_stages > 1:
            with T.If(when), T.Then():
                wait_for_stores_to_read()
                self.empty.arrive((at.turn + 1) % self.plan.query_stages)


@dataclass(frozen=True)
class KeyRing:
    """A ring of blocks of K, or of V, in shared memory, its barriers, and the map that it is loaded by.

    Where caches grow, `target` is the map of what the blocks are copied to.
    """

    tile: tirx.Var
    full: Barriers
    empty: Barriers
    chunks: int  # Of a block.
    block_k: int
    source: tirx.Var
    target: tirx.Var | None

    def places(
        self, ring: Ring, at: Tile, step: tirx.Expr | int
    ) -> list[tuple[tirx.Expr, tuple[tirx.Expr | int, ...]]]:
        """Return the address in a stage and the place among all keys of each chunk of a tile's block of keys."""
        key = (at.first_block + step) * self.block_k
        starts = [self.tile.ptr_to([ring.stage, chunk * self.block_k * CHUNK]) for chunk in range(self.chunks)]
        return [(start, (chunk * CHUNK, at.kv_head, key, at.batch)) for chunk, start in enumerate(starts)]

    def load(self, ring: Ring, at: Tile, step: tirx.Expr | int) -> None:
        """Emit the loads of a tile's block of keys to the next stage, once that is empty."""
        self.empty.wait(ring.stage, ring.phase ^ 1)
        self.full.expect(ring.stage, self.block_k * self.chunks * CHUNK * ELEMENT_BYTES)
        for to, place in self.places(ring, at, step):
            load_tile(to, self.source, place, self.full.at(ring.stage))
        ring.advance()


class TileMultiply:
    """The multiplications of a warpgroup; creating it emits the descriptors.

    `query` is the address of its first row of Q, `keys` and `values` are the rings.
    """

    def __init__(self, plan: AttentionPlan, dtype: str, query: tirx.Expr, keys: KeyRing, values: KeyRing) -> None:
        self._plan = plan
        kind, block_k = MMA_KINDS[dtype], plan.parameters.block_k
        instruction = "wgmma.mma_async.sync.aligned.m64n{}k16.f32." + f"{kind}.{kind}"
        self._scores, self._values = instruction.format(block_k), instruction.format(plan.spec.value_dim)
        self._query, self._key = Descriptor(query), Descriptor(keys.tile.ptr_to([0, 0]))
        self._value = Descriptor(values.tile.ptr_to([0, 0]), block_k * ROW_UNITS)

    def scores(self, scores: tirx.Var, query_stage: tirx.Expr, stage: tirx.Expr) -> None:
        """Emit `scores = Q K^T` for the keys of a stage, not waited for."""
        plan, rows, keys = self._plan, self._plan.rows, self._plan.parameters.block_k
        first = stage * (plan.chunks * keys * ROW_UNITS)
        first_query = query_stage * (plan.query_chunks * rows * ROW_UNITS)
        products = []
        for step in range(plan.columns // 16):
            chunk, part = divmod(step, CHUNK // 16)
            query = self._query.at(first_query + (chunk * rows * ROW_UNITS + part * STEP_UNITS))
            key = self._key.at(first + (chunk * keys * ROW_UNITS + part * STEP_UNITS))
            products.append([*all_of(scores), query, key, tirx.const(step > 0, "bool")])
        multiply(self._scores, products, (1, 1, 0, 0))

    def values(self, output: tirx.Var, weights: tirx.Var, stage: tirx.Expr) -> None:
        """Emit `output += P V` for the keys of a stage, P in registers, not waited for."""
        keys = self._plan.parameters.block_k
        first = stage * (self._plan.value_chunks * keys * ROW_UNITS)
        products = []
        for step in range(keys // 16):
            words = [weights[step * 4 + word] for word in range(4)]
            value = self._value.at(first + step * 16 * ROW_UNITS)
            products.append([*all_of(output), *words, value, tirx.const(True, "bool")])
        multiply(self._values, products, (1, 1, 1))
