"""Steps that the CPU rules share: inlining, and how loops are made parallel and vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.transposition import find_crossed_axis
from relaxtune.schedules.cpu.wrapping import wraps_by_lane
from relaxtune.schedules.targets import CpuLimits, TargetLimits, target_limits
from relaxtune.schedules.tir.blocks import element_bytes, static_extent, static_shape
from relaxtune.schedules.tir.expressions import find_all
from relaxtune.schedules.tir.scheduled_blocks import (
    ScheduledBlock,
    can_inline,
    can_partition_loops,
    is_canonical,
    is_costly,
    list_blocks,
    loop_extents,
)

# Below this many element operations, waking the thread pool (about 5 us) costs more than it saves.
PARALLEL_MIN_WORK = 16 * 1024

# TVM's LoopPartition splits constant loops at the point where a bound check becomes provable only where it is asked to.
PARTITION_HINT = "pragma_loop_partition_hint"

_ELEMENTS_MAX = 2**31 - 1


def cpu_limits(target: Target) -> CpuLimits:
    """Return the limits of a CPU target."""
    limits: TargetLimits = target_limits(target)
    if not isinstance(limits, CpuLimits):
        raise TypeError(f"expected an llvm target, got {target.kind.name}")
    return limits


def inline_spatial(sch: Schedule, keep: Sequence[str] = ()) -> None:
    """Inline the data-parallel blocks into their readers, except those named and those costly to compute twice.

    A block with costly calls stays when more than one block reads it; a cheap one is recomputed by each reader.
    """
    for block in list_blocks(sch):
        if block.name in keep or not can_inline(sch, block):
            continue
        if is_costly(block) and len(sch.get_consumers(block.rv)) > 1:
            continue
        sch.compute_inline(block.rv)


def work_of(sch: Schedule, rv: SBlockRV) -> int | None:
    """Return how many iterations the loops around a block run, None when symbolic."""
    extents = loop_extents(sch, rv)
    known = [extent for extent in extents if extent is not None]
    return math.prod(known) if len(known) == len(extents) else None


def worth_parallel(work: int | None) -> bool:
    """Whether a loop nest of so many element operations should run on several threads; an unknown one should."""
    return work is None or work >= PARALLEL_MIN_WORK


def schedule_elementwise(sch: Schedule, block: ScheduledBlock, limits: CpuLimits) -> None:
    """Run one data-parallel block on all cores with a vector loop over its innermost elements.

    The innermost loops are fused until they hold at least a vector; the rest is fused into one parallel loop. A block
    whose loops are all "inner" is cut into chunks, so that a flat tensor too is shared among the cores. A block that
    reads across its vector axis is walked as `transposition` says; `wrapping` says which vectors are unrolled.
    """
    loops = sch.get_loops(block.rv)
    if not loops or not is_canonical(sch, block):
        return
    parallel = worth_parallel(work_of(sch, block.rv))
    lanes = limits.vector_bytes // element_bytes(str(block.stmt.writes[0].source.dtype))
    extents = loop_extents(sch, block.rv)
    cut = _inner_start(extents, lanes)
    wraps = wraps_by_lane(sch, block, lanes, cut)
    crossed = None if wraps else find_crossed_axis(sch, block, lanes)
    if crossed is not None and _schedule_crossed(sch, block, crossed, lanes, limits):
        return
    inner = sch.fuse(*loops[cut:])
    inner_extent = static_extent(sch.get(inner).extent)
    outer = sch.fuse(*loops[:cut]) if cut else None
    if outer is None or (static_extent(sch.get(outer).extent) or limits.cores) < limits.cores:
        chunk, inner = sch.split(inner, [None, _chunk_of(inner_extent, lanes, limits)])
        outer = chunk if outer is None else sch.fuse(outer, chunk)
    if wraps:
        sch.unroll(sch.split(inner, [None, lanes])[1])
    else:
        vectorize_loop(sch, inner, lanes)
    if parallel:
        sch.parallel(outer)


def _schedule_crossed(sch: Schedule, block: ScheduledBlock, crossed: int, lanes: int, limits: CpuLimits) -> bool:
    """Walk a block as `transposition` says; return False, and change nothing, where a remainder stands in the way.

    A last vector that is not full needs blocks of y that no thread loop has taken in: a loop of its own, or a check in
    each lane where y is symbolic.
    """
    loops, extents = sch.get_loops(block.rv), loop_extents(sch, block.rv)
    others = [position for position in range(len(loops) - 1) if position != crossed]
    symbolic = extents[-1] is None
    remainder = extents[-1] is None or extents[-1] % lanes != 0
    # Beside a symbolic y, a symbolic axis is as a rule a batch, of 1.
    unknown = 1 if symbolic else math.inf
    jobs = math.prod(unknown if extents[position] is None else extents[position] or 0 for position in others)
    if remainder and (jobs < 2 * limits.cores or not (symbolic or can_partition_loops(sch))):
        return False
    parallel = worth_parallel(work_of(sch, block.rv))
    blocks, vector = sch.split(loops[-1], [None, lanes])
    sch.reorder(*(loops[position] for position in others), blocks, loops[crossed], vector)
    sch.vectorize(vector)
    shared = [loops[position] for position in others]
    if not remainder:
        shared.append(blocks)
    elif not symbolic:
        sch.annotate(blocks, PARTITION_HINT, 1)
    if parallel:
        sch.parallel(sch.fuse(*shared))
    return True


def vectorize_loop(sch: Schedule, loop: LoopRV, lanes: int) -> None:
    """Make the innermost loop a vector loop of so many lanes; a remainder runs in a loop of its own.

    A constant loop that the lanes do not divide is left to LLVM's vectoriser where TVM cannot split it.
    """
    extent = static_extent(sch.get(loop).extent)
    if extent is not None and extent <= 1:
        return
    if extent is not None and extent <= lanes:
        sch.vectorize(loop)
        return
    partial = extent is not None and extent % lanes != 0
    if partial and not can_partition_loops(sch):
        return
    body, vector = sch.split(loop, [None, lanes])
    if partial:
        sch.annotate(body, PARTITION_HINT, 1)
    sch.vectorize(vector)


def _inner_start(extents: Sequence[int | None], lanes: int) -> int:
    """Return the first of the loops that together hold at least one vector; symbolic loops are taken as long."""
    held = 1
    for index in reversed(range(len(extents))):
        extent = extents[index]
        if extent is None:
            return index if held == 1 else index + 1
        held *= extent
        if held >= lanes:
            return index
    return 0


def _chunk_of(extent: int | None, lanes: int, limits: CpuLimits) -> int:
    """Return the elements of one chunk: whole vectors, about four chunks a core, at most 64 vectors."""
    if extent is None:
        return 16 * lanes
    share = -(-extent // (4 * limits.cores))
    return max(1, min(-(-share // lanes), 64)) * lanes


def narrow_partitioned(mod: IRModule) -> IRModule:
    """Return the scheduled module with 32-bit indices in the functions that ask for partitioned loops.

    `LoopPartition` looks for the loop that its hint names. In a function with 64-bit indices, as Relax makes them, the
    pass before it replaces every loop variable by a 32-bit one, the hint's own is forgotten, and nothing is cut: a
    vector loop with a remainder then runs one lane at a time. With 32-bit indices from the start the hint holds.

    Functions of symbolic shape, with 64-bit integer tensors, or with tensors that 32 bits cannot index stay as they
    are, and so does the module when there is nothing to narrow.
    """
    narrowed = {}
    for var, func in mod.functions_items():
        loops = find_all(func.body, tirx.For) if isinstance(func, PrimFunc) else []
        if any(PARTITION_HINT in loop.annotations for loop in loops) and all(map(_fits, func.params)):
            narrowed[var] = tvm.tirx.transform.ForceNarrowIndexToInt32()(IRModule({"main": func}))["main"]
    if not narrowed:
        return mod
    result = IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for var, func in narrowed.items():
        result[var] = func
    return result


def _fits(param: tirx.Var) -> bool:
    shape = static_shape(param)
    return shape is not None and str(param.dtype) not in ("int64", "uint64") and math.prod(shape) <= _ELEMENTS_MAX
