"""Targets: what kernels are made for, and the limits of that machine."""

from __future__ import annotations

from relaxtune.schedules.targets.capabilities import Feature
from relaxtune.schedules.targets.resolve import (
    CpuLimits,
    CudaLimits,
    ResolvedTarget,
    TargetLimits,
    resolve_target,
    target_features,
    target_limits,
)

__all__ = [
    "CpuLimits",
    "CudaLimits",
    "Feature",
    "ResolvedTarget",
    "TargetLimits",
    "resolve_target",
    "target_features",
    "target_limits",
]
