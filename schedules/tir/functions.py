"""A read-only view of an unscheduled PrimFunc: its blocks in execution order, and walks over their expressions.

The TVM wheel exposes no statement visitor to Python, so this module has the small one that task extraction needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx

_REDUCTION = int(tirx.IterVar.CommReduce)
_CHILD_FIELDS = ("a", "b", "value", "condition", "true_value", "false_value", "base", "stride", "lanes", "body")


@dataclass(frozen=True)
class BlockView:
    """One compute block.

    Attributes
    ----------
    name
        The block's name hint.
    spatial, reduction
        The block's iteration variables with their extents, in order.
    stores
        What its body writes, in order; an initialisation of a reduction is not among them.
    """

    name: str
    spatial: tuple[tuple[tvm.ir.Var, int], ...]
    reduction: tuple[tuple[tvm.ir.Var, int], ...]
    stores: tuple[tirx.BufferStore, ...]


def list_statements(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """Yield a statement and all statements inside it, in execution order."""
    yield stmt
    if isinstance(stmt, tirx.SeqStmt):
        for inner in stmt.seq:
            yield from list_statements(inner)
    elif isinstance(stmt, s_tir.SBlockRealize):
        yield from list_statements(stmt.block)
    elif isinstance(stmt, tirx.IfThenElse):
        yield from list_statements(stmt.then_case)
        if stmt.else_case is not None:
            yield from list_statements(stmt.else_case)
    elif isinstance(getattr(stmt, "body", None), tirx.Stmt):
        yield from list_statements(stmt.body)


def list_expressions(expr: tvm.ir.Expr) -> Iterator[tvm.ir.Expr]:
    """Yield an expression and all expressions inside it, the indices of loads included."""
    yield expr
    if isinstance(expr, tvm.ir.TensorLoad):
        for index in expr.indices:
            yield from list_expressions(index)
    elif isinstance(expr, tvm.ir.Call):
        for argument in expr.args:
            yield from list_expressions(argument)
    elif not isinstance(expr, tvm.ir.Var):
        for name in _CHILD_FIELDS:
            child = getattr(expr, name, None)
            if isinstance(child, tvm.ir.Expr):
                yield from list_expressions(child)


def list_loads(expr: tvm.ir.Expr) -> list[tvm.ir.TensorLoad]:
    """Return the loads in an expression, loads inside the indices of other loads included."""
    return [inner for inner in list_expressions(expr) if isinstance(inner, tvm.ir.TensorLoad)]


def list_calls(expr: tvm.ir.Expr) -> list[str]:
    """Return the names of the intrinsics called in an expression, without the dialect: `exp`, `rsqrt`."""
    return [
        inner.op.name.rsplit(".", 1)[-1]
        for inner in list_expressions(expr)
        if isinstance(inner, tvm.ir.Call) and isinstance(inner.op, tvm.ir.Op)
    ]


def list_blocks(func: tirx.PrimFunc) -> list[BlockView]:
    """Return the compute blocks of a PrimFunc in execution order; the root block and empty blocks are left out."""
    blocks = []
    for stmt in list_statements(func.body):
        if not isinstance(stmt, s_tir.SBlock) or (not stmt.iter_vars and _holds_block(stmt)):
            continue
        axes = [(iter_var.var, int(iter_var.dom.extent), int(iter_var.iter_type)) for iter_var in stmt.iter_vars]
        stores = tuple(s for s in list_statements(stmt.body) if isinstance(s, tirx.BufferStore))
        if stores:
            blocks.append(
                BlockView(
                    name=str(stmt.name_hint),
                    spatial=tuple((var, extent) for var, extent, kind in axes if kind != _REDUCTION),
                    reduction=tuple((var, extent) for var, extent, kind in axes if kind == _REDUCTION),
                    stores=stores,
                )
            )
    return blocks


def static_shape(buffer: tvm.ir.Var) -> tuple[int, ...] | None:
    """Return the shape of a buffer, or None when a dimension is symbolic."""
    shape = tuple(buffer.shape)
    if not all(isinstance(dim, tvm.tirx.IntImm) for dim in shape):
        return None
    return tuple(int(dim) for dim in shape)


def is_buffer(param: tvm.ir.Var) -> bool:
    """Return whether a PrimFunc parameter is a buffer, and not a scalar."""
    return isinstance(param.ty, tvm.tirx.BufferType)


def written_params(func: tirx.PrimFunc) -> tuple[int, ...]:
    """Return the positions of the parameters that the PrimFunc writes: its outputs."""
    stored = [s.buffer for s in list_statements(func.body) if isinstance(s, tirx.BufferStore)]
    return tuple(
        position for position, param in enumerate(func.params) if any(buffer.same_as(param) for buffer in stored)
    )


def buffer_bytes(buffer: tvm.ir.Var) -> int:
    """Return the size in bytes of a buffer of static shape."""
    count = 1
    for dim in buffer.shape:
        count *= int(dim)
    dtype = tvm.DataType(str(buffer.dtype))
    return count * ((int(dtype.bits) * int(dtype.lanes) + 7) // 8)


def _holds_block(stmt: s_tir.SBlock) -> bool:
    return any(isinstance(inner, s_tir.SBlock) for inner in list_statements(stmt.body))
