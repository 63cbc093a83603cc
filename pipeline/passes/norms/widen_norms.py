"""Pass: norms that TVM's own operators cannot compute: over bfloat16 and float64, and over all axes."""

from __future__ import annotations

from typing import TypeGuard

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import bindings_of, dtype_of, is_op, main_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState

_DTYPE, _WIDE = "bfloat16", "float64"


def widen_norms(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with layer and RMS norms as TVM takes them.

    A norm over bfloat16 becomes a float32 norm between casts: TVM's take float16 and float32 alone. On a GPU
    `norms_of_half` takes the first cast into the norm's kernel. A norm over float64 becomes its steps. A norm over all
    axes gets an axis of one row in front: TVM makes no kernel without rows.
    """
    values = [binding.value for binding in bindings_of(main_of(mod))]
    narrow, wide, whole = (sum(map(test, values)) for test in (_is_narrow, _is_wide, _is_whole))
    if not narrow and not wide and not whole:
        return mod
    if narrow:
        state.note(f"{narrow} norms over {_DTYPE} compute in float32")
    return rewrite(mod, state, _widened)


def _is_norm(value: tvm.ir.Expr) -> TypeGuard[relax.Call]:
    return is_op(value, "nn.layer_norm", "nn.rms_norm")


def _is_narrow(value: tvm.ir.Expr) -> bool:
    return _is_norm(value) and dtype_of(value.args[0]) == _DTYPE


def _is_wide(value: tvm.ir.Expr) -> TypeGuard[relax.Call]:
    return _is_norm(value) and dtype_of(value.args[0]) == _WIDE


def _is_whole(value: tvm.ir.Expr) -> bool:
    return _is_norm(value) and len(value.attrs.axes) == value.args[0].ty.ndim


def _widened(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
    value = binding.value
    if _is_wide(value):
        return _in_steps(new, value)
    narrow, whole = _is_narrow(value), _is_whole(value)
    if not narrow and not whole:
        return None
    data, *parameters = (new.of(arg) for arg in value.args)
    if narrow:
        data, *parameters = (new.emit(relax.op.astype(arg, "float32")) for arg in (data, *parameters))
    if whole:
        data = new.emit(relax.op.expand_dims(data, 0))
    # Counted from the end, the axes are the same with a row axis in front.
    rank = int(value.args[0].ty.ndim)
    axes = [int(axis) % rank - rank for axis in value.attrs.axes] if whole else value.attrs.axes
    make = relax.op.nn.layer_norm if is_op(value, "nn.layer_norm") else relax.op.nn.rms_norm
    result = make(data, *parameters, axes, value.attrs.epsilon)
    if whole:
        result = relax.op.squeeze(new.emit(result), [0])
    return relax.op.astype(new.emit(result), _DTYPE) if narrow else result


def _in_steps(new: Rewriter, norm: relax.Call) -> tvm.ir.Expr:
    """Return `(x - mean(x) if centred) * rsqrt(mean(.^2) + epsilon) * gamma [+ beta]`."""
    data, gamma, *beta = (new.of(arg) for arg in norm.args)
    axes = norm.attrs.axes
    if beta:
        data = new.emit(relax.op.subtract(data, new.emit(relax.op.mean(data, axes, keepdims=True))))
    square = new.emit(relax.op.mean(new.emit(relax.op.multiply(data, data)), axes, keepdims=True))
    radicand = new.emit(relax.op.add(square, relax.const(norm.attrs.epsilon, _WIDE)))
    scaled = new.emit(relax.op.multiply(new.emit(relax.op.divide(data, new.emit(relax.op.sqrt(radicand)))), gamma))
    return relax.op.add(scaled, beta[0]) if beta else scaled
