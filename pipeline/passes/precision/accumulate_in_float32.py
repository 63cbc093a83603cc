"""Pass: sums over half-precision numbers are kept in float32."""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import ELEMENTWISE, HALVES, bindings_of, dtype_of, is_op, main_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState

# TVM computes bfloat16 in float32 and rounds what a kernel stores. Rounding each step would hide the operations behind
# a matmul from the templates' epilogues. In float16 each step is rounded, as ONNX has it.
BFLOAT16_NOTE = "operations on bfloat16 keep float32's precision inside a kernel, which rounds what it stores"
_CONTRACTIONS = ("matmul", "nn.conv1d", "nn.conv2d")


def accumulate_in_float32(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls, convolutions, softmaxes, means and sums of half-precision tensors summed in float32.

    Operands and results keep their dtype; what they are rounded from does not. TVM's default is to add up in the
    operands' own dtype, which no peer does: it loses about a digit at K = 1024 and half of the tensor cores' use.
    """
    inexact = sum(
        dtype_of(binding.var) == "bfloat16"
        and is_op(binding.value, *ELEMENTWISE)
        and not is_op(binding.value, "astype")
        for binding in bindings_of(main_of(mod))
    )
    if inexact:
        state.note(f"{inexact} {BFLOAT16_NOTE}")
    count = 0

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        nonlocal count
        var, value, dtype = binding.var, binding.value, dtype_of(binding.var)
        if dtype not in HALVES:
            return None
        if is_op(value, *_CONTRACTIONS) and all(dtype_of(arg) == dtype for arg in value.args):
            wide = contraction_in_float32(value, [new.of(arg) for arg in value.args])
        elif is_op(value, "nn.softmax", "mean", "sum"):
            data = new.emit(relax.op.astype(new.of(value.args[0]), "float32"))
            if is_op(value, "nn.softmax"):
                wide = relax.op.nn.softmax(data, value.attrs.axis)
            else:
                reduce = relax.op.mean if is_op(value, "mean") else relax.op.sum
                wide = reduce(data, value.attrs.axis, value.attrs.keepdims)
        else:
            return None
        count += 1
        return relax.op.astype(new.extra(f"{var.name}__float32", wide, [var]), dtype)

    result = rewrite(mod, state, rule)
    if not count:
        return mod
    state.note(f"{count} operations accumulate in float32")
    return result


def contraction_in_float32(value: relax.Call, args: list[tvm.ir.Expr]) -> tvm.ir.Expr:
    """Return the same matmul or convolution with a float32 result."""
    if is_op(value, "matmul"):
        return relax.op.matmul(*args, out_dtype="float32")
    make = relax.op.nn.conv1d if is_op(value, "nn.conv1d") else relax.op.nn.conv2d
    kept = ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout")
    return make(*args, **{name: getattr(value.attrs, name) for name in kept}, out_dtype="float32")
