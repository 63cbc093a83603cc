"""Pass: on a GPU, keep a constant matrix turned where its kernels read rows of K, or unaligned rows of N otherwise."""

from __future__ import annotations

from collections.abc import Callable, Set as AbstractSet

import numpy as np
import tvm
from tvm import relax, te

from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    bindings_of,
    constant_of,
    dtype_of,
    main_of,
    multiplies_by_matrix,
    row_count,
    shape_of,
    static_shape,
)
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.targets import Feature, target_features
from relaxtune.schedules.templates.gemv.plan import makes_few_rows

# Elements of a load of 16 bytes.
_LOADED = 8


def is_turned(data: tvm.ir.Expr, state: LoweringState) -> bool:
    """Whether a constant that `data` is multiplied by is kept turned: for few rows, if its rows of K can be loaded."""
    length = (shape_of(data) or [None])[-1]
    aligned = isinstance(length, tvm.tirx.IntImm) and int(length) % _LOADED == 0
    return aligned and makes_few_rows(row_count(data), target_features(state.target))


def stored_shape(data: tvm.ir.Expr, weight: tvm.ir.Expr, state: LoweringState, times: int = 1) -> tuple[int, ...]:
    """Return the shape in which a constant [K, N] is kept, `times` as many columns of it."""
    rows, columns = static_shape(weight) or (0, 0)
    return (times * columns, rows) if is_turned(data, state) else (rows, times * columns)


def stored_weight(matrix: np.ndarray, dtype: str, data: tvm.ir.Expr, state: LoweringState) -> tvm.ir.Expr:
    """Return the constant as which a matrix [K, N] that `data` is multiplied by is kept."""
    return relax.const(np.ascontiguousarray(matrix.T) if is_turned(data, state) else matrix, dtype)


# TMA loads rows that start at multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled).
_ALIGNMENT = 16
_BYTES = {"float16": 2, "bfloat16": 2}
# Whose products tensor cores make of rows of K alone.
_INTEGERS = ("int8", "uint8")


def turn_weights(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with `matmul(x, W)` of a constant W [K, N] as a kernel that reads W as [N, K].

    Of half precision where rows of N elements start at unaligned addresses and rows of K do not: the output layer of a
    language model whose vocabulary has an odd size (GPT-2's 50257). And where the template for few rows takes the place
    of one for many that multiplies by mma.sync: a token in decoding. Of 8-bit integers (precision int8) for tensor
    cores, where rows of K start at aligned addresses: they take no other 8-bit operands. The turned matrix is a
    constant like any weight.

    Other weights in half precision stay. Turned, the kernels of BERT-base and Llama-1B take as long on an H200: only
    tiles of 96 columns are faster so, and they are seldom the fastest.
    """
    if state.target.kind.name != "cuda":
        return mod
    features = target_features(state.target)
    found = {binding.var: binding.value for binding in bindings_of(main_of(mod)) if _turns(binding.value, features)}

    def turned(new: Rewriter, binding: relax.VarBinding, matmul: relax.Call) -> tvm.ir.Expr:
        data, weight = matmul.args
        rows = constant_of(np.ascontiguousarray(array_of(weight).T))
        return new.kernel(turned_matmul(dtype_of(binding.var)), new.of(data), rows, name="matmul")

    return replace_found(mod, state, found, turned, "weights turned")


def _turns(value: tvm.ir.Expr, features: AbstractSet[Feature]) -> bool:
    if not multiplies_by_matrix(value):
        return False
    (rows, columns), dtype = static_shape(value.args[1]) or (0, 0), dtype_of(value.args[1])
    if dtype in _INTEGERS:
        return Feature.MMA in features and dtype_of(value.args[0]) in _INTEGERS and rows % _ALIGNMENT == 0
    size = _BYTES.get(dtype)
    if size is None or rows * size % _ALIGNMENT:
        return False
    return columns * size % _ALIGNMENT != 0 or (
        dtype_of(value.args[0]) == dtype and makes_few_rows(row_count(value.args[0]), features)
    )


def turned_matmul(dtype: str) -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    """Return the tensor expression `a @ b^T` with sums in `dtype`."""

    def compute(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, a.shape[-1]), name="k")

        def element(*index: tvm.tirx.Var) -> tvm.tirx.Expr:
            *row, column = index
            return te.sum(a(*row, k).astype(dtype) * b(column, k).astype(dtype), axis=k)

        return te.compute([*a.shape[:-1], b.shape[0]], element, name="matmul")

    return compute
