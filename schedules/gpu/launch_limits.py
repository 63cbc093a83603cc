"""Limits of a launch, and the resources that a scheduled GPU function needs: threads, grid, memory of a block."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from relaxtune.schedules.tir.blocks import child_statements

# CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability"; the same for every architecture.
_EXTENTS_MAX = {
    "blockIdx.x": 2**31 - 1, "blockIdx.y": 65535, "blockIdx.z": 65535,
    "threadIdx.x": 1024, "threadIdx.y": 1024, "threadIdx.z": 64,
}  # fmt: skip
# A thread may have 512 KiB, and every thread that a GPU holds has as much: 17 GiB of an H200's memory at this size.
_LOCAL_BYTES_MAX = 64 * 1024


# TVM's reductions over threads take some that no buffer of the function shows: a number for each warp and thread group.
_REDUCTION_BYTES = 1024


@dataclass
class _Launch:
    """Extents by the names of threads, and bytes by scope; infinite where a size is known at run time alone."""

    extents: dict[str, int] = field(default_factory=dict)
    taken: dict[str, float] = field(default_factory=dict)


def exceeded_limit(func: tirx.PrimFunc, target: Target) -> str | None:
    """Return what a scheduled function asks more of than one launch of the target may have; None where it fits.

    Extents that are known at run time alone are taken to fit.
    """
    exceeded = _exceeded(_lowered(func), target)
    # Shrinking buffers to the part that is used takes long.
    compact = s_tir.transform.CompactBufferAllocation()
    return None if exceeded is None else _exceeded(_lowered(func, compact), target)


def _exceeded(lowered: tirx.PrimFunc, target: Target) -> str | None:
    memory = {"shared": int(target.attrs["max_shared_memory_per_block"]) - _REDUCTION_BYTES, "local": _LOCAL_BYTES_MAX}
    threads_max = int(target.attrs["max_threads_per_block"])
    for launch in _launches(lowered.body):
        for thread, extent in launch.extents.items():
            if extent > _EXTENTS_MAX[thread]:
                return f"{extent} along {thread}, and {_EXTENTS_MAX[thread]} are the most"
        threads = math.prod(extent for thread, extent in launch.extents.items() if thread.startswith("threadIdx"))
        if threads > threads_max:
            return f"{threads} threads in a block, and {threads_max} are the most"
        for scope, fitting in memory.items():
            taken = launch.taken.get(scope, 0)
            if taken > fitting:
                size = f"{taken:.0f} bytes" if math.isfinite(taken) else "as many bytes as a size at run time says"
                return f"{size} of {scope} memory, and {fitting} are the most"
    return None


def _lowered(func: tirx.PrimFunc, *further: tvm.transform.Pass) -> tirx.PrimFunc:
    """Return the function with buffers where TVM allocates them."""
    passes = [
        s_tir.transform.LowerCrossThreadReduction(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.UnifyThreadBinding(),
        *further,
        s_tir.transform.LowerOpaqueBlock(),
    ]
    return tvm.transform.Sequential(passes)(tvm.IRModule({"main": func}))["main"]


def _launches(stmt: tirx.Stmt, inside: _Launch | None = None) -> list[_Launch]:
    """Return the launches of a lowered statement; one that is `inside` a launch adds to it what it asks for."""
    found, launch = [], inside
    if isinstance(stmt, tirx.AttrStmt) and str(stmt.attr_key) == "thread_extent":
        if launch is None:
            launch = _Launch()
            found.append(launch)
        if isinstance(stmt.value, tirx.IntImm) and str(stmt.node.thread_tag) in _EXTENTS_MAX:
            launch.extents[str(stmt.node.thread_tag)] = int(stmt.value)
    if isinstance(stmt, tirx.AllocBuffer) and launch is not None:
        shape, dtype = stmt.buffer.shape, tvm.DataType(str(stmt.buffer.dtype))
        elements = math.prod(int(size) if isinstance(size, tirx.IntImm) else math.inf for size in shape)
        scope = str(stmt.buffer.scope()).partition(".")[0]
        launch.taken[scope] = launch.taken.get(scope, 0) + elements * ((dtype.bits * dtype.lanes + 7) // 8)
    for part in child_statements(stmt):
        found += _launches(part, launch)
    return found
