"""The last CPU rule: the function stays as it is, which is valid, serial code.

It takes functions in which TVM's own schedule primitives fail: fused loops over sums of symbolic sizes,
for instance, which TVM cannot prove to divide one another.
"""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.base import CpuRule


class Plain(CpuRule):
    """Everything, as it came."""

    name = "cpu-plain"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return the function unchanged; None only for a target that is no CPU."""
        return Schedule(func) if self.is_target_available(target) else None
