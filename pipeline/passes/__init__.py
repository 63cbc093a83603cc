"""From an imported graph to fused kernels: the passes, in one visible list (`pipeline.passes.order`)."""

from __future__ import annotations

from relaxtune.pipeline.passes.lower import lower
from relaxtune.pipeline.passes.module import KernelCall, LoweredModule, LoweringOptions, PassReport
from relaxtune.pipeline.passes.order import lowering_steps, plan_memory_passes

__all__ = [
    "KernelCall",
    "LoweredModule",
    "LoweringOptions",
    "PassReport",
    "lower",
    "lowering_steps",
    "plan_memory_passes",
]
