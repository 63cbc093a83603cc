"""Reductions over axes of one place, as the assignments that they are.

dlight inlines what follows into such a reduction as if it were elementwise, and so applies it twice, to the start and
to the one step: a bias behind a matmul of K = 1 was added twice, `x - mean(x)` of one place read memory that nothing
wrote.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import PrimFunc

from relaxtune.schedules.tir.blocks import list_blocks
from relaxtune.schedules.tir.expressions import BINARY


def without_unit_reductions(func: PrimFunc) -> PrimFunc:
    """Return a function whose sums, products, maxima and minima over one place are assignments."""
    units = [block.stmt for block in list_blocks(func) if _assigned(block.stmt) is not None]
    return func.with_body(_rewritten(func.body)) if units else func


def _assigned(block: SBlock) -> tirx.BufferStore | None:
    """Return the assignment that a reduction over one place is, None for any other block."""
    store, start = block.body, block.init
    reduced = [axis for axis in block.iter_vars if axis.iter_type == tirx.IterVar.CommReduce]
    one = all(isinstance(axis.dom.extent, tirx.IntImm) and int(axis.dom.extent) == 1 for axis in reduced)
    if not one or not isinstance(start, tirx.BufferStore) or not isinstance(store, tirx.BufferStore):
        return None
    value = store.value
    if not isinstance(value, BINARY) or not isinstance(value.a, TensorLoad) or not value.a.source.same_as(store.buffer):
        return None
    return tirx.BufferStore(store.buffer, type(value)(start.value, value.b), store.indices)


def _rewritten(stmt: tirx.Stmt) -> tirx.Stmt:
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_rewritten(part) for part in stmt.seq])
    if isinstance(stmt, tirx.For):
        body = _rewritten(stmt.body)
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations)
    if isinstance(stmt, SBlockRealize):
        return SBlockRealize(stmt.iter_values, stmt.predicate, _block(stmt.block))
    return stmt


def _block(block: SBlock) -> SBlock:
    body, start, axes = _assigned(block), None, block.iter_vars
    if body is None:
        body, start = _rewritten(block.body), block.init
    else:
        axes = [tirx.IterVar(axis.dom, axis.var, tirx.IterVar.DataPar, axis.thread_tag) for axis in axes]
    return SBlock(
        axes, block.reads, block.writes, block.name_hint, body, start, block.alloc_buffers, block.match_buffers,
        block.annotations,
    )  # fmt: skip
