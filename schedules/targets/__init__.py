"""Targets: what kernels are made for, and the limits of that machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaxtune.lazy import lazy_names

if TYPE_CHECKING:
    from relaxtune.schedules.targets.capabilities import Feature
    from relaxtune.schedules.targets.resolve import (
        PLANNED_FOR,
        PORTABLE,
        CpuLimits,
        CudaLimits,
        ResolvedTarget,
        TargetLimits,
        is_portable,
        portable_host,
        resolve_target,
        target_features,
        target_limits,
    )

__all__ = [
    "PLANNED_FOR",
    "PORTABLE",
    "CpuLimits",
    "CudaLimits",
    "Feature",
    "ResolvedTarget",
    "TargetLimits",
    "is_portable",
    "portable_host",
    "resolve_target",
    "target_features",
    "target_limits",
]

if not TYPE_CHECKING:  # mypy would take any name, and any module below, for one that is there
    __getattr__ = lazy_names(__name__, {**dict.fromkeys(__all__, "resolve"), "Feature": "capabilities"})
