"""`fused_calls`: one PrimFunc of several calls of kernels, by TVM's own `FuseTIR`."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import called_function


def operands_of(calls: Sequence[relax.Var], graph: Graph) -> list[tvm.ir.Expr]:
    """Return what calls of kernels read that none of them makes, in order."""
    return [arg for var in calls for arg in graph.values[var].args[1].fields if arg not in calls]


def fused_calls(
    calls: Sequence[relax.Var], kept: Sequence[relax.Var], graph: Graph, name: str
) -> tuple[tirx.PrimFunc, list[tvm.ir.Type]]:
    """Return one function of the blocks of several calls, and the types of its results.

    `calls`: variables bound to `call_tir` without sizes beside their tensors, each after those that it reads. `kept`:
    those whose results are results of the function, in order; the results of a tuple side by side.
    The function's parameters are `operands_of` the calls, then the results.
    """
    operands = operands_of(calls, graph)
    inner, outer = ([relax.Var(f"operand{number}", arg.ty) for number, arg in enumerate(operands)] for _ in range(2))
    functions = {name: graph.mod[name] for name in (called_function(graph.values[var]) for var in calls)}
    builder = relax.BlockBuilder(tvm.IRModule(functions))
    with builder.function(name, inner, attrs={"Primitive": True}, private=True):
        with builder.dataflow():
            waiting, made = iter(inner), dict[tvm.ir.Expr, relax.Var]()
            for var in calls:
                value = graph.values[var]
                args = [made[arg] if arg in made else next(waiting) for arg in value.args[1].fields]
                made[var] = builder.emit(
                    relax.Call(value.op, [value.args[0], relax.Tuple(args)], ty_args=value.ty_args)
                )
            parts = [part for var in kept for part in _parts(made[var])]
            results = [builder.emit_output(part) for part in parts]
        function = builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
    with builder.function("main", outer):
        with builder.dataflow():
            result = builder.emit_output(relax.Call(function, outer))
        builder.emit_func_output(result)
    return relax.transform.FuseTIR()(builder.get())[name], [result.ty for result in results]


def _parts(var: relax.Var) -> list[tvm.ir.Expr]:
    if isinstance(var.ty, relax.TupleType):
        return [relax.TupleGetItem(var, index) for index in range(len(var.ty.fields))]
    return [var]
