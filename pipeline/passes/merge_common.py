"""Pass: what is computed twice from the same tensors is computed once."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm_ffi import structural_equal

from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of, rewrite_main
from relaxtune.pipeline.passes.kit.keys import Key, key_of
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
    return rewrite_main(mod, _Merge(merged))


@mutator
class _Merge(PyExprMutator):  # type: ignore[misc]
    def __init__(self, merged: dict[relax.Var, relax.Var]) -> None:
        super().__init__()
        self._merged = merged

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self._merged:
            self.set_var_remap(binding.var, self.visit_expr(self._merged[binding.var]))
        else:
            super().visit_var_binding_(binding)
