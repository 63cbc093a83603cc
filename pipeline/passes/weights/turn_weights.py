"""Pass: on a GPU, keep a constant matrix turned where its kernels read rows of K, or unaligned rows of N otherwise."""

from __future__ import annotations

from collections.abc import Callable, Set

import numpy as np
import tvm
from tvm import relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    bindings_of,
    dtype_of,
    emit_named,
    is_constant,
    is_op,
    main_of,
    rewrite_main,
    shape_of,
    static_shape,
)
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.targets import Feature, target_features

# TMA loads rows that start at multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled).
_ALIGNMENT = 16
_BYTES = {"float16": 2, "bfloat16": 2}
# Whose products Hopper's tensor cores make of rows of K alone.
_INTEGERS = ("int8", "uint8")


def turn_weights(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with `matmul(x, W)` of a constant W [K, N] as a kernel that reads W as [N, K].

    Of half precision only where rows of N elements start at unaligned addresses and rows of K do not: the output layer
    of a language model whose vocabulary has an odd size (GPT-2's 50257). Of 8-bit integers (precision int8) with wgmma,
    where rows of K start at aligned addresses: it takes no other 8-bit operands. The turned matrix is a constant like
    any weight.

    Other weights in half precision stay. With all of more than 64 rows turned, chains of BERT-base's kernels on an H200
    (one CUDA graph, by turns, first candidates; in brackets the best of four of each form) took 1.00 (1.00), 0.99
    (1.00), 1.03 (1.00) and 1.01 (1.00) times as long with 128, 512, 1024 and 4096 rows, Llama-1B's with 128 rows 1.01
    (1.01). Only tiles of 96 columns are faster so, and they are seldom the fastest.
    """
    main = main_of(mod)
    if state.target.kind.name != "cuda":
        return mod
    wgmma = Feature.WGMMA in target_features(state.target)
    found = {binding.var for binding in bindings_of(main) if _turns(binding.value, wgmma)}
    if not found:
        return mod
    turner = _Turn(mod, found)
    result = rewrite_main(mod, turner)
    state.note(f"{turner.count} weights turned")
    return result


def _turns(value: tvm.ir.Expr, wgmma: bool) -> bool:
    if not is_op(value, "matmul") or not is_constant(value.args[1]):
        return False
    left, right, dtype = shape_of(value.args[0]), static_shape(value.args[1]), dtype_of(value.args[1])
    if left is None or len(left) < 2 or right is None or len(right) != 2:
        return False
    rows, columns = right
    if dtype in _INTEGERS:
        return wgmma and dtype_of(value.args[0]) in _INTEGERS and rows % _ALIGNMENT == 0
    size = _BYTES.get(dtype)
    return size is not None and columns * size % _ALIGNMENT != 0 and rows * size % _ALIGNMENT == 0


@mutator
class _Turn(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.ir.IRModule, found: Set[relax.Var]) -> None:
        super().__init__(mod)
        self._found = found
        self.count = 0

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value = binding.value
        if binding.var not in self._found:
            super().visit_var_binding_(binding)
            return
        weight = np.ascontiguousarray(array_of(value.args[1]).T)
        turned = relax.const(weight, dtype_of(value.args[1]))
        compute = turned_matmul(dtype_of(binding.var))
        self.count += 1
        made = self.builder_.call_te(compute, self.visit_expr(value.args[0]), turned, primfunc_name_hint="matmul")
        emit_named(self, binding.var, made)


def turned_matmul(dtype: str) -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    """Return the tensor expression `a @ b^T` with sums in `dtype`."""

    def compute(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, a.shape[-1]), name="k")

        def element(*index: tvm.tirx.Var) -> tvm.tirx.Expr:
            *row, column = index
            return te.sum(a(*row, k).astype(dtype) * b(column, k).astype(dtype), axis=k)

        return te.compute([*a.shape[:-1], b.shape[0]], element, name="matmul")

    return compute
