"""Pass: what is computed twice from the same tensors is computed once."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm_ffi import structural_equal

from relaxtune.pipeline.passes.kit.ir import Key, bindings_of, key_of, main_of
from relaxtune.pipeline.passes.kit.rewrite import rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState


def merge_common_subexpressions(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with equal operations on equal operands merged; the one that stays stands for the ONNX nodes of all.

    Exporters repeat masks, casts and position tables in every layer. The stock `EliminateCommonSubexpr` compares
    constants by content, all the weights included, and drops the names of what it merges.
    """
    env: dict[relax.Var, Key] = {}
    first: dict[Key, relax.Var] = {}
    merged: dict[relax.Var, relax.Var] = {}
    for binding in bindings_of(main_of(mod)):
        key = key_of(binding.value, env)
        simple = isinstance(binding, relax.VarBinding) and isinstance(binding.var, relax.DataflowVar)
        known = isinstance(binding.value, relax.Call | relax.TupleGetItem) and key in first
        if simple and known and structural_equal(binding.var.ty, first[key].ty):
            merged[binding.var] = first[key]
            env[binding.var] = env[first[key]]
            continue
        env[binding.var] = f"var:{binding.var.name}"
        if isinstance(binding.var, relax.DataflowVar):
            first.setdefault(key, binding.var)
    if not merged:
        return mod
    for duplicate, kept in merged.items():
        state.sources[kept.name] = state.nodes_of([kept.name, duplicate.name])
    return rewrite(mod, state, lambda new, binding: new.of(merged[binding.var]) if binding.var in merged else None)
