"""Schedule rules for CUDA without tensor cores: tiling through shared memory, cross-thread reductions, thread binding.

A function with a single matmul gets a space of its own (`schedules.search.tensor_tile`, else `thread_tile`).

TVM's tensor-core rules are left out: nearly all of their candidates fail to build (the buffer's element type is not the
one the intrinsic expects).
"""

from __future__ import annotations

from tvm.s_tir import meta_schedule as ms

from relaxtune.schedules.targets import CudaLimits

UNROLL_STEPS = (0, 16, 64, 512, 1024)
MAX_BLOCKS = 256


def cuda_rules(limits: CudaLimits) -> list[ms.ScheduleRule]:
    """Return the rules in the order in which they are applied to each block."""
    rule = ms.schedule_rule
    extents = _powers_of_two(limits.warp_size, limits.max_threads_per_block)
    return [
        rule.ApplyCustomRule(),
        rule.MultiLevelTiling(
            structure="SSSRRSRS",
            tile_binds=["blockIdx.x", "vthread.x", "threadIdx.x"],
            max_innermost_factor=64,
            # In elements: up to the 16 bytes of one load, in float32.
            vector_load_lens=[1, 2, 3, 4],
            reuse_read=rule.ReuseType(req="must", levels=[4], scope="shared"),
            reuse_write=rule.ReuseType(req="must", levels=[3], scope="local"),
        ),
        rule.InlineConstantScalars(),
        rule.AutoInline(
            into_producer=True,
            into_consumer=True,
            inline_const_tensor=True,
            disallow_if_then_else=False,
            require_injective=False,
            require_ordered=False,
            disallow_op=None,
        ),
        rule.CrossThreadReduction(thread_extents=[4, 8, 16, *_powers_of_two(limits.warp_size, 512)]),
        rule.ParallelizeVectorizeUnroll(
            max_jobs_per_core=-1,
            max_vectorize_extent=-1,
            unroll_max_steps=list(UNROLL_STEPS),
            unroll_explicit=True,
        ),
        rule.AutoBind(
            max_threadblocks=MAX_BLOCKS,
            thread_extents=extents,
            max_threads_per_block=limits.max_threads_per_block,
        ),
    ]


def _powers_of_two(low: int, high: int) -> list[int]:
    return [1 << bit for bit in range(low.bit_length() - 1, high.bit_length())]
