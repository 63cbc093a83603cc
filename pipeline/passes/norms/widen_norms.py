"""Pass: norms that TVM's own operators cannot compute: over bfloat16 and float64, and over all axes."""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import dtype_of, is_op
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState


def widen_norms(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with layer and RMS norms as TVM takes them.

    A norm over bfloat16 becomes a float32 norm between casts: TVM's take float16 and float32 alone. On a GPU
    `norms_of_half` takes the first cast into the norm's kernel. A norm over float64 becomes its steps. A norm over all
    axes gets an axis of one row in front: TVM makes no kernel without rows.
    """
    widened = 0

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        nonlocal widened
        value = binding.value
        if not is_op(value, "nn.layer_norm", "nn.rms_norm"):
            return None
        dtype, rank = dtype_of(value.args[0]), int(value.args[0].ty.ndim)
        if dtype == "float64":
            return _in_steps(new, value)
        narrow, whole = dtype == "bfloat16", len(value.attrs.axes) == rank
        if not narrow and not whole:
            return None
        widened += narrow
        args = [new.of(arg) for arg in value.args]
        if narrow:
            args = [new.emit(relax.op.astype(arg, "float32")) for arg in args]
        if whole:
            args[0] = new.emit(relax.op.expand_dims(args[0], 0))
        # Counted from the end, the axes are the same with a row axis in front.
        axes = [int(axis) % rank - rank for axis in value.attrs.axes] if whole else value.attrs.axes
        make = relax.op.nn.layer_norm if is_op(value, "nn.layer_norm") else relax.op.nn.rms_norm
        result = make(*args, axes, value.attrs.epsilon)
        if whole:
            result = relax.op.squeeze(new.emit(result), [0])
        return relax.op.astype(new.emit(result), dtype) if narrow else result

    result = rewrite(mod, state, rule)
    if widened:
        state.note(f"{widened} norms over bfloat16 compute in float32")
    return result


def _in_steps(new: Rewriter, norm: relax.Call) -> tvm.ir.Expr:
    """Return `(x - mean(x) if centred) * rsqrt(mean(.^2) + epsilon) * gamma [+ beta]`."""
    data, gamma, *beta = (new.of(arg) for arg in norm.args)
    axes = norm.attrs.axes
    if beta:
        data = new.emit(relax.op.subtract(data, new.emit(relax.op.mean(data, axes, keepdims=True))))
    square = new.emit(relax.op.mean(new.emit(relax.op.multiply(data, data)), axes, keepdims=True))
    radicand = new.emit(relax.op.add(square, relax.const(norm.attrs.epsilon, "float64")))
    scaled = new.emit(relax.op.multiply(new.emit(relax.op.divide(data, new.emit(relax.op.sqrt(radicand)))), gamma))
    return relax.op.add(scaled, beta[0]) if beta else scaled
