"""A last look at scheduled GPU kernels before code is generated.

TVM compiles a block outside every thread binding into a loop on the host, which then reads and writes device memory:
the process dies at the first call, with no message. Such kernels are found here, by name.

Its CUDA code generator loads a vector of booleans as `ushort`, two bytes an element where memory has one: the result is
wrong without a word. Loops over such accesses are unrolled here instead of vectorised.
"""

from __future__ import annotations

import logging

import tvm
from tvm import s_tir, tirx
from tvm.s_tir import dlight

from pipeline.errors import LoweringError
from schedules.fallback import SCHEDULED_ATTR

logger = logging.getLogger(__name__)


def bind_all_kernels(
    unscheduled: tvm.ir.IRModule, scheduled: tvm.ir.IRModule, target: tvm.target.Target
) -> tvm.ir.IRModule:
    """Return `scheduled` with every kernel that has unbound blocks scheduled anew by dlight's plainest rule.

    Raises
    ------
    LoweringError
        That rule leaves blocks unbound too.
    """
    unbound = unbound_kernels(scheduled)
    if not unbound:
        return scheduled
    logger.warning("kernels %s have blocks outside every GPU thread; they take dlight's fallback", ", ".join(unbound))
    result = tvm.ir.IRModule(
        dict(scheduled.functions_items()), attrs=scheduled.attrs, global_infos=scheduled.global_infos
    )
    for name in unbound:
        with target:
            schedule = dlight.gpu.Fallback().apply(unscheduled[name], target, False)
        if schedule is not None:
            result[result.get_global_var(name)] = schedule.mod["main"].with_attr(SCHEDULED_ATTR, True)
    left = unbound_kernels(result)
    if left:
        raise LoweringError(f"kernels {', '.join(left)} have blocks that no GPU thread runs, and no rule binds them")
    return result


def unroll_bool_vectors(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return the module with the vectorised loops over blocks that touch boolean buffers unrolled instead."""
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for var, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        names = [str(block.name_hint) for block in _leaf_blocks(func.body) if _touches_bool(block)]
        if not names:
            continue
        schedule = s_tir.Schedule(tvm.IRModule({"main": func}))
        for name in names:
            for loop in schedule.get_loops(schedule.get_sblock(name, func_name="main")):
                if int(schedule.get(loop).kind) == int(tirx.ForKind.VECTORIZED):
                    schedule.unroll(loop)
        result[var] = schedule.mod["main"]
    return result


def _touches_bool(block: s_tir.SBlock) -> bool:
    regions = (*block.reads, *block.writes)
    return any(str(region.source.dtype) == "bool" for region in regions)


def _leaf_blocks(stmt: tirx.Stmt) -> list[s_tir.SBlock]:
    """Return the innermost blocks under a statement."""
    if isinstance(stmt, s_tir.SBlockRealize):
        return _leaf_blocks(stmt.block.body) or [stmt.block]
    if isinstance(stmt, tirx.SeqStmt):
        return [block for part in stmt.seq for block in _leaf_blocks(part)]
    if isinstance(stmt, tirx.IfThenElse):
        branches = [branch for branch in (stmt.then_case, stmt.else_case) if branch is not None]
        return [block for branch in branches for block in _leaf_blocks(branch)]
    return _leaf_blocks(stmt.body) if isinstance(stmt, tirx.For | tirx.AttrStmt) else []


def unbound_kernels(mod: tvm.ir.IRModule) -> list[str]:
    """Return the names of the PrimFuncs with a compute block that no GPU thread runs."""
    return sorted(
        str(var.name_hint)
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and _unbound_blocks(func.body, bound=False)
    )


def _unbound_blocks(stmt: tirx.Stmt, *, bound: bool) -> list[str]:
    """Return the innermost blocks under `stmt` that are outside a thread binding."""
    if isinstance(stmt, tirx.For):
        return _unbound_blocks(stmt.body, bound=bound or int(stmt.kind) == int(tirx.ForKind.THREAD_BINDING))
    if isinstance(stmt, tirx.SeqStmt):
        return [name for part in stmt.seq for name in _unbound_blocks(part, bound=bound)]
    if isinstance(stmt, s_tir.SBlockRealize):
        inner = _unbound_blocks(stmt.block.body, bound=bound)
        leaf = not _holds_block(stmt.block.body)
        return [str(stmt.block.name_hint)] if leaf and not bound else inner
    if isinstance(stmt, tirx.IfThenElse):
        branches = [branch for branch in (stmt.then_case, stmt.else_case) if branch is not None]
        return [name for branch in branches for name in _unbound_blocks(branch, bound=bound)]
    if isinstance(stmt, tirx.AttrStmt):
        # Code made without blocks (library calls, templates) names its threads in such statements.
        return _unbound_blocks(stmt.body, bound=bound or str(stmt.attr_key) == "thread_extent")
    return []


def _holds_block(stmt: tirx.Stmt) -> bool:
    if isinstance(stmt, s_tir.SBlockRealize):
        return True
    if isinstance(stmt, tirx.SeqStmt):
        return any(_holds_block(part) for part in stmt.seq)
    if isinstance(stmt, tirx.IfThenElse):
        return any(_holds_block(branch) for branch in (stmt.then_case, stmt.else_case) if branch is not None)
    return isinstance(stmt, tirx.For | tirx.AttrStmt) and _holds_block(stmt.body)
