"""Passes: precision "tf32": what float32 matmuls and convolutions read has the mantissa of tensor cores."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_op, with_functions
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.marks import TF32_ATTR
from relaxtune.schedules.search.tensor_tile import has_tensor_tiles, multiplies_float32

_CONTRACTIONS = ("matmul", "nn.conv1d", "nn.conv2d")
# Of float32's 23 bits of mantissa tf32 has the first 10.
_DROPPED = 13
_HALF = 2 ** (_DROPPED - 1) - 1
_KEPT = 2**32 - 2**_DROPPED


def round_to_tf32(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the operands of float32 matmuls and convolutions rounded to tf32, to nearest, ties to even.

    Products and sums stay in float32, so results are those of tf32 tensor cores but for the order of sums, whatever
    kernel computes them, on any target. On CUDA tensor cores may then multiply them (`mark_tf32`). Weights are rounded
    at compile time, activations by the kernel before.
    """
    policy = state.options.policy
    if policy is None or policy.activations != "tf32":
        return mod
    rounded: dict[tvm.ir.Expr, tvm.ir.Expr] = {}
    count = 0

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        nonlocal count
        value = binding.value
        if not is_op(value, *_CONTRACTIONS) or any(dtype_of(arg) != "float32" for arg in value.args):
            return None
        count += 1
        for arg in value.args:
            if arg not in rounded:
                rounded[arg] = (
                    relax.const(tf32_array(array_of(arg)), "float32")
                    if is_constant(arg)
                    else new.emit(new.kernel(_tf32, new.of(arg), name="round_to_tf32"))
                )
        return relax.Call(value.op, [rounded[arg] for arg in value.args], value.attrs, value.ty_args)

    result = rewrite(mod, state, rule)
    state.tf32 = True
    state.note(f"operands of {count} matmuls and convolutions rounded to tf32")
    return result if count else mod


def tf32_array(array: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to tf32."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + (_HALF + (bits >> _DROPPED & 1)).astype(np.uint32)) & np.uint32(_KEPT)
    return np.where(np.isnan(array), array, rounded.view(np.float32))


def _tf32(x: te.Tensor) -> te.Tensor:
    def element(*index: tirx.Var) -> tirx.Expr:
        value = x(*index)
        bits = tirx.reinterpret("uint32", value)

        def constant(number: int) -> tirx.Expr:
            return tirx.const(number, "uint32")

        up = bits + constant(_HALF) + ((bits >> constant(_DROPPED)) & constant(1))
        rounded = tirx.reinterpret("float32", up & constant(_KEPT))
        # A NaN's mantissa could be rounded up into its sign.
        return tirx.Select(tirx.isnan(value), value, rounded)

    return te.compute(x.shape, element, name="round_to_tf32")


def mark_tf32(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with an attribute on the PrimFuncs that tensor cores may multiply in tf32.

    Only after `round_to_tf32`, for CUDA targets that have tf32, and matmuls of float32 that the search has a space for:
    to be marked tells a task apart from the same one in float32, whose records must not serve it, nor its records that.
    Tensor cores read 19 bits of an operand; what the rounding pass has not seen would be truncated.
    """
    if not state.tf32 or not has_tensor_tiles(state.target):
        return mod
    marked = {
        var: func.with_attr(TF32_ATTR, True)
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and multiplies_float32(func)
    }
    state.note(f"{len(marked)} kernels may multiply in tf32")
    return with_functions(mod, marked)
