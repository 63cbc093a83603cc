"""Pass: a convolution over patches that do not overlap is a matmul over the flattened patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    bindings_of,
    emit_extra,
    emit_named,
    is_constant,
    is_op,
    main_of,
    rewrite_main,
    static_shape,
    users_of,
    values_of,
)
from relaxtune.pipeline.passes.kit.state import LoweringState

Values = Mapping[relax.Var, tvm.ir.Expr]


@dataclass(frozen=True)
class _Patches:
    """`data` (B, C, H, W) in patches of (P, Q), each a row of B x (H/P * W/Q) x F; `steps` are what it replaces."""

    data: tvm.ir.Expr
    weight: np.ndarray
    bias: np.ndarray | None
    steps: tuple[relax.Var, ...]


def patches_to_matmul(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the patch embeddings of vision transformers as matmuls.

    ::

        x (B, C, H, W) -> conv2d by (P, Q) in steps of (P, Q) [+ bias] -> reshape (B, F, h*w) -> transpose (B, h*w, F)
        x -> reshape (B, C, h, P, w, Q) -> transpose (B, h, w, C, P, Q) -> reshape (B, h*w, C*P*Q) -> matmul [+ bias]

    The matmul has templates, half precision and packed weights, the convolution has a generic schedule. One that pads,
    overlaps, is grouped, or is read in another layout is left alone.
    """
    main = main_of(mod)
    values, users = values_of(main), users_of(main)
    found: dict[relax.Var, _Patches] = {}
    for binding in bindings_of(main):
        patches = _match(binding.var, values)
        if patches is not None and all(len(users.get(step, [])) == 1 for step in patches.steps):
            found[binding.var] = patches
    if not found:
        return mod
    for var, patches in found.items():
        state.sources[var.name] = state.nodes_of([*(step.name for step in patches.steps), var.name])
    state.note(f"{len(found)} convolutions over patches became matmuls")
    return rewrite_main(mod, _Replace(found, state))


@mutator
class _Replace(PyExprMutator):  # type: ignore[misc]
    def __init__(self, found: Mapping[relax.Var, _Patches], state: LoweringState) -> None:
        super().__init__()
        self._found = found
        self._state = state

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        patches = self._found.get(binding.var)
        if patches is None:
            super().visit_var_binding_(binding)
            return
        features, channels, high, wide = patches.weight.shape
        batch, _, height, width = static_shape(patches.data) or ()
        rows, columns = height // high, width // wide
        data = self.visit_expr(patches.data)
        data = self._step(binding, "apart", relax.op.reshape(data, (batch, channels, rows, high, columns, wide)))
        data = self._step(binding, "rows", relax.op.permute_dims(data, [0, 2, 4, 1, 3, 5]))
        data = self._step(binding, "flat", relax.op.reshape(data, (batch, rows * columns, channels * high * wide)))
        weight = np.ascontiguousarray(patches.weight.reshape(features, -1).T)
        result = relax.op.matmul(data, relax.const(weight, str(weight.dtype)))
        if patches.bias is not None:
            result = self._step(binding, "matmul", result)
            result = relax.op.add(result, relax.const(patches.bias, str(patches.bias.dtype)))
        emit_named(self, binding.var, result)

    def _step(self, binding: relax.VarBinding, what: str, value: tvm.ir.Expr) -> relax.Var:
        name = f"{binding.var.name}__{what}"
        self._state.sources[name] = self._state.sources[binding.var.name]
        return emit_extra(self, name, value)


def _match(var: relax.Var, values: Values) -> _Patches | None:
    """Return the patches that `var` transposes."""
    turned = values.get(var)
    if not is_op(turned, "permute_dims") or turned.attrs.axes is None:
        return None
    flat = values.get(turned.args[0])
    if [int(axis) for axis in turned.attrs.axes] != [0, 2, 1] or not is_op(flat, "reshape"):
        return None
    steps = [turned.args[0], flat.args[0]]
    value, bias = values.get(flat.args[0]), None
    if is_op(value, "add"):
        terms = list(value.args)
        constants = [term for term in terms if is_constant(term)]
        inner = [term for term in terms if isinstance(term, relax.Var)]
        if len(constants) != 1 or len(inner) != 1:
            return None
        bias = constants[0]
        steps.append(inner[0])
        value = values.get(inner[0])
    if not is_op(value, "nn.conv2d") or not is_constant(value.args[1]):
        return None
    shape, out = static_shape(value.args[0]), static_shape(flat)
    weight = array_of(value.args[1])
    if shape is None or out is None or not _in_patches(value, shape, weight.shape):
        return None
    features = weight.shape[0]
    if out != (shape[0], features, (shape[2] // weight.shape[2]) * (shape[3] // weight.shape[3])):
        return None
    if bias is None:
        return _Patches(value.args[0], weight, None, tuple(steps))
    added = array_of(bias)
    if added.shape[-3:] != (features, 1, 1) or added.size != features:
        return None
    return _Patches(value.args[0], weight, added.reshape(features), tuple(steps))


def _in_patches(conv: relax.Call, data: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    attrs = conv.attrs
    patch = list(weight[2:])
    return (
        [int(step) for step in attrs.strides] == patch
        and not any(int(pad) for pad in attrs.padding)
        and all(int(step) == 1 for step in attrs.dilation)
        and int(attrs.groups) == 1
        and str(attrs.data_layout) == "NCHW"
        and str(attrs.kernel_layout) == "OIHW"
        and data[2] % patch[0] == 0
        and data[3] % patch[1] == 0
    )
