"""Keep TVM from vectorising accesses to booleans in GPU kernels.

Its CUDA code generator loads a vector of booleans as `ushort`, two bytes an element where memory has one: the result is
wrong without a word. Loops over such accesses are unrolled here instead of vectorised.
"""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx


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
