"""The least time of a searched matmul: its arithmetic on a GPU's ordinary lanes, without tensor cores."""

from __future__ import annotations

import json

import tvm

from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.search.tensor_tile import takes_tensor_tiles
from relaxtune.schedules.targets import CudaLimits, ResolvedTarget

# Lanes of a multiprocessor, each a fused multiply-add a clock: the most of any generation (CUDA C++ Programming Guide
# 13.0, "Arithmetic Instructions", float32).
_LANES = 128
_US_PER_S = 1e6
_FAMILIES = ("matmul", "batch_matmul")


def search_bound_us(task: TuningTask, target: ResolvedTarget) -> float | None:
    """Return the microseconds below which no candidate of the search can be; None where that is not known.

    Where the search has no tensor-core instructions (`schedules.search.tensor_tile` says where it has), a contraction
    that accumulates in float32 takes at least its operations over the float32 rate at the highest clock.
    """
    if target.kind != "cuda" or task.family not in _FAMILIES or not isinstance(target.limits, CudaLimits):
        return None
    if json.loads(task.signature).get("acc_dtype") != "float32" or target.limits.sm_count is None:
        return None
    if takes_tensor_tiles(task.mod["main"], target.target):
        return None
    device = tvm.cuda(0)
    if not device.exist or not device.max_clock_rate:
        return None
    clock_hz = 1e3 * float(device.max_clock_rate)
    return bound_us(task.flops, target.limits.sm_count, clock_hz)


def bound_us(flops: float, multiprocessors: int, clock_hz: float) -> float:
    """Return the microseconds that so many operations take at the float32 rate of a GPU."""
    return flops / (2.0 * _LANES * multiprocessors * clock_hz) * _US_PER_S
