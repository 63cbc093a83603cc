"""Pass: a norm that computes in float32 reads half precision itself, without a widened copy before it."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, topi

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import HALVES, dtype_of, is_op
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState


def norms_of_half(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with `norm(astype(x, "float32"))` of a half-precision x as one kernel that widens inside.

    Graphs exported in half precision are full of it: the cast is an operation before a reduction, which `FuseOps`
    leaves a kernel of its own. Parameters and sums stay in float32 as the graph has them. On CUDA.
    """
    if not state.launches_cost:
        return mod
    graph = Graph(mod)
    found: dict[relax.Var, relax.Var] = {}
    for binding in graph.bindings:
        if not is_op(binding.value, "nn.layer_norm", "nn.rms_norm"):
            continue
        data = binding.value.args[0]
        cast = graph.value(data)
        if is_op(cast, "astype") and dtype_of(data) == "float32" and dtype_of(cast.args[0]) in HALVES:
            found[binding.var] = cast.args[0]
            state.sources[binding.var.name] = state.nodes_of([data.name, binding.var.name])

    def widen_inside(new: Rewriter, binding: relax.VarBinding, data: relax.Var) -> tvm.ir.Expr:
        value = binding.value
        args = [new.of(arg) for arg in (data, *value.args[1:])]
        return new.kernel(_float32_norm(value), *args, name=value.op.name.split(".")[-1])

    return replace_found(mod, state, found, widen_inside, "norms widen inside")


def norm_of_half(value: relax.Call) -> Callable[..., te.Tensor]:
    """Return the tensor expression of a layer or RMS norm whose operands and result are of one half-precision dtype.

    It computes in float32.
    """
    norm = _float32_norm(value)

    def compute(x: te.Tensor, *parameters: te.Tensor) -> te.Tensor:
        result = norm(x, *map(_wide, parameters))
        return te.compute(x.shape, lambda *index: result(*index).astype(x.dtype), name="rounded")

    return compute


def _float32_norm(value: relax.Call) -> Callable[..., te.Tensor]:
    make = topi.nn.layer_norm if is_op(value, "nn.layer_norm") else topi.nn.rms_norm
    axes, epsilon = [int(axis) for axis in value.attrs.axes], float(value.attrs.epsilon)

    def compute(x: te.Tensor, *parameters: te.Tensor) -> te.Tensor:
        return make(_wide(x), *parameters, [axis % len(x.shape) for axis in axes], epsilon)

    return compute


def _wide(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda *index: x(*index).astype("float32"), name="wide")
