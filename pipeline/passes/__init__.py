"""From an imported graph to fused kernels: the passes, in one visible list (`pipeline.passes.pipeline`)."""

from __future__ import annotations

from pipeline.passes.lower import lower
from pipeline.passes.module import KernelCall, LoweredModule, LoweringOptions, PassReport
from pipeline.passes.pipeline import lowering_steps, plan_memory_passes

__all__ = [
    "KernelCall",
    "LoweredModule",
    "LoweringOptions",
    "PassReport",
    "lower",
    "lowering_steps",
    "plan_memory_passes",
]
