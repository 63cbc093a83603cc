"""The default rules for CUDA: TVM's dlight, in the order in which they are asked."""

from __future__ import annotations

from tvm.s_tir import dlight
from tvm.s_tir.dlight.base import ScheduleRule


def cuda_rules() -> list[tuple[str, ScheduleRule]]:
    """Return the rules with their names for reports; the last one takes every function that has blocks."""
    rules: list[ScheduleRule] = [
        dlight.gpu.Matmul(),
        dlight.gpu.GEMV(),
        dlight.gpu.Reduction(),
        dlight.gpu.GeneralReduction(),
        dlight.gpu.Transpose(),
        dlight.gpu.Fallback(),
    ]
    return [(f"dlight-{type(rule).__name__.lower()}", rule) for rule in rules]
