"""What the warps of the attention kernel share: tiles in shared memory, their barriers, and tensor maps."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.attention.tiles import Tile
from relaxtune.schedules.templates.attention_sm90.plan import CHUNK, AttentionPlan
from relaxtune.schedules.templates.emit.hopper import initialise_barrier
from relaxtune.schedules.templates.emit.kernel_frame import shared_pool


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
        for tensor_map in (self.q, self.k, self.v, *([self.o] if self.o is not None else [])):
            T.evaluate(T.ptx["prefetch.tensormap"](T.address_of(tensor_map)))


class Memory:
    """A block's shared memory; creating it emits the allocation.

    `tile_*` are stages of tiles, swizzled as wgmma takes them. `full_*` and `empty_*` have a barrier for each stage:
    its tile has arrived; its consumers are done with it. `partial` has sums and statistics that blocks of a cluster
    exchange; None where a tile is one block's.
    """

    def __init__(self, plan: AttentionPlan, dtype: str) -> None:
        p = plan.parameters
        self._plan = plan
        # Tiles start at multiples of 1024 bytes, as swizzle atoms need: on sm_90 the system reserves the first KiB of a
        # block's shared memory, and the kernel has no static shared memory.
        pool = shared_pool()
        self.tile_q = pool.alloc((plan.query_stages, plan.rows * plan.query_chunks * CHUNK), dtype, align=1024)
        self.tile_k = pool.alloc((p.stages, p.block_k * plan.chunks * CHUNK), dtype, align=1024)
        self.tile_v = pool.alloc((p.stages, p.block_k * plan.value_chunks * CHUNK), dtype, align=1024)
        self.partial = pool.alloc((plan.partial_floats,), "float32", align=128) if p.split > 1 else None
        self.full_q, self.empty_q = (pool.alloc((plan.query_stages,), "uint64", align=8) for _ in range(2))
        self.full_k, self.full_v, self.empty_k, self.empty_v = (
            pool.alloc((p.stages,), "uint64", align=8) for _ in range(4)
        )
        pool.commit()

    def initialise_barriers(self) -> None:
        """Emit, for one thread, the initialisation of all barriers."""
        plan, p = self._plan, self._plan.parameters
        for stage in range(plan.query_stages):
            initialise_barrier(self.full_q.ptr_to([stage]), 1)
            initialise_barrier(self.empty_q.ptr_to([stage]), p.consumers)
        for stage in range(p.stages):
            for full in (self.full_k, self.full_v):
                initialise_barrier(full.ptr_to([stage]), 1)
            for empty in (self.empty_k, self.empty_v):
                initialise_barrier(empty.ptr_to([stage]), p.consumers)
        T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())

    def query_ring(self, tile: Tile) -> tuple[tirx.Expr, tirx.Expr]:
        """Return stage and parity of a tile's Q."""
        stages = self._plan.query_stages
        return tile.turn % stages, tile.turn // stages % 2
