"""Pass: norms over bfloat16 compute in float32."""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import bindings_of, dtype_of, is_op, main_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState

_DTYPE = "bfloat16"


def widen_norms(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with layer and RMS norms over bfloat16 as float32 norms between casts.

    TVM's norms take float16 and float32 alone. On a GPU `norms_of_half` takes the first cast into the norm's kernel.
    """
    count = sum(1 for binding in bindings_of(main_of(mod)) if _is_narrow(binding.value))
    if not count:
        return mod
    state.note(f"{count} norms over {_DTYPE} compute in float32")
    return rewrite(mod, state, _widened)


def _is_narrow(value: tvm.ir.Expr) -> bool:
    return is_op(value, "nn.layer_norm", "nn.rms_norm") and dtype_of(value.args[0]) == _DTYPE


def _widened(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
    value = binding.value
    if not _is_narrow(value):
        return None
    args = [new.emit(relax.op.astype(new.of(arg), "float32")) for arg in value.args]
    make = relax.op.nn.layer_norm if is_op(value, "nn.layer_norm") else relax.op.nn.rms_norm
    return relax.op.astype(new.emit(make(*args, value.attrs.axes, value.attrs.epsilon)), _DTYPE)
