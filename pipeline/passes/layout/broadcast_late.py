"""Pass: conditions are computed before they are broadcast, not of each copy."""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import dtype_of, equal_axes, is_constant, is_op, shape_of, static_shape
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.sizes import sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState

_BY_ELEMENT = (
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("logical_and", "logical_or", "logical_not", "where"),
)
_MOVES = ("expand_dims", "permute_dims")


def broadcast_late(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with broadcasts after the conditions, comparisons, sums and moves of axes that read them.

    ::

        sum(cast(broadcast_to(seen[b, 1, 1, keys])), keys) < 1   ->   broadcast_to(sum(cast(seen), keys) < 1)

    What broadcasts its operands itself, a `where` say, reads them as they were before. Exporters ask for each head and
    query whether it sees a key. Of a mask of padding that is one question for a row of the batch, and the same one in
    all layers.
    """
    return rewrite(mod, state, _rule)


def _rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
    value, shape = binding.value, shape_of(binding.var)
    if shape is None or not isinstance(value, relax.Call) or not _may_come_first(value):
        return None
    before = [_before(new, arg) for arg in value.args]
    if all(one is None for one in before):
        return None
    operands = [new.of(arg) if one is None else one for arg, one in zip(value.args, before, strict=True)]
    if is_op(value, *_MOVES, "sum") and not _keeps_axes(value, operands[0]):
        return None
    narrow = new.builder_.normalize(relax.Call(value.op, operands, value.attrs))
    if shape_of(narrow) is None or equal_axes(shape_of(narrow), shape):
        return None if shape_of(narrow) is None else narrow
    return relax.op.broadcast_to(new.extra(f"{binding.var.name}__once", narrow, [binding.var]), relax.ShapeExpr(shape))


def _before(new: Rewriter, expr: tvm.ir.Expr) -> tvm.ir.Expr | None:
    """Return the tensor of which another one is a broadcast, None where it is none."""
    found = None
    value = new.lookup_binding(new.of(expr)) if isinstance(expr, relax.Var) else None
    while is_op(value, "broadcast_to"):
        found = value.args[0]
        value = new.lookup_binding(found) if isinstance(found, relax.Var) else None
    return found


def _may_come_first(value: relax.Call) -> bool:
    """Return whether an operation on copies is cheaper before they are made, and what looks for it finds it there."""
    if is_op(value, "astype"):
        return dtype_of(value.args[0]) == "bool"
    if is_op(value, *_MOVES):
        return "float" not in dtype_of(value)
    if is_op(value, "multiply", "subtract"):
        return any(is_constant(arg) and static_shape(arg) == () for arg in value.args)
    return is_op(value, *_BY_ELEMENT) or (is_op(value, "sum") and bool(value.attrs.axis) and bool(value.attrs.keepdims))


def _keeps_axes(value: relax.Call, narrow: tvm.ir.Expr) -> bool:
    """Return whether an operation does the same to a tensor as to its broadcast: axes that are summed are the same."""
    wide, own = sizes_of(value.args[0]), sizes_of(narrow)
    if wide is None or own is None or len(wide) != len(own):
        return False
    return is_op(value, *_MOVES) or all(wide[int(axis)] == own[int(axis)] for axis in value.attrs.axis)
