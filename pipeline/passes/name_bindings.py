"""Pass: give every binding a name that later passes cannot generate, so that a name stays a way back to ONNX."""

from __future__ import annotations

import re

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of
from relaxtune.pipeline.passes.kit.state import LoweringState

# What `BlockBuilder` calls the variables it makes: an imported binding called so would be mixed up with them.
_GENERATED = re.compile(r"(lv|gv|cse)\d*(_\d+)?")


@mutator
class _Rename(PyExprMutator):  # type: ignore[misc]
    def __init__(self, names: dict[relax.Var, str]) -> None:
        super().__init__()
        self._names = names

    def _renamed(self, var: relax.Var, kind: type[relax.Var]) -> relax.Var:
        if var not in self._names:
            return var
        new = kind(self._names[var], var.ty)
        self.set_var_remap(var, new)
        return new

    def visit_dataflow_var_def_(self, var: relax.Var) -> relax.Var:
        return self._renamed(var, relax.DataflowVar)

    def visit_var_def_(self, var: relax.Var) -> relax.Var:
        return self._renamed(var, relax.Var)


def rename_bindings(function: relax.Function, names: dict[relax.Var, str]) -> relax.Function:
    """Return `function` with the given variables renamed."""
    renamed: relax.Function = _Rename(names).visit_expr(function)
    return renamed


def name_bindings(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with unmistakable binding names, and fill `state.sources` for them.

    A binding `y = x` hands its nodes to `x` and the other way round: `CanonicalizeBindings` keeps one of the two names.
    """
    main = main_of(mod)
    bindings = list(bindings_of(main))
    nodes = {b.var: state.graph.source_map.get(b.var.name, ()) for b in bindings}
    for binding in reversed(bindings):
        value = binding.value
        if isinstance(value, relax.Var) and value in nodes:
            nodes[value] = nodes[binding.var] = tuple(dict.fromkeys(nodes[value] + nodes[binding.var]))
    taken = {param.name for param in main.params}
    names: dict[relax.Var, str] = {}
    for binding in bindings:
        var = binding.var
        base = f"n_{var.name}" if _GENERATED.fullmatch(var.name) else var.name
        name, index = base, 0
        while name in taken:
            index += 1
            name = f"{base}__{index}"
        taken.add(name)
        if name != var.name:
            names[var] = name
        state.sources[name] = nodes[var]
    if names:
        mod = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
        mod[mod.get_global_var("main")] = rename_bindings(main, names)
    return mod
