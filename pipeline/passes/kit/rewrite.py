"""`rewrite`: a new `main`, binding by binding.

A pass reads the graph (`Graph`) and decides which bindings change. A rule then gives their new values::

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | Done | None:
        if binding.var not in found:
            return None                                             # stays as it is
        return relax.op.nn.silu(new.of(found[binding.var]))         # is bound under the old name
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from enum import Enum
from typing import Final, TypeVar

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm_ffi import StructuralKey, structural_map

from relaxtune.pipeline.passes.kit.ir import main_of, with_main
from relaxtune.pipeline.passes.kit.state import LoweringState

# TVM's OpPatternKind: fuses with all neighbours, with most, and with nothing.
ELEMENTWISE, INJECTIVE, OPAQUE = 0, 2, 8


def pattern_of(func: tvm.ir.BaseFunc) -> int:
    """Return TVM's OpPatternKind of a function, OPAQUE where it has none."""
    return int(func.attrs.get("op_pattern", OPAQUE)) if func.attrs else OPAQUE


class Done(Enum):
    """The result of a rule that has bound the value itself, or removes the binding."""

    DONE = "done"


DONE: Final = Done.DONE
T = TypeVar("T")


class Rewriter(PyExprMutator):  # type: ignore[misc]  # TVM's classes carry no types
    """Writes the new `main`. A rule calls its methods; `rewrite` makes one."""

    def __init__(self, mod: tvm.ir.IRModule, state: LoweringState, rule: Rule | None = None) -> None:
        super().__init__(mod)
        self.state = state
        self._rule = rule

    def rule(self, binding: relax.VarBinding) -> tvm.ir.Expr | Done | None:
        """Return the new value of a binding, `DONE`, or None where the binding stays."""
        assert self._rule is not None
        return self._rule(self, binding)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:  # noqa: D102  # called by TVM
        value = self.rule(binding)
        if value is None:
            self.keep(binding)
        elif isinstance(value, relax.Var) and isinstance(binding.var, relax.DataflowVar):
            self.set_var_remap(binding.var, value)
        elif value is not DONE:
            self.name(binding.var, value)

    def of(self, expr: tvm.ir.Expr) -> tvm.ir.Expr:
        """Return an expression of the old function as one of the new function."""
        return self.visit_expr(expr)

    def keep(self, binding: relax.VarBinding) -> None:
        """Bind what was bound, its operands replaced."""
        PyExprMutator.visit_var_binding_(self, binding)

    def emit(self, value: tvm.ir.Expr) -> relax.Var:
        """Bind `value` under a name that no ONNX node has."""
        var: relax.Var = self.builder_.emit(value)
        return var

    def name(self, var: relax.Var, value: tvm.ir.Expr) -> relax.Var:
        """Bind `value` under the name and kind of `var` (whose type may differ); uses of `var` follow."""
        kind = relax.DataflowVar if isinstance(var, relax.DataflowVar) else relax.Var
        new = self._bind(kind, var.name, value)
        self.set_var_remap(var, new)
        return new

    def extra(self, name: str, value: tvm.ir.Expr, nodes_of: Iterable[relax.Var] = ()) -> relax.Var:
        """Bind `value` under a new name; it stands for the ONNX nodes of some variables."""
        self.state.sources[name] = self.state.nodes_of(var.name for var in nodes_of)
        kind = relax.DataflowVar if self.builder_.current_block_is_dataflow() else relax.Var
        return self._bind(kind, name, value)

    def _bind(self, kind: type[relax.Var], name: str, value: tvm.ir.Expr) -> relax.Var:
        value = self.builder_.normalize(value)
        var = kind(name, value.ty)
        self.builder_.emit_normalized(relax.VarBinding(var, value))
        return var

    def kernel(self, compute: Callable[..., object], *operands: tvm.ir.Expr, name: str, **attrs: object) -> relax.Call:
        """Return a call of a new PrimFunc that computes a tensor expression of operands of the new function."""
        return self.builder_.call_te(compute, *operands, primfunc_name_hint=name, primfunc_attrs=attrs or None)

    def function(self, func: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        """Add a PrimFunc to the module under a free name."""
        return self.builder_.add_func(func, name)


Rule = Callable[[Rewriter, relax.VarBinding], "tvm.ir.Expr | Done | None"]
_Plain = mutator(Rewriter)


def rewrite(mod: tvm.ir.IRModule, state: LoweringState, rule: Rule) -> tvm.ir.IRModule:
    """Return `mod` with each binding of `main` as a rule makes it, and bindings without a reader dropped."""
    return written_by(mod, _Plain(mod, state, rule))


def with_opaque_calls(mod: tvm.ir.IRModule, state: LoweringState, chosen: Set[relax.Var]) -> tvm.ir.IRModule:
    """Return `mod` with some variables bound to calls of opaque copies of their functions, equal calls once."""
    copies: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    made: dict[tuple[object, ...], relax.Var] = {}

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        if binding.var not in chosen:
            return None
        called, *rest = binding.value.args
        if called not in copies:
            copies[called] = new.function(mod[called].with_attr("op_pattern", OPAQUE), called.name_hint)
        arguments = [new.of(one) for one in rest]
        key = (called, *map(StructuralKey, arguments))
        if key not in made:
            call = relax.Call(binding.value.op, [copies[called], *arguments], ty_args=binding.value.ty_args)
            made[key] = new.extra(binding.var.name, call, [binding.var])
        return made[key]

    return rewrite(mod, state, rule) if chosen else mod


def replace_found(
    mod: tvm.ir.IRModule,
    state: LoweringState,
    found: Mapping[relax.Var, T | None],
    make: Callable[[Rewriter, relax.VarBinding, T], tvm.ir.Expr | Done],
    note: str = "",
) -> tvm.ir.IRModule:
    """Return `mod` with the bindings that a pass has found as `make` makes them, or gone (None); all others stay.

    `note` says what they are ("gathers are views"), and is reported with their number.
    """
    if not found:
        return mod
    if note:
        state.note(f"{len(found)} {note}")

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | Done | None:
        if binding.var not in found:
            return None
        one = found[binding.var]
        return DONE if one is None else make(new, binding, one)

    return rewrite(mod, state, rule)


def written_by(mod: tvm.ir.IRModule, rewriter: Rewriter) -> tvm.ir.IRModule:
    """Return `mod` with `main` as a rewriter writes it; for passes with a `Rewriter` of their own."""
    function: relax.Function = rewriter.visit_expr(main_of(mod))
    return with_main(rewriter.builder_.get(), function)


def replace_constants(
    function: relax.Function, choose: Callable[[tvm.ir.Expr, relax.Var | None], tvm.ir.Expr]
) -> relax.Function:
    """Return `function` with other expressions for its constants, by the variable whose binding reads each."""

    def in_binding(binding: relax.VarBinding) -> relax.VarBinding:
        constants = (tvm.ir.GenericConst, lambda constant: choose(constant, binding.var))
        return relax.VarBinding(binding.var, structural_map(binding.value, [constants]))

    elsewhere = (tvm.ir.GenericConst, lambda constant: choose(constant, None))
    result: relax.Function = structural_map(function, [(relax.VarBinding, in_binding), elsewhere], order="pre")
    return result


def rename_bindings(function: relax.Function, names: Mapping[relax.Var, str]) -> relax.Function:
    """Return `function` with the given variables renamed."""
    named = {var: type(var)(name, var.ty) for var, name in names.items()}
    renamed: relax.Function = structural_map(function, [(relax.Var, lambda var: named.get(var, var))])
    return renamed
