"""Pass: positions are counted where they are read."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, is_constant, main_of, users_of
from relaxtune.pipeline.passes.kit.rewrite import INJECTIVE, Rewriter, pattern_of, rewrite
from relaxtune.pipeline.passes.kit.sizes import sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.symbolic.count_along_inputs import COUNT_ATTR
from relaxtune.schedules.tir.expressions import call_names

# From the count to what is read: exporters write a cast, a sum, up to three new axes, a product and a concatenation.
_OPERATIONS_MAX = 12
# What an operation may call: a concatenation chooses by it.
_CALLS = {"prim.if_then_else"}


def repeat_positions(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with a copy of positions for each elementwise operation that reads them.

    Positions are what is computed of no tensor but constants with plain arithmetic and has one symbolic axis, or none:
    `arange`, a size, new axes, sums, the angles of rotary embeddings. Of static sizes they are constants. Of symbolic
    ones, read by the look-up of an embedding and by a mask, or by a cosine and a sine, they were a kernel of their own,
    since nothing that is read twice is fused with what reads it.
    """
    found = _positions(mod)
    readers = users_of(main_of(mod))
    shared = {var for var in found if len(set(readers.get(var, ()))) > 1}
    if not shared:
        return mod
    state.note(f"positions of {len(shared)} readings are counted where they are read")

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        called = called_function(binding.value)
        if called is None or pattern_of(mod[called]) > INJECTIVE:
            return None
        if not any(one in shared for one in binding.value.args[1].fields):
            return None
        copies: dict[relax.Var, relax.Var] = {}

        def with_copies(call: relax.Call) -> relax.Call:
            function, operands, *sizes = call.args
            fields = [copied(one) if one in found else new.of(one) for one in operands.fields]
            return relax.Call(call.op, [function, relax.Tuple(fields), *sizes], ty_args=call.ty_args)

        def copied(var: relax.Var) -> relax.Var:
            if var not in copies:
                copies[var] = new.extra(var.name, with_copies(found[var]), [var])
            return copies[var]

        return with_copies(binding.value)

    return rewrite(mod, state, rule)


def _positions(mod: tvm.ir.IRModule) -> Mapping[relax.Var, relax.Call]:
    """Return the calls that compute positions, by their variables."""
    found: dict[relax.Var, relax.Call] = {}
    made_of: dict[relax.Var, frozenset[relax.Var]] = {}
    for binding in bindings_of(main_of(mod)):
        called = called_function(binding.value)
        if called is None or pattern_of(mod[called]) > INJECTIVE or call_names(mod[called].body) - _CALLS:
            continue
        fields = () if COUNT_ATTR in mod[called].attrs else binding.value.args[1].fields
        operands = [one for one in fields if not is_constant(one) and not tvm.ir.is_prim_expr(one)]
        sizes = sizes_of(binding.var)
        if sizes is None or sum(not isinstance(size, int) for size in sizes) > 1:
            continue
        operations = frozenset({binding.var}).union(*(made_of.get(one, frozenset()) for one in operands))
        if all(one in found for one in operands) and len(operations) <= _OPERATIONS_MAX:
            found[binding.var], made_of[binding.var] = binding.value, operations
    return found
