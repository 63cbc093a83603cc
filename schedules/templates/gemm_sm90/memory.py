"""What the warpgroups of the GEMM kernel share: the ring of tiles in shared memory, and barriers."""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.hopper import arrive, initialise_barrier
from relaxtune.schedules.templates.emit.kernel_frame import shared_pool
from relaxtune.schedules.templates.gemm_sm90.plan import STATISTICS_SLOTS, STATISTICS_WARPS, WARPGROUP, GemmPlan
from relaxtune.schedules.tir.row_norm import COUNT


class Memory:
    """A block's shared memory; creating it emits the allocation.

    `tile_a` and `tile_b` are stages of tiles, swizzled as wgmma takes them. `full` and `empty` have a barrier for each
    stage: its tiles have arrived; their consumers are done with them. `turn` has a barrier for each of two warpgroups
    that take turns to multiply. `statistics` has those of the rows of tiles, where warps make them; of each of its
    slots, `made` and `read` have a barrier: statistics are there; their readers are done with them.
    `allocate_for_output` allocates what the output needs, between tiles and barriers.
    """

    def __init__(self, plan: GemmPlan, allocate_for_output: Callable[[T.SMEMPool], None]) -> None:
        self._plan = plan
        p, operands = plan.parameters, plan.operands
        # It starts at a multiple of 1024 bytes, as swizzle atoms need: on sm_90 the system reserves the first KiB of a
        # block's shared memory, and the kernel has no static shared memory.
        pool = shared_pool()
        self.tile_a = pool.alloc((p.stages, plan.rows_a * operands.block_k), operands.tensor_map, align=1024)
        self.tile_b = pool.alloc((p.stages, p.block_n * operands.block_k), operands.tensor_map, align=1024)
        allocate_for_output(pool)
        self.full = pool.alloc((p.stages,), "uint64", align=8)
        self.empty = pool.alloc((p.stages,), "uint64", align=8)
        self.turn = pool.alloc((2,), "uint64", align=8)
        if plan.statistics_apart:
            self.statistics = pool.alloc((STATISTICS_SLOTS, p.block_m, COUNT), "float32", align=16)
            self.made = pool.alloc((STATISTICS_SLOTS,), "uint64", align=8)
            self.read = pool.alloc((STATISTICS_SLOTS,), "uint64", align=8)
        pool.commit()

    def initialise_barriers(self) -> None:
        """Emit, for one thread, the initialisation of all barriers."""
        plan, p = self._plan, self._plan.parameters
        for stage in range(p.stages):
            initialise_barrier(self.full.ptr_to([stage]), 1)
            initialise_barrier(self.empty.ptr_to([stage]), plan.groups * p.multicast)
        for group in range(2):
            initialise_barrier(self.turn.ptr_to([group]), 1)
        if plan.statistics_apart:
            for slot in range(STATISTICS_SLOTS):
                initialise_barrier(self.made.ptr_to([slot]), STATISTICS_WARPS * 32)
                initialise_barrier(self.read.ptr_to([slot]), plan.groups * WARPGROUP)
        T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
        if p.pingpong:
            # The first turn is the first warpgroup's.
            arrive(self.turn.ptr_to([0]))
