"""Pass: fold batch norms of known statistics into the convolutions before them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_op
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState

_CONVOLUTIONS = ("nn.conv1d", "nn.conv2d", "nn.conv3d")
# The variable of the norm, what it is a norm of, and its factor and addend of each channel.
_Folded: TypeAlias = tuple[relax.Var, tvm.ir.Expr, np.ndarray, np.ndarray]


def fold_batch_norms(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the batch norms of a CPU's float32 graph as a factor and an addend for each channel.

    ::

        batch_norm(conv(x, W) [+ bias])  ->  conv(x, W * factor) + addend

    The factor is multiplied into weights that nothing else reads.
    """
    if state.launches_cost:
        return mod
    graph = Graph(mod)
    found: dict[relax.Var, _Folded | None] = {}
    for binding in graph.bindings:
        value = binding.value
        if not isinstance(value, relax.TupleGetItem) or value.index != 0:
            continue
        folded = _match(value.tuple_value, graph)
        if folded is not None and graph.only_reader(folded[0]) == binding.var:
            found[binding.var] = folded
            state.sources[binding.var.name] = state.nodes_of((binding.var.name, folded[0].name))
    return replace_found(mod, state, found, lambda *given: _make(graph, *given), "batch norms were folded")


def _match(norm: tvm.ir.Expr, graph: Graph) -> _Folded | None:
    value = graph.value(norm)
    if not is_op(value, "nn.batch_norm") or dtype_of(value.args[0]) != "float32" or int(value.attrs.axis) != 1:
        return None
    if bool(value.attrs.training) or not all(map(is_constant, value.args[1:])):
        return None
    gamma, beta, mean, variance = (array_of(one).astype("float64") for one in value.args[1:])
    factor = (gamma if value.attrs.scale else 1.0) / np.sqrt(variance + value.attrs.epsilon)
    addend = (beta if value.attrs.center else 0.0) - mean * factor
    data = value.args[0]
    inner = graph.value(data)
    if is_op(inner, "add") and is_constant(inner.args[1]) and graph.only_reader(data) == norm:
        bias = array_of(inner.args[1])
        if bias.size == factor.size and bias.shape[1 - data.ty.ndim :] == (bias.size, *[1] * (data.ty.ndim - 2)):
            return norm, inner.args[0], factor, addend + bias.reshape(-1) * factor
    return norm, data, factor, addend


def _make(graph: Graph, new: Rewriter, binding: relax.VarBinding, folded: _Folded) -> tvm.ir.Expr:
    _, data, factor, addend = folded
    axes = int(binding.var.ty.ndim) - 2

    def step(what: str, value: tvm.ir.Expr) -> relax.Var:
        return new.extra(f"{binding.var.name}__{what}", value, [binding.var])

    convolution = graph.value(data)
    factors = factor.reshape(-1, *[1] * axes)
    if is_op(convolution, *_CONVOLUTIONS) and is_constant(convolution.args[1]) and graph.only_reader(data) is not None:
        weight = array_of(convolution.args[1]).astype("float64") * factors[:, None]
        operands = [new.of(convolution.args[0]), relax.const(weight.astype("float32"))]
        product = step("folded", relax.Call(convolution.op, operands, convolution.attrs))
    else:
        product = step("scaled", relax.op.multiply(new.of(data), relax.const(factors.astype("float32"))))
    return relax.op.add(product, relax.const(addend.astype("float32").reshape(factors.shape)))
