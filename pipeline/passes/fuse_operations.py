"""Pass: group operations into kernels."""

from __future__ import annotations

from collections.abc import Iterable

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.ir import (
    bindings_of,
    called_function,
    main_of,
    shape_of,
    users_of,
    with_functions,
    with_main,
)
from relaxtune.pipeline.passes.kit.rewrite import INJECTIVE, OPAQUE, pattern_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.onnx_nodes_of_kernels import name_fused, record_unfused
from relaxtune.pipeline.passes.symbolic.tables import TABLE_ATTR
from relaxtune.schedules.tir.expressions import call_names


def fuse_operations(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with groups of operations outlined into functions (`FuseOps`), ONNX nodes carried over.

    A matmul, norm or softmax takes the elementwise operations after it into its group (bias, activation, residual,
    scale, mask); elementwise chains, reshapes and transposes group among themselves.

    A table of relative positions (`tabulate_positions`) is read where its values are wanted on a GPU. On a CPU, where
    its elements would be read one by one for each head and row, that is a group of its own.

    Other indices that take a logarithm, relative places that are inputs say, are a group of their own, too: the buckets
    of pairs of places, in the group of the look-up, were computed for each head, and nine times over in the source.
    """
    unfused = record_unfused(mod)
    tables = set() if state.launches_cost else _functions_of_tables(mod)
    for apart in (tables, _functions_of_indices(mod)):
        if apart:
            # Grouped before all others, as if these were opaque.
            others = {
                name: func for name, func in mod.functions_items() if name not in apart and pattern_of(func) != OPAQUE
            }
            opaque = {name: func.with_attr("op_pattern", OPAQUE) for name, func in others.items()}
            mod = with_functions(relax.transform.FuseOps()(with_functions(mod, opaque)), others)
    return name_fused(define_sizes_first(relax.transform.FuseOps()(mod)), unfused, state)


def _functions_of_tables(mod: tvm.ir.IRModule) -> set[tvm.ir.GlobalVar]:
    """Return the functions that read tables along two symbolic axes or more, and those that only they read."""
    main = main_of(mod)
    readers = users_of(main)
    found: dict[relax.Var, tvm.ir.GlobalVar] = {}
    for binding in reversed(list(bindings_of(main))):
        name = called_function(binding.value)
        if name is None or pattern_of(mod[name]) > INJECTIVE:
            continue
        symbolic = sum(not isinstance(size, tirx.IntImm) for size in shape_of(binding.var) or ())
        wide = TABLE_ATTR in mod[name].attrs and symbolic > 1
        if wide or (binding.var in readers and all(one in found for one in readers[binding.var])):
            found[binding.var] = name
    return set(found.values())


def _functions_of_indices(mod: tvm.ir.IRModule) -> set[tvm.ir.GlobalVar]:
    """Return the functions that compute integers with logarithms, where those are read to make other numbers."""
    found: set[tvm.ir.GlobalVar] = set()
    # Variable -> functions that compute it, and whether one takes a logarithm.
    made: dict[relax.Var, tuple[set[tvm.ir.GlobalVar], bool]] = {}
    for binding in bindings_of(main_of(mod)):
        name = called_function(binding.value)
        if name is None:
            continue
        read = [var for var in relax.analysis.free_vars(binding.value) if var in made]
        if not _is_integer(binding.var):
            found |= {one for var in read if made[var][1] and _is_integer(var) for one in made[var][0]}
        if pattern_of(mod[name]) <= INJECTIVE:
            functions = {name}.union(*(made[var][0] for var in read))
            takes_log = "tirx.log" in call_names(mod[name].body)
            made[binding.var] = functions, takes_log or any(made[var][1] for var in read)
    return found


def _is_integer(var: relax.Var) -> bool:
    return isinstance(var.ty, relax.TensorType) and str(var.ty.dtype).startswith("int")


def define_sizes_first(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return `mod` with what reads a computed size after the match_cast that defines it.

    `FuseOps` orders groups by the tensors that they read, not by the sizes: a Range whose length is computed may come
    before its length.
    """
    main = main_of(mod)
    bindings = [binding for block in main.body.blocks for binding in block.bindings]
    definers = {var: binding for binding in bindings for var in _defined(binding)}
    if not definers:
        return mod
    blocks = [
        relax.DataflowBlock(_ordered(block.bindings, definers)) if isinstance(block, relax.DataflowBlock) else block
        for block in main.body.blocks
    ]
    body = relax.SeqExpr(blocks, main.body.body)
    return with_main(mod, relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs))


def _ordered(bindings: Iterable[relax.Binding], definers: dict[tirx.Var, relax.MatchCast]) -> list[relax.Binding]:
    """Return bindings in their order, but each after those of the tensors and sizes that it reads."""
    here = {binding.var: binding for binding in bindings}
    ordered: dict[relax.Var, relax.Binding] = {}
    waiting = list(reversed(here.values()))
    while waiting:
        binding = waiting[-1]
        sizes = [definers[var].var for var in _sizes_read(binding) if var in definers]
        needed = [var for var in (*relax.analysis.free_vars(binding.value), *sizes) if var in here]
        missing = [var for var in needed if var not in ordered and not var.same_as(binding.var)]
        if missing and binding.var not in ordered:
            waiting += [here[var] for var in reversed(missing)]
        else:
            ordered.setdefault(binding.var, binding)
            waiting.pop()
    return list(ordered.values())


def _defined(binding: relax.Binding) -> list[tirx.Var]:
    """Return the sizes that a binding defines: those of its type that what it reads does not have."""
    if not isinstance(binding, relax.MatchCast):
        return []
    known = set(relax.analysis.tir_vars_in_type(binding.value.ty))
    return [var for var in relax.analysis.definable_tir_vars_in_type(binding.ty) if var not in known]


def _sizes_read(binding: relax.Binding) -> set[tirx.Var]:
    """Return the symbolic sizes that a binding reads, in its type or as numbers that a kernel is given."""
    if isinstance(binding, relax.MatchCast):
        return set(relax.analysis.tir_vars_in_type(binding.value.ty))
    given: list[tvm.ir.Expr] = []
    for arg in getattr(binding.value, "args", ()):
        given += arg.fields if isinstance(arg, relax.Tuple) else [arg]
    read = {var for one in given if tvm.ir.is_prim_expr(one) for var in tirx.analysis.undefined_vars(one)}
    return read | set(relax.analysis.tir_vars_in_type(binding.var.ty))
