"""Pass: sums over half-precision numbers are kept in float32."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.kit.ir import HALVES, dtype_of, emit_extra, emit_named, is_op, rewrite_main
from relaxtune.pipeline.passes.kit.state import LoweringState

_CONTRACTIONS = ("matmul", "nn.conv1d", "nn.conv2d")


def accumulate_in_float32(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls, convolutions, softmaxes, means and sums of half-precision tensors summed in float32.

    Operands and results keep their dtype; what they are rounded from does not. TVM's default is to add up in the
    operands' own dtype, which no peer does: it loses about a digit at K = 1024 and half of the tensor cores' use.
    """
    rewriter = _Accumulate(state)
    result = rewrite_main(mod, rewriter)
    if rewriter.count:
        state.note(f"{rewriter.count} operations accumulate in float32")
        return result
    return mod


@mutator
class _Accumulate(PyExprMutator):  # type: ignore[misc]
    def __init__(self, state: LoweringState) -> None:
        super().__init__()
        self._sources = state.sources
        self.count = 0

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value = binding.value
        dtype = dtype_of(binding.var)
        wide: tvm.ir.Expr | None = None
        if dtype in HALVES and is_op(value, *_CONTRACTIONS) and all(dtype_of(arg) == dtype for arg in value.args):
            wide = contraction_in_float32(value, [self.visit_expr(arg) for arg in value.args])
        elif dtype in HALVES and is_op(value, "nn.softmax"):
            wide = relax.op.nn.softmax(self._widened(value.args[0]), value.attrs.axis)
        elif dtype in HALVES and is_op(value, "mean", "sum"):
            reduce = relax.op.mean if is_op(value, "mean") else relax.op.sum
            wide = reduce(self._widened(value.args[0]), value.attrs.axis, value.attrs.keepdims)
        if wide is None:
            super().visit_var_binding_(binding)
            return
        self.count += 1
        name = f"{binding.var.name}__float32"
        self._sources[name] = self._sources.get(binding.var.name, ())
        emit_named(self, binding.var, relax.op.astype(emit_extra(self, name, wide), dtype))

    def _widened(self, arg: tvm.ir.Expr) -> relax.Var:
        widened: relax.Var = self.builder_.emit(relax.op.astype(self.visit_expr(arg), "float32"))
        return widened


def contraction_in_float32(value: relax.Call, args: list[tvm.ir.Expr]) -> tvm.ir.Expr:
    """Return the same matmul or convolution with a float32 result."""
    attrs = value.attrs
    if is_op(value, "matmul"):
        return relax.op.matmul(*args, out_dtype="float32")
    make = relax.op.nn.conv1d if is_op(value, "nn.conv1d") else relax.op.nn.conv2d
    return make(
        *args,
        strides=attrs.strides,
        padding=attrs.padding,
        dilation=attrs.dilation,
        groups=attrs.groups,
        data_layout=attrs.data_layout,
        kernel_layout=attrs.kernel_layout,
        out_layout=attrs.out_layout,
        out_dtype="float32",
    )
