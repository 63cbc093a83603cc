"""Pass: positions are counted where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, is_constant, main_of, users_of
from relaxtune.pipeline.passes.kit.rewrite import INJECTIVE, Rewriter, pattern_of, rewrite
from relaxtune.pipeline.passes.kit.sizes import sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.symbolic.tables import TABLE_ATTR
from relaxtune.schedules.tir.expressions import IF_THEN_ELSE, call_names

# From the count to what is read: exporters write a cast, a sum, up to three new axes, a product and a concatenation.
_OPERATIONS_MAX = 12
# Functions that an operation may call: a concatenation chooses by one.
_CALLS = {IF_THEN_ELSE}


@dataclass(frozen=True)
class _Position:
    """A call that computes positions, or functions of them; `cheap` if it may be repeated, `operations` it takes."""

    call: relax.Call
    of_table: bool
    cheap: bool
    operations: frozenset[relax.Var]


def repeat_positions(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with a copy of positions for each elementwise operation that reads them.

    Positions are what a few operations compute of no tensor but constants, with plain arithmetic: `arange`, a size, new
    axes, sums, the angles of rotary embeddings, which keys a query sees; and readings of tables by positions
    (`tabulate_positions`), with what they compute where a table ends. Of static sizes they are constants. Of symbolic
    ones, read by the look-up of an embedding and by a mask, or by a cosine and a sine, they were a kernel of their own,
    since nothing that is read twice is fused with what reads it.
    """
    found = _positions(mod)
    readers = users_of(main_of(mod))
    shared = {var for var, one in found.items() if one.cheap and (one.of_table or len(set(readers.get(var, ()))) > 1)}
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

        def with_copies(call: relax.Call, cheap: bool) -> relax.Call:
            function, operands, *sizes = call.args
            repeated = {one for one in operands.fields if one in found and (found[one].cheap or not cheap)}
            fields = [copied(one) if one in repeated else new.of(one) for one in operands.fields]
            return relax.Call(call.op, [function, relax.Tuple(fields), *sizes], ty_args=call.ty_args)

        def copied(var: relax.Var) -> relax.Var:
            if var not in copies:
                copies[var] = new.extra(var.name, with_copies(found[var].call, cheap=False), [var])
            return copies[var]

        return with_copies(binding.value, cheap=True)

    return rewrite(mod, state, rule)


def _positions(mod: tvm.ir.IRModule) -> Mapping[relax.Var, _Position]:
    """Return the calls that compute positions, and functions of nothing else, by their variables."""
    found: dict[relax.Var, _Position] = {}
    for binding in bindings_of(main_of(mod)):
        called = called_function(binding.value)
        if called is None or sizes_of(binding.var) is None or pattern_of(mod[called]) > INJECTIVE:
            continue
        function = mod[called]
        operands = [
            one for one in binding.value.args[1].fields if not is_constant(one) and not tvm.ir.is_prim_expr(one)
        ]
        if not all(one in found for one in operands):
            continue
        # Of a table, the positions count: what is computed where it ends is not.
        of_table = TABLE_ATTR in function.attrs
        read = [found[one] for one in operands]
        operations = frozenset({binding.var}).union(*(one.operations for one in (read[:1] if of_table else read)))
        cheap = of_table or (all(one.cheap for one in read) and not call_names(function.body) - _CALLS)
        found[binding.var] = _Position(
            binding.value, of_table, cheap and len(operations) <= _OPERATIONS_MAX, operations
        )
    return found
