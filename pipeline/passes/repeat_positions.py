"""Pass: positions are counted where they are read."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of, users_of
from relaxtune.pipeline.passes.kit.rewrite import INJECTIVE, Rewriter, rewrite
from relaxtune.pipeline.passes.kit.sizes import sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.expressions import call_names

# Operations from the count to what is read: exporters write a cast, a sum and up to three new axes.
_OPERATIONS_MAX = 8


def repeat_positions(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with a copy of positions for each elementwise operation that reads them.

    Positions are a vector that is computed of no tensor with plain arithmetic: `arange`, new axes, sums. Of static
    sizes they are constants. Of symbolic ones, read by the look-up of an embedding and by a mask, they were a kernel of
    their own, since nothing that is read twice is fused with what reads it.
    """
    found = _positions(mod)
    readers = users_of(main_of(mod))
    shared = {var for var in found if len(readers.get(var, ())) > 1}
    if not shared:
        return mod
    state.note(f"positions of {len(shared)} readings are counted where they are read")

    def copied(new: Rewriter, var: relax.Var) -> relax.Var:
        called, operands, *rest = found[var].args
        inner = [copied(new, one) for one in operands.fields]
        call = relax.Call(found[var].op, [called, relax.Tuple(inner), *rest], ty_args=found[var].ty_args)
        return new.extra(var.name, call, [var])

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        called = called_function(binding.value)
        if called is None or not _is_elementwise(mod[called]):
            return None
        called, operands, *rest = binding.value.args
        if not any(one in shared for one in operands.fields):
            return None
        fields = [copied(new, one) if one in shared else new.of(one) for one in operands.fields]
        rest = [new.of(one) for one in rest]
        return relax.Call(binding.value.op, [called, relax.Tuple(fields), *rest], ty_args=binding.value.ty_args)

    return rewrite(mod, state, rule)


def _positions(mod: tvm.ir.IRModule) -> Mapping[relax.Var, relax.Call]:
    """Return the calls that compute positions, by their variables."""
    found: dict[relax.Var, relax.Call] = {}
    operations: dict[relax.Var, int] = {}
    for binding in bindings_of(main_of(mod)):
        called = called_function(binding.value)
        if called is None or not _is_elementwise(mod[called]) or call_names(mod[called].body):
            continue
        if sum(size != 1 for size in sizes_of(binding.var) or ()) > 1:
            continue
        operands = binding.value.args[1].fields
        count = 1 + sum(operations.get(one, _OPERATIONS_MAX) for one in operands)
        if count <= _OPERATIONS_MAX:
            found[binding.var], operations[binding.var] = binding.value, count
    return found


def _is_elementwise(func: tvm.ir.BaseFunc) -> bool:
    pattern = func.attrs.get("op_pattern") if isinstance(func, tirx.PrimFunc) and func.attrs else None
    return pattern is not None and int(pattern) <= INJECTIVE
