"""The rings of tiles of the attention kernel in shared memory, their barriers and tensor maps; the warp that loads."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.attention.tiles import ELEMENT_BYTES, Tile, each_tile
from relaxtune.schedules.templates.attention_sm90.plan import CHUNK, AttentionPlan
from relaxtune.schedules.templates.emit.barriers import Barriers, Ring
from relaxtune.schedules.templates.emit.kernel_frame import shared_pool, wait_for_predecessor
from relaxtune.schedules.templates.emit.registers import when
from relaxtune.schedules.templates.emit.tma import (
    end_stores,
    load_tile,
    prefetch_maps,
    store_tile,
    wait_for_stores_to_read,
)


@dataclass(frozen=True)
class Maps:
    """Tensor maps of Q, K and V; of the output, unless blocks of a cluster share a tile; `to_*` of caches that grow."""

    q: tirx.Var
    k: tirx.Var
    v: tirx.Var
    o: tirx.Var | None = None
    to_k: tirx.Var | None = None
    to_v: tirx.Var | None = None

    def prefetch(self) -> None:
        """Emit the fetching of the maps that every tile needs."""
        prefetch_maps(self.q, self.k, self.v, *([self.o] if self.o is not None else []))


@dataclass(frozen=True)
class Stages:
    """Tiles of K, or of V, in shared memory; a barrier for each: it has arrived (`full`), is done with (`empty`)."""

    tile: tirx.Var
    full: Barriers
    empty: Barriers
    chunks: int  # Of a tile.


class Memory:
    """A block's shared memory; creating it emits the allocation.

    Tiles are swizzled as wgmma takes them: `keys`, `values`, and `tile_q` with `full_q` and `empty_q`. `partial` has
    sums and statistics that blocks of a cluster exchange; None where a tile is one block's.
    """

    def __init__(self, plan: AttentionPlan, dtype: str) -> None:
        p = plan.parameters
        self._plan = plan
        # Tiles start at multiples of 1024 bytes, as swizzle atoms need: on sm_90 the system reserves the first KiB of a
        # block's shared memory, and the kernel has no static shared memory.
        pool = shared_pool()
        self.tile_q = pool.alloc((plan.query_stages, plan.rows * plan.query_chunks * CHUNK), dtype, align=1024)
        tile_k = pool.alloc((p.stages, p.block_k * plan.chunks * CHUNK), dtype, align=1024)
        tile_v = pool.alloc((p.stages, p.block_k * plan.value_chunks * CHUNK), dtype, align=1024)
        self.partial = pool.alloc((plan.partial_floats,), "float32", align=128) if p.split > 1 else None
        self.full_q, self.empty_q = (Barriers(pool, plan.query_stages, arrivals) for arrivals in (1, p.consumers))
        full_k, full_v, empty_k, empty_v = (Barriers(pool, p.stages, n) for n in (1, 1, p.consumers, p.consumers))
        self.keys = Stages(tile_k, full_k, empty_k, plan.chunks)
        self.values = Stages(tile_v, full_v, empty_v, plan.value_chunks)
        pool.commit()

    def rings(self) -> tuple[tuple[Barriers, ...], ...]:
        """Return all barriers, those of each ring together."""
        queries = self.full_q, self.empty_q
        return queries, (self.keys.full, self.values.full, self.keys.empty, self.values.empty)

    def query_ring(self, tile: Tile) -> tuple[tirx.Expr, tirx.Expr]:
        """Return stage and parity of a tile's Q."""
        stages = self._plan.query_stages
        return tile.turn % stages, tile.turn // stages % 2


