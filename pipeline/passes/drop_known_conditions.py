"""Pass: conditions that hold at all sizes are not computed."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm_ffi import structural_equal

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import either_way, is_op
from relaxtune.pipeline.passes.kit.rewrite import rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.kit.uniform import UniformValues


def drop_known_conditions(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` without `logical_and` with what is true, `logical_or` with what is false, and known `where`.

    Of static sizes such conditions are folded. Of symbolic ones exporters leave the causal mask of a decode step's one
    token, which hides nothing: a kernel for the positions of the keys and one for the token's own.
    """
    graph = Graph(mod)
    known = UniformValues(graph.values)
    kept: dict[relax.Var, tvm.ir.Expr] = {}
    for binding in graph.bindings:
        value = binding.value
        choices: list[tvm.ir.Expr] = []
        if is_op(value, "logical_and", "logical_or"):
            neutral = is_op(value, "logical_and")
            choices = [data for condition, data in either_way(value) if known.of(condition) == neutral]
        elif is_op(value, "where") and (condition := known.of(value.args[0])) is not None:
            choices = [value.args[1 if condition else 2]]
        for choice in choices:
            if structural_equal(choice.ty, binding.var.ty):
                kept[binding.var] = choice
                break
    if not kept:
        return mod
    state.note(f"{len(kept)} conditions hold at all sizes")
    return rewrite(mod, state, lambda new, binding: new.of(kept[binding.var]) if binding.var in kept else None)
