"""Pass: the kernel of a norm quantises the rows that it has just computed, for the matmuls that read float8."""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import called_function
from relaxtune.pipeline.passes.kit.one_function import fused_calls, operands_of
from relaxtune.pipeline.passes.kit.rewrite import DONE, Done, Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.functions.float8 import QUANTISES_ROWS
from relaxtune.schedules.tir.dataflow import Dataflow, recognise_dataflow


def quantise_in_norms(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the kernels that quantise the rows of a norm as further outputs of the norm's kernel.

    ::

        y = norm(x); q, scales = quantise_rows(y)             ->    y, q, scales = norm_quantised(x)
        y = norm(x); q = quantise_columns(y, factors)         ->    y, q = norm_quantised(x, factors)

    The norm has the row in registers: quantising alone would read it again. A norm that nothing else reads is not
    written at all. Results stay as they are, bit for bit: the quantised numbers are those of the rounded y.
    """
    graph = Graph(mod)
    found = {var: norm for var in graph.values if (norm := _norm_before(var, graph)) is not None}
    if not found:
        return mod
    state.note(f"{len(found)} norms quantise their rows")
    quantised = {norm: both for both, norm in found.items()}
    results: dict[relax.Var, tuple[relax.Var, int]] = {}

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | Done | None:
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in results:
            call, first = results[value.tuple_value]
            return relax.TupleGetItem(call, first + value.index)
        if binding.var in found:
            call, first = results[binding.var]
            return relax.TupleGetItem(call, first) if isinstance(binding.var.ty, relax.TensorType) else DONE
        if binding.var not in quantised:
            return None
        both = quantised[binding.var]
        kept = [both] if graph.only_reader(binding.var) is not None else [binding.var, both]
        hint = f"{binding.value.args[0].name_hint}_quantised"
        func, types = fused_calls([binding.var, both], kept, graph, hint)
        name = new.function(func, hint)
        operands = relax.Tuple([new.of(arg) for arg in operands_of([binding.var, both], graph)])
        call = new.emit(relax.call_tir(name, operands, types))
        results[both] = call, len(kept) - 1
        return relax.TupleGetItem(call, 0) if len(kept) > 1 else DONE

    return rewrite(mod, state, rule)


def _norm_before(var: relax.Var, graph: Graph) -> relax.Var | None:
    """Return the rows of a norm that a variable has quantised."""
    name = called_function(graph.values[var])
    if name is None or QUANTISES_ROWS not in (graph.mod[name].attrs or {}):
        return None
    norm = graph.values[var].args[1].fields[0]
    call = graph.value(norm)
    if call is None or (made := called_function(call)) is None or len(call.args) != 2:
        return None
    flow = recognise_dataflow(graph.mod[made], symbolic=True)
    if not isinstance(flow, Dataflow) or not flow.reductions or len(flow.outputs) != 1:
        return None
    return None if flow.outputs[0].per_row else norm  # A matmul has an element for each sum.
