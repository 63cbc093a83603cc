"""Rounded copies of tensors, each emitted once, for passes that read heads where they are stored."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from relaxtune.pipeline.passes.kit.ir import HALVES, dtype_of, emit_extra, is_op
from relaxtune.pipeline.passes.kit.state import LoweringState


class Roundings:
    """The half-precision copies of tensors of the function that a mutator rewrites."""

    def __init__(self, mutator: PyExprMutator, state: LoweringState) -> None:
        self._mutator = mutator
        self._state = state
        self._known: dict[tuple[tvm.ir.Expr, str], relax.Var] = {}

    def note(self, binding: relax.VarBinding) -> None:
        """Remember a tensor that the graph has rounded itself; after the binding was visited."""
        if is_op(binding.value, "astype") and dtype_of(binding.var) in HALVES:
            new = self._mutator.visit_expr(binding.var)
            if isinstance(new, relax.Var):
                self._known.setdefault((binding.value.args[0], dtype_of(binding.var)), new)

    def get(self, base: tvm.ir.Expr, dtype: str) -> tvm.ir.Expr:
        """Return a tensor of the old function in a dtype, as a tensor of the new one; it is rounded as a whole."""
        if dtype_of(base) == dtype:
            return self._mutator.visit_expr(base)
        if (base, dtype) not in self._known:
            name = f"{base.name}__{dtype}"
            self._state.sources[name] = self._state.nodes_of([base.name])
            rounded = relax.op.astype(self._mutator.visit_expr(base), dtype)
            self._known[base, dtype] = emit_extra(self._mutator, name, rounded)
        return self._known[base, dtype]
