"""Pass: precisions of 16-bit activations: matmuls in half precision, sums and normalisations in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, te
from tvm.relax.expr_functor import mutator

from relaxtune.models.onnx_model import aligned_bytes
from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, constant_of, dtype_of, is_constant, is_op, same_shape
from relaxtune.pipeline.passes.kit.rewrite import DONE, Done, Rewriter, written_by
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.norms.norms_of_half import norm_of_half
from relaxtune.pipeline.passes.precision.accumulate_in_float32 import contraction_in_float32

_CONTRACTIONS = ("matmul", "nn.conv1d", "nn.conv2d")
# Rounding goes through these unchanged, so it is done before them, where it joins the kernel of the producer.
_VIEWS: Mapping[str, Callable[[relax.Call, tvm.ir.Expr], tvm.ir.Expr]] = {
    "reshape": lambda call, data: relax.op.reshape(data, call.args[1]),
    "permute_dims": lambda call, data: relax.op.permute_dims(data, call.attrs.axes),
    "expand_dims": lambda call, data: relax.op.expand_dims(data, call.attrs.axis),
    "squeeze": lambda call, data: relax.op.squeeze(data, call.attrs.axis),
    "broadcast_to": lambda call, data: relax.op.broadcast_to(data, call.args[1]),
}
_ACTIVATIONS = ("nn.silu", "nn.gelu", "nn.gelu_tanh", "nn.relu", "sigmoid", "tanh")


def compute_in_half_precision(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with float32 matmuls and convolutions taking 16-bit operands and giving float32 results.

    In float16 for the policies "fp16", "w8a16" and "w4a16", in bfloat16 for "bf16". Operands of matmuls are rounded
    once, where it is produced: weights in the constants themselves, activations at the end of the kernel before. A
    layer or RMS norm that a matmul reads takes and gives 16 bits too, as does the residual stream before it, and
    computes in float32 inside; the factors of a gated activation are stored in 16 bits. Softmax (its scores included: a
    mask's float32 minimum is -inf in float16) and every elementwise operation stay in float32. Inputs and outputs of
    `main` keep their dtypes. A weight beyond the range of the dtype keeps its matmul in float32, with a note.

    Activations are not clipped: one beyond 65504 becomes infinite in float16 and validation fails; bfloat16 has
    float32's range.
    """
    policy = state.options.policy
    if policy is None or policy.half is None:
        return mod
    rewriter = _Half(mod, state, policy.half)
    result = written_by(mod, rewriter)
    state.note(
        f"{rewriter.count} matmuls and convolutions in {policy.half}" if rewriter.count else "no float32 matmul found"
    )
    return result if rewriter.count else mod


def _exceeds(array: np.ndarray, limit: float) -> bool:
    """Return whether a number beyond a limit is in an array."""
    return bool(array.max(initial=0.0) > limit or array.min(initial=0.0) < -limit)


