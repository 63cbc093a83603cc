"""Pass: a norm that computes in float32 reads half precision itself, without a widened copy before it."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.kit.ir import (
    HALVES,
    bindings_of,
    dtype_of,
    emit_named,
    is_op,
    main_of,
    rewrite_main,
    values_of,
)
from relaxtune.pipeline.passes.kit.state import LoweringState


def norms_of_half(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with `norm(astype(x, "float32"))` of a half-precision x as one kernel that widens inside.

    Graphs exported in half precision are full of it: the cast is an operation before a reduction, which `FuseOps`
    leaves a kernel of its own. Parameters and sums stay in float32 as the graph has them. On CUDA.
    """
    if not state.launches_cost:
        return mod
    main = main_of(mod)
    values = values_of(main)
    found: dict[relax.Var, relax.Var] = {}
    for binding in bindings_of(main):
        if not is_op(binding.value, "nn.layer_norm", "nn.rms_norm"):
            continue
        data = binding.value.args[0]
        cast = values.get(data) if isinstance(data, relax.Var) else None
        if is_op(cast, "astype") and dtype_of(data) == "float32" and dtype_of(cast.args[0]) in HALVES:
            found[binding.var] = cast.args[0]
            state.sources[binding.var.name] = state.nodes_of([data.name, binding.var.name])
    if not found:
        return mod
    state.note(f"{len(found)} norms widen inside")
    return rewrite_main(mod, _Replace(mod, found))


@mutator
class _Replace(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.ir.IRModule, found: dict[relax.Var, relax.Var]) -> None:
        super().__init__(mod)
        self._found = found

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._found:
            super().visit_var_binding_(binding)
            return
        value = binding.value
        compute, name = (
            (_layer_norm(value), "layer_norm") if is_op(value, "nn.layer_norm") else (_rms_norm(value), "rms_norm")
        )
        args = [self.visit_expr(arg) for arg in (self._found[binding.var], *value.args[1:])]
        emit_named(self, binding.var, self.builder_.call_te(compute, *args, primfunc_name_hint=name))


def norm_of_half(value: relax.Call) -> Callable[..., te.Tensor]:
    """Return the tensor expression of a layer or RMS norm whose operands and result are of one half-precision dtype.

    It computes in float32.
    """
    norm = _layer_norm(value) if is_op(value, "nn.layer_norm") else _rms_norm(value)

    def compute(x: te.Tensor, *parameters: te.Tensor) -> te.Tensor:
        result = norm(x, *map(_wide, parameters))
        return te.compute(x.shape, lambda *index: result(*index).astype(x.dtype), name="rounded")

    return compute


def _layer_norm(value: relax.Call) -> Callable[..., te.Tensor]:
    axes, epsilon = [int(axis) for axis in value.attrs.axes], float(value.attrs.epsilon)

    def layer_norm(x: te.Tensor, gamma: te.Tensor, beta: te.Tensor) -> te.Tensor:
        return topi.nn.layer_norm(_wide(x), gamma, beta, [axis % len(x.shape) for axis in axes], epsilon)

    return layer_norm


def _rms_norm(value: relax.Call) -> Callable[..., te.Tensor]:
    axes, epsilon = [int(axis) for axis in value.attrs.axes], float(value.attrs.epsilon)

    def rms_norm(x: te.Tensor, gamma: te.Tensor) -> te.Tensor:
        return topi.nn.rms_norm(_wide(x), gamma, [axis % len(x.shape) for axis in axes], epsilon)

    return rms_norm


def _wide(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda *index: x(*index).astype("float32"), name="wide")
