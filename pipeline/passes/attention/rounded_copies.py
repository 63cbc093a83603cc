"""Rounded copies of tensors, each emitted once, for passes that read heads where they are stored."""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import HALVES, dtype_of, is_op
from relaxtune.pipeline.passes.kit.rewrite import Rewriter


class Roundings:
    """The half-precision copies of tensors of the function that is rewritten."""

    def __init__(self) -> None:
        self._known: dict[tuple[tvm.ir.Expr, str], relax.Var] = {}

    def note(self, binding: relax.VarBinding) -> None:
        """Remember a tensor that the graph rounds itself."""
        if is_op(binding.value, "astype") and dtype_of(binding.var) in HALVES:
            self._known.setdefault((binding.value.args[0], dtype_of(binding.var)), binding.var)

    def get(self, new: Rewriter, base: tvm.ir.Expr, dtype: str) -> tvm.ir.Expr:
        """Return a tensor of the old function in a dtype, as a tensor of the new one; it is rounded as a whole."""
        if dtype_of(base) == dtype:
            return new.of(base)
        if (base, dtype) not in self._known:
            rounded = relax.op.astype(new.of(base), dtype)
            self._known[base, dtype] = new.extra(f"{base.name}__{dtype}", rounded, [base])
        return new.of(self._known[base, dtype])
