"""Several forms of one model in one module: `main`, and entries beside it that call other kernels in some places.

What differs is compiled, and the rest shared: comparing a dozen kernels inside a model takes one compilation, one copy
of the weights, and the time of the kernels that are new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.utils import copy_with_new_vars

from relaxtune.pipeline.artifact.kernel_choice import KernelChoice

_MAIN = "main"


def entry_of(number: int) -> str:
    """Return the name of the function that runs a variant, counted from 0."""
    return f"{_MAIN}_{number}"


def with_variants(
    mod: tvm.ir.IRModule, variants: Sequence[Sequence[KernelChoice]], unscheduled: tvm.ir.IRModule
) -> tvm.ir.IRModule:
    """Return the module with an entry for each variant: `main` with some of its kernels made in another way.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        `main` calls PrimFuncs, scheduled as they were chosen for it.
    variants : sequence of sequences of KernelChoice
        Of each variant, the choices in which it differs; they keep the names of `main`'s functions.
    unscheduled : tvm.ir.IRModule
        The same functions before they were scheduled: what a choice of the fallback starts from.

    Raises
    ------
    ValueError
        A choice is of a function that the module does not have.
    """
    builder = relax.BlockBuilder(mod)
    for number, variant in enumerate(variants):
        others = {}
        for choice in variant:
            old = mod.get_global_var(choice.function)
            made = choice.scheduled if choice.scheduled is not None else unscheduled[choice.function]
            others[old] = builder.add_func(made, f"{choice.function}_{entry_of(number)}")
        entry = copy_with_new_vars(_Calls(mod, others).visit_expr(mod[_MAIN]))
        builder.add_func(entry.with_attr("global_symbol", entry_of(number)), entry_of(number))
    return builder.get()


@mutator
class _Calls(PyExprMutator):  # type: ignore[misc]  # TVM's classes carry no types
    """Call other functions."""

    def __init__(self, mod: tvm.ir.IRModule, others: Mapping[tvm.ir.GlobalVar, tvm.ir.GlobalVar]) -> None:
        super().__init__(mod)
        self._others = others

    def visit_global_var_(self, op: tvm.ir.GlobalVar) -> tvm.ir.Expr:
        return next((new for old, new in self._others.items() if old.same_as(op)), op)
