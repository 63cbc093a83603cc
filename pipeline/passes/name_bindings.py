"""Pass: give every binding a name that later passes cannot generate, so that a name stays a way back to ONNX."""

from __future__ import annotations

import re

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of, with_functions
from relaxtune.pipeline.passes.kit.rewrite import rename_bindings
from relaxtune.pipeline.passes.kit.state import LoweringState

# Names that `BlockBuilder` gives to its variables: an imported binding called so would be mixed up with them.
_GENERATED = re.compile(r"(lv|gv|cse)\d*(_\d+)?")


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
    return with_functions(mod, {mod.get_global_var("main"): rename_bindings(main, names)}) if names else mod
