"""Pass: the two matmuls of a gated activation as one, whose epilogue multiplies gates and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.passes.attention.kernel import param_shape, template_refusal
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import (
    HALVES,
    array_of,
    called_function,
    dtype_of,
    is_constant,
    is_op,
    shape_of,
    static_shape,
)
from relaxtune.pipeline.passes.kit.rewrite import OPAQUE, Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.weights.turn_weights import is_turned, stored_shape, stored_weight
from relaxtune.schedules.tir.epilogue import gate_column, value_column
from relaxtune.schedules.tir.rotated_matmul import float32_product

_GROUP = 8


_ACTIVATIONS: Mapping[str, Callable[[tirx.Expr], tirx.Expr]] = {
    "nn.silu": lambda x: x * tirx.sigmoid(x),
    "nn.gelu_tanh": lambda x: 0.5 * x * (1.0 + tirx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
}


@dataclass(frozen=True)
class _Gate:
    """`activation(data @ gate) * (data @ value)`, rounded to `dtype`, in the place of `result`."""

    result: relax.Var
    data: relax.Var
    gate: tvm.ir.Expr
    value: tvm.ir.Expr
    activation: str
    dtype: str
    path: tuple[relax.Var, ...]


def interleave_gates(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with SwiGLU's two matmuls as one over interleaved weights, where a template makes it (sm_90a).

    ::

        h = silu(x @ G) * (x @ U)   ->   p = x @ interleaved(G, U);  h[c] = silu(p[gate(c)]) * p[value(c)]

    8 columns of gates and 8 of values alternate in the weight, so that one thread has both; neither factor is
    written to memory. gelu in its tanh form (GeGLU) is taken as well. Not where weights are to be quantised.
    """
    policy = state.options.policy
    if not state.launches_cost or (policy is not None and policy.quantises):
        return mod
    graph = Graph(mod)
    found: dict[relax.Var, _Gate] = {}
    for binding in graph.bindings:
        gate = _gate(binding.var, graph, state)
        if gate is None:
            continue
        x = te.placeholder(param_shape(gate.data), gate.dtype, name="x")
        w = te.placeholder(stored_shape(gate.data, gate.gate, state, 2), gate.dtype, name="w")
        function = te.create_prim_func([x, w, _gated_matmul(gate, state)(x, w)])
        if template_refusal(function, state.target) is None:
            found[gate.result] = gate
            state.sources[gate.result.name] = state.nodes_of(var.name for var in (*gate.path, gate.result))

    def as_kernel(new: Rewriter, _binding: relax.VarBinding, gate: _Gate) -> tvm.ir.Expr:
        # Two matrices [K, N] as one [K, 2 N] that alternates 8 columns of each.
        gates, values = (array_of(one).reshape(len(array_of(one)), -1, _GROUP) for one in (gate.gate, gate.value))
        interleaved = np.ascontiguousarray(np.stack([gates, values], axis=2).reshape(len(gates), -1))
        weight = stored_weight(interleaved, dtype_of(gate.gate), gate.data, state)
        return new.kernel(_gated_matmul(gate, state), new.of(gate.data), weight, name="matmul_gated", op_pattern=OPAQUE)

    return replace_found(mod, state, found, as_kernel, "gates in the epilogues of their matmuls")


def _gate(var: relax.Var, graph: Graph, state: LoweringState) -> _Gate | None:
    value = graph.value(var)
    if is_op(value, "multiply"):
        factors = tuple(value.args)
    elif var.name in state.gate_products and value is not None and called_function(value) is not None:
        factors = tuple(value.args[1].fields)
    else:
        return None
    result = var
    if dtype_of(var) == "float32":
        reader = graph.only_reader(var)
        if reader is None or not is_op(graph.value(reader), "astype"):
            return None
        result = reader
    if dtype_of(result) not in HALVES:
        return None
    for first, second in (factors, factors[::-1]):
        activated, product = graph.behind(first, "astype"), graph.behind(second, "astype")
        inner = graph.value(activated[-1]) if activated else None
        if not product or not is_op(inner, *_ACTIVATIONS):
            continue
        name = inner.op.name.removeprefix("relax.")
        gated = graph.behind(inner.args[0], "astype")
        gate, other = (graph.value(path[-1]) if path else None for path in (gated, product))
        if is_op(gate, "matmul") and is_op(other, "matmul") and _pair(gate, other):
            path = (*gated, *activated, *product, var)
            return _Gate(result, gate.args[0], gate.args[1], other.args[1], name, dtype_of(result), path)
    return None


def _pair(gate: relax.Call, value: relax.Call) -> bool:
    """Return whether two matmuls are of one tensor by matrices of one shape, in half precision."""
    if gate.args[0] != value.args[0]:
        return False
    weights = (gate.args[1], value.args[1])
    shapes = [static_shape(weight) for weight in weights]
    data = shape_of(gate.args[0])
    if data is None or not all(is_constant(weight) for weight in weights) or shapes[0] is None:
        return False
    dtypes = {dtype_of(arg) for arg in (gate.args[0], *weights)}
    fits = len(shapes[0]) == 2 and shapes[0] == shapes[1] and shapes[0][1] % _GROUP == 0
    return fits and len(dtypes) == 1 and dtypes <= set(HALVES)


def _gated_matmul(gate: _Gate, state: LoweringState) -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    activation, turned = _ACTIVATIONS[gate.activation], is_turned(gate.data, state)

    def compute(x: te.Tensor, w: te.Tensor) -> te.Tensor:
        product = float32_product(x, w, turned=turned)

        def gated(*index: tirx.Var) -> tirx.Expr:
            *rows, column = index
            left = activation(product(*rows, gate_column(column)))
            return (left * product(*rows, value_column(column))).astype(gate.dtype)

        return te.compute((*x.shape[:-1], product.shape[-1] // 2), gated, name="gated")

    return compute
