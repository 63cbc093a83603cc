"""Schedule rules for LLVM functions that are no contractions: inlining, rfactor, tiling, threads and vectors.

The order and the parameters follow the shape of TVM's own list; what differs comes from the target's limits: vector
loops are no longer than one vector register times four, and jobs are counted from the cores the process may use.
"""

from __future__ import annotations

from tvm.s_tir import meta_schedule as ms

from relaxtune.schedules.targets import CpuLimits

JOBS_PER_CORE = 8
UNROLL_STEPS = (0, 16, 64, 256)


def llvm_rules(limits: CpuLimits) -> list[ms.ScheduleRule]:
    """Return the rules in the order in which they are applied to each block."""
    lanes = limits.vector_bytes // 4
    rule = ms.schedule_rule
    return [
        rule.ApplyCustomRule(),
        rule.InlineConstantScalars(),
        rule.AutoInline(
            into_producer=False,
            into_consumer=True,
            inline_const_tensor=True,
            disallow_if_then_else=True,
            require_injective=True,
            require_ordered=True,
            # Names of this TVM's operators; TVM's own list still says `tir.exp`, which no operator is called any more.
            disallow_op=["tirx.exp", "tirx.erf", "tirx.tanh"],
        ),
        rule.AddRFactor(max_jobs_per_core=JOBS_PER_CORE, max_innermost_factor=4 * lanes),
        rule.MultiLevelTiling(
            structure="SSRSRS",
            tile_binds=None,
            max_innermost_factor=4 * lanes,
            vector_load_lens=None,
            reuse_read=None,
            reuse_write=rule.ReuseType(req="may", levels=[1, 2], scope="global"),
        ),
        rule.ParallelizeVectorizeUnroll(
            max_jobs_per_core=JOBS_PER_CORE,
            max_vectorize_extent=4 * lanes,
            unroll_max_steps=list(UNROLL_STEPS),
            unroll_explicit=True,
        ),
        rule.RandomComputeLocation(),
    ]
