"""Blocks of a schedule, and what rules ask about them: canonical loops, readers, and whether they may be inlined."""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from relaxtune.schedules.tir.blocks import Block, static_extent
from relaxtune.schedules.tir.expressions import call_names, find_all, is_zero

# Calls that cost tens of instructions a lane; computing them twice costs more than storing them once.
_COSTLY_CALLS = ("tirx.exp", "tirx.erf", "tirx.tanh", "tirx.pow", "tirx.log", "tirx.sigmoid", "tirx.sin", "tirx.cos")


@dataclass(frozen=True)
class ScheduledBlock(Block):
    """A block of a schedule; `rv` is its handle for primitives, valid until the block is inlined."""

    rv: SBlockRV


def list_blocks(sch: Schedule) -> list[ScheduledBlock]:
    """Return the facts of every block under the root, in program order; empty for a function without blocks."""
    body = sch.mod["main"].body
    if not hasattr(body, "block"):  # an extern call, say
        return []
    return [block_facts(sch, rv) for rv in sch.get_child_blocks(sch.get_sblock(body.block.name_hint))]


def find_only_reduction(sch: Schedule) -> ScheduledBlock | None:
    """Return the only block that is not data parallel; None where there are others, or one is not canonical."""
    blocks = list_blocks(sch)
    reductions = [block for block in blocks if not block.is_spatial]
    return reductions[0] if len(reductions) == 1 and all(is_canonical(sch, block) for block in blocks) else None


def block_facts(sch: Schedule, rv: SBlockRV) -> ScheduledBlock:
    """Return the facts of one block."""
    return ScheduledBlock(tvm_ffi.get_global_func("s_tir.schedule.GetSBlockRealize")(sch, rv), rv)


def is_canonical(sch: Schedule, block: ScheduledBlock) -> bool:
    """Whether each iterator of the block is bound to one loop of its own, all of them serial and nested.

    Blocks with inner blocks (scans, sorts) and blocks under `if` or `while` are not: the rules leave them alone.
    """
    if "O" in block.kinds or not isinstance(block.stmt.body, tirx.BufferStore):
        return False
    loops = [sch.get(loop) for loop in sch.get_loops(block.rv)]
    if len(loops) != len(block.kinds):
        return False
    bound = zip(block_facts(sch, block.rv).realize.iter_values, loops, strict=True)
    return all(value.same_as(loop.loop_var) for value, loop in bound) and all(
        loop.kind == tirx.ForKind.SERIAL and is_zero(loop.min) for loop in loops
    )


def can_inline(sch: Schedule, block: ScheduledBlock) -> bool:
    """Whether `compute_inline` is legal: spatial, writes one intermediate element an iteration, read by others."""
    if not block.is_spatial or not is_canonical(sch, block) or len(block.stmt.writes) != 1:
        return False
    store = block.stmt.body
    if not all(isinstance(index, tirx.Var) for index in store.indices):
        return False
    written = [index.name for index in store.indices]
    if len(set(written)) != len(written):
        return False
    is_output = any(store.buffer.same_as(param) for param in sch.mod["main"].params)
    return not is_output and bool(sch.get_consumers(block.rv))


def is_costly(block: ScheduledBlock) -> bool:
    """Whether computing an element takes a transcendental function."""
    return any(name in _COSTLY_CALLS for name in call_names(block.stmt.body))


def has_bound_check(sch: Schedule, block: ScheduledBlock) -> bool:
    """Whether the block runs only for a part of its loops' iterations (a split that does not divide)."""
    predicate = block_facts(sch, block.rv).realize.predicate
    return not (isinstance(predicate, tirx.IntImm) and int(predicate) == 1)


def can_partition_loops(sch: Schedule) -> bool:
    """Whether TVM may be asked to split constant loops at their bound checks.

    LoopPartition mixes 32-bit zeros into 64-bit indices, which the next pass refuses. Only where every index can be
    narrowed to 32 bits before (no symbolic extent, no 64-bit index read from a tensor) does it go well.
    """
    body = sch.mod["main"].body
    symbolic = any(static_extent(loop.extent) is None for loop in find_all(body, tirx.For))
    return not symbolic and all(str(load.ty.dtype) != "int64" for load in find_all(body, TensorLoad))


def find_path_to(sch: Schedule, block: ScheduledBlock) -> list[str]:
    """Return the names of the blocks that the given one depends on, directly or not."""
    names: list[str] = []
    pending = list(sch.get_producers(block.rv))
    while pending:
        rv = pending.pop()
        name = str(sch.get(rv).name_hint)
        if name not in names:
            names.append(name)
            pending += list(sch.get_producers(rv))
    return names


def loop_extents(sch: Schedule, rv: SBlockRV) -> list[int | None]:
    """Return the extents of the loops around a block, None where symbolic."""
    return [static_extent(sch.get(loop).extent) for loop in sch.get_loops(rv)]