@mutator
class _Half(Rewriter):
    def __init__(self, mod: tvm.ir.IRModule, state: LoweringState, dtype: str) -> None:
        super().__init__(mod, state)
        self._dtype = dtype
        self._graph = Graph(mod)
        self._gates = self._find_gates()
        self._halves: dict[tvm.ir.Expr, tvm.ir.Expr] = {}
        self._stored: dict[relax.Var, tvm.ir.Expr] = {}
        self.count = 0

    def rule(self, binding: relax.VarBinding) -> tvm.ir.Expr | Done | None:
        var, value = binding.var, binding.value

        def wide_product(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            return te.compute(a.shape, lambda *i: a(*i).astype("float32") * b(*i).astype("float32"), name="multiply")

        if self._is_float32_contraction(value):
            self.count += 1
            return contraction_in_float32(value, [self._half(arg) for arg in value.args])
        if var in self._gates:
            # One operator on rounded factors: a widening apart would join the kernel that makes a factor.
            self.state.gate_products.add(var.name)
            return self.kernel(wide_product, *map(self._half, value.args), name="multiply")
        if self._is_half_norm(var):
            # One kernel that widens inside, and reads and writes half precision; TVM's norms refuse bfloat16.
            args = [self._half(arg) for arg in value.args]
            if self._dtype == "bfloat16":
                half = self.kernel(norm_of_half(value), *args, name=value.op.name.split(".")[-1])
            else:
                half = relax.Call(value.op, args, value.attrs)
            self._stored[var] = self._halves[var] = self._bind_half(var, half)
            return DONE
        if self._is_residual_stream(var, value):
            self.keep(binding)
            self._stored[var] = self._half(var)
            return DONE
        return None

    def visit_var_(self, op: relax.Var) -> tvm.ir.Expr:
        return self._widened(op, super().visit_var_(op))

    def visit_dataflow_var_(self, op: relax.Var) -> tvm.ir.Expr:
        return self._widened(op, super().visit_dataflow_var_(op))

    def _widened(self, op: relax.Var, new: tvm.ir.Expr) -> tvm.ir.Expr:
        """Return what a float32 reader of `op` reads: a fresh widening of it where it is stored rounded.

        One widening for each reader fuses into the reader; a shared one would be a kernel of its own.
        """
        half = self._stored.get(op)
        return new if half is None else self.emit(relax.op.astype(half, "float32"))

    def _half(self, expr: tvm.ir.Expr) -> tvm.ir.Expr:
        """Return `expr`, of the old function, rounded to half precision."""
        if expr in self._halves:
            return self._halves[expr]
        value = self._graph.value(expr)
        if is_constant(expr):
            array, dtype = array_of(expr), numpy_dtype(self._dtype)
            rounded = aligned_bytes(array.size * dtype.itemsize).view(dtype).reshape(array.shape)
            np.copyto(rounded, array, casting="unsafe")
            half: tvm.ir.Expr = constant_of(rounded)
        elif is_op(value, *_VIEWS):
            half = self._bind_half(expr, _VIEWS[value.op.name.removeprefix("relax.")](value, self._half(value.args[0])))
        elif is_op(value, "where") and self._guards_contraction(value):
            # Attention's result, say, is then rounded where it is made.
            chosen = [self._half(arg) for arg in value.args[1:]]
            half = self._bind_half(expr, relax.op.where(self.of(value.args[0]), *chosen))
        elif is_op(value, "take", "gather_nd") and isinstance(value.args[0], relax.Var):
            rows, attrs = [self._half(value.args[0]), self.of(value.args[1])], value.attrs
            half = self._bind_half(expr, relax.Call(value.op, rows, attrs))
        elif is_op(value, "astype") and dtype_of(value.args[0]) == self._dtype:
            half = self.of(value.args[0])
        else:
            half = self.emit(relax.op.astype(self.of(expr), self._dtype))
        self._halves[expr] = half
        return half

    def _guards_contraction(self, where: relax.Call) -> bool:
        """Return whether one side is a number and the other what a contraction gives."""
        others = [arg for arg in where.args[1:] if not is_constant(arg)]
        return len(others) == 1 and is_op(self._graph.value(self._graph.behind(others[0], *_VIEWS)[-1]), *_CONTRACTIONS)

    def _bind_half(self, var: relax.Var, half: tvm.ir.Expr) -> relax.Var:
        return self.extra(f"{var.name}__half", half, [var])

    def _is_float32_contraction(self, value: tvm.ir.Expr) -> bool:
        if not is_op(value, *_CONTRACTIONS) or any(dtype_of(arg) != "float32" for arg in value.args):
            return False
        for arg in value.args:
            limit = float(ml_dtypes.finfo(self._dtype).max)
            if is_constant(arg) and _exceeds(array_of(arg), limit):
                self.state.note(f"a matmul stays in float32: its weight {arg.ty} exceeds the range of {self._dtype}")
                return False
        return True

    def _is_half_norm(self, var: relax.Var) -> bool:
        """Return whether `var` is a float32 norm that a matmul reads and that is not a result of `main` itself."""
        readers = self._graph.readers(var)
        if not is_op(self._graph.value(var), "nn.layer_norm", "nn.rms_norm") or dtype_of(var) != "float32":
            return False
        return all(reader != var for reader in readers) and any(map(self._leads_to_contraction, readers))

    def _is_residual_stream(self, var: relax.Var, value: tvm.ir.Expr) -> bool:
        """Return whether `var` is a float32 sum, or rows of a table, that a half-precision norm reads.

        Other readers are to read the same rounded tensor, so that it is written once.
        """
        readers = self._graph.readers(var)
        if not is_op(value, "add", "take") or dtype_of(var) != "float32" or any(reader == var for reader in readers):
            return False
        return any(map(self._is_half_norm, readers))

    def _find_gates(self) -> set[relax.Var]:
        """Return the float32 products of two matmuls' results that a matmul reads (SwiGLU: silu(a) * b).

        One of the factors is written by its matmul and read by the other's.
        """
        found: set[relax.Var] = set()
        for binding in self._graph.bindings:
            value = binding.value
            if not is_op(value, "multiply") or dtype_of(binding.var) != "float32":
                continue
            if not all(isinstance(arg, relax.Var) and same_shape(arg, binding.var) for arg in value.args):
                continue
            roots = {self._contraction_behind(arg) for arg in value.args}
            read = any(self._leads_to_contraction(reader) for reader in self._graph.readers(binding.var))
            if len(roots) == 2 and None not in roots and read:
                found.add(binding.var)
        return found

    def _contraction_behind(self, expr: tvm.ir.Expr) -> relax.Var | None:
        """Return the contraction that an expression is made of elementwise, with constants at most."""
        for _ in range(8):
            value = self._graph.value(expr)
            if is_op(value, *_CONTRACTIONS):
                return expr
            if not is_op(value, *_ACTIVATIONS, *_VIEWS) and not is_op(value, "add", "multiply"):
                return None
            operands = [arg for arg in value.args if isinstance(arg, relax.Var)]
            if len(operands) != 1:
                return None
            expr = operands[0]
        return None

    def _leads_to_contraction(self, var: relax.Var) -> bool:
        value = self._graph.value(var)
        if is_op(value, *_VIEWS):
            return any(self._leads_to_contraction(reader) for reader in self._graph.readers(var) if reader != var)
        return is_op(value, *_CONTRACTIONS)