class Producer:
    """Loads what a plan's consumers multiply; the methods emit into the current IRBuilder.

    Caches that grow are loaded before the wait for the kernel before with `early_caches`, and copied too with
    `early_copies`.
    """

    def __init__(
        self, plan: AttentionPlan, memory: Memory, maps: Maps, *, early_caches: bool, early_copies: bool
    ) -> None:
        self._plan, self._spec, self._p, self._memory, self._maps = plan, plan.spec, plan.parameters, memory, maps
        self._early_caches, self._early_copies = early_caches, early_copies

    def produce(self, block: tirx.Expr) -> None:
        """Emit the loads of all tiles of a block, by one thread."""
        p = self._p
        ring_k, ring_v = Ring(p.stages), Ring(p.stages)
        wait_for_predecessor(p.dependent and self._spec.growth is None, launches=False)

        def load(tile: Tile) -> None:
            self._tile = tile
            if self._spec.growth is not None:
                self._load_and_copy(ring_k, ring_v)
                return
            self._load_query()
            self._load_keys(ring_k, 0)
            with T.serial(tile.block_count - 1) as step:
                self._load_keys(ring_k, step + 1)
                self._load_values(ring_v, step)
            self._load_values(ring_v, tile.block_count - 1)

        each_tile(self._plan, block, load)

    def _load_and_copy(self, ring_k: Ring, ring_v: Ring) -> None:
        """Emit the loads of the only tile, each block of its keys and values copied to K and V once it has arrived.

        What fits is loaded before the kernel waits for the one before it where no kernel writes the caches, and copied,
        too, where no other kernel reads or writes K and V.
        """
        stages, count = self._p.stages, self._tile.block_count
        ring, ahead, first = Ring(stages), stages - 1, tirx.min(count, stages)
        if not self._early_caches:
            self._begin_query()
        with T.serial(first) as step:
            self._load_keys(ring_k, step)
            self._load_values(ring_v, step)
        if self._early_caches and not self._early_copies:
            self._begin_query()
        with T.serial(first) as step:
            self._copy(ring, step)
        if self._early_copies:
            self._begin_query()
        left = count - first
        with T.serial(left) as step:
            # The next loads take the place of the blocks that were copied.
            wait_for_stores_to_read()
            self._load_keys(ring_k, stages + step)
            self._load_values(ring_v, stages + step)
            with T.If(step >= ahead), T.Then():
                self._copy(ring, stages + step - ahead)
        late = tirx.min(left, ahead)
        with T.serial(late) as step:
            self._copy(ring, count - late + step)
        wait_for_stores_to_read()

    def _begin_query(self) -> None:
        wait_for_predecessor(self._p.dependent, launches=False)
        self._load_query()

    def _copy(self, ring: Ring, step: tirx.Expr) -> None:
        """Emit the copies of a block of keys and of values, once they have arrived, as one group."""
        assert self._spec.growth is not None
        block, past, block_k = self._tile.first_block + step, self._spec.growth.past, self._p.block_k
        for stages, target in ((self._memory.keys, self._maps.to_k), (self._memory.values, self._maps.to_v)):
            stages.full.wait(ring.stage, ring.phase)
            # A block of new positions alone has nothing to be copied; of a cache without positions, that is the first.
            with when([] if isinstance(past, int) else [block * block_k < past]):
                for chunk in range(stages.chunks):
                    source = stages.tile.ptr_to([ring.stage, chunk * block_k * CHUNK])
                    place = (chunk * CHUNK, self._tile.kv_head, block * block_k, self._tile.batch)
                    store_tile(target, place, source)
        end_stores()
        ring.advance()

    def _load_query(self) -> None:
        plan, at = self._plan, self._tile
        stage, phase = self._memory.query_ring(at)
        if plan.query_stages > 1:
            self._memory.empty_q.wait(stage, phase ^ 1)
        full = self._memory.full_q
        full.expect(stage, plan.tile_queries * plan.group * plan.chunks * CHUNK * ELEMENT_BYTES)
        for chunk in range(plan.chunks):
            to = self._memory.tile_q.ptr_to([stage, chunk * plan.rows * CHUNK])
            load_tile(to, self._maps.q, (chunk * CHUNK, at.head, at.query, at.batch), full.at(stage))

    def _load_keys(self, ring: Ring, step: tirx.Expr | int) -> None:
        self._load_block(ring, step, self._memory.keys, self._maps.k)

    def _load_values(self, ring: Ring, step: tirx.Expr | int) -> None:
        self._load_block(ring, step, self._memory.values, self._maps.v)

    def _load_block(self, ring: Ring, step: tirx.Expr | int, stages: Stages, source: tirx.Var) -> None:
        block_k = self._p.block_k
        stages.empty.wait(ring.stage, ring.phase ^ 1)
        stages.full.expect(ring.stage, block_k * stages.chunks * CHUNK * ELEMENT_BYTES)
        for chunk in range(stages.chunks):
            to = stages.tile.ptr_to([ring.stage, chunk * block_k * CHUNK])
            key = (self._tile.first_block + step) * block_k
            position = (chunk * CHUNK, self._tile.kv_head, key, self._tile.batch)
            load_tile(to, source, position, stages.full.at(ring.stage))
        ring.advance()
