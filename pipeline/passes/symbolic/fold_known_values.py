"""Pass: what is the same at all sizes is not computed."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm_ffi import structural_equal

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, either_way, is_constant, is_op, shape_of
from relaxtune.pipeline.passes.kit.rewrite import rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.kit.uniform import UniformValues


def fold_known_values(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` without conditions that hold at all sizes, and without look-ups of one known row.

    Such are `logical_and` with what is true, `logical_or` with what is false, `where` by what is known, and `take` of a
    constant by indices that are one number. Of static sizes they are folded. Of symbolic ones exporters leave the
    causal mask of a decode step's one token, which hides nothing, and the token types of a model called without any.
    """
    graph = Graph(mod)
    known = graph.uniform
    kept: dict[relax.Var, tvm.ir.Expr] = {}
    for binding in graph.bindings:
        choice = next((one for one in _choices(binding.value, known) if structural_equal(one.ty, binding.var.ty)), None)
        if choice is None:
            choice = _looked_up(binding, known)
        if choice is not None:
            kept[binding.var] = choice
    if not kept:
        return mod
    state.note(f"{len(kept)} values are the same at all sizes")
    return rewrite(mod, state, lambda new, binding: new.of(kept[binding.var]) if binding.var in kept else None)


def _choices(value: tvm.ir.Expr, known: UniformValues) -> list[tvm.ir.Expr]:
    """Return the operands that an operation gives as they are, shapes aside."""
    if is_op(value, "logical_and", "logical_or"):
        neutral = is_op(value, "logical_and")
        return [data for condition, data in either_way(value) if known.of(condition) == neutral]
    if is_op(value, "where") and (condition := known.of(value.args[0])) is not None:
        return [value.args[1 if condition else 2]]
    return []


def _looked_up(binding: relax.VarBinding, known: UniformValues) -> tvm.ir.Expr | None:
    """Return the row that a look-up gives at each place, as often as it does."""
    value, shape = binding.value, shape_of(binding.var)
    if shape is None or not is_op(value, "take") or value.attrs.axis is None or int(value.attrs.axis) != 0:
        return None
    index = known.of(value.args[1]) if is_constant(value.args[0]) and not is_constant(value.args[1]) else None
    if index is None or not 0 <= int(index) < len(table := array_of(value.args[0])):
        return None
    row = relax.const(table[int(index)], dtype_of(value))
    return relax.op.broadcast_to(row, relax.ShapeExpr(shape))
