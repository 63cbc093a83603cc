"""Matmuls that ONNX Runtime's optimiser and quantiser write: with transposes and a factor, or with packed weights.

Formulas: ONNX Runtime, docs/ContribOperators.md.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.importer.converter_input import (
    ConverterInput,
    constant,
    constant_value,
    converts,
    dtype_of,
    scalar_like,
)
from relaxtune.pipeline.importer.converters.activations import activate


@converts("MatMul")
def convert_matmul(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return the sum of products of two vectors, which TVM's kernel cannot give; None leaves all else to TVM."""
    vectors = node.input(0), node.input(1)
    if any(int(vector.ty.ndim) != 1 for vector in vectors):
        return None
    row, column = (node.builder.emit(relax.op.expand_dims(vector, axis)) for axis, vector in enumerate(vectors))
    return relax.op.reshape(node.builder.emit(relax.op.matmul(row, column)), [])


@converts("com.microsoft.FusedMatMul")
def convert_fused_matmul(node: ConverterInput) -> tvm.ir.Expr:
    """Return alpha * op(A) @ op(B), each with its last two axes swapped where asked for."""
    for name in ("transBatchA", "transBatchB"):
        if node.integer(name, 0):
            raise ValueError(f"attribute {name!r}: expected 0, got {node.attributes[name]!r}")
    factors = []
    for index, name in enumerate(("transA", "transB")):
        factor = node.input(index)
        if node.integer(name, 0):
            rank = factor.ty.ndim
            factor = node.builder.emit(relax.op.permute_dims(factor, [*range(rank - 2), rank - 1, rank - 2]))
        factors.append(factor)
    product = relax.op.matmul(*factors)
    alpha = node.number("alpha", 1.0)
    if alpha == 1.0:
        return product
    product = node.builder.emit(product)
    return relax.op.multiply(product, scalar_like(alpha, product))


@converts("com.microsoft.FusedGemm")
def convert_fused_gemm(node: ConverterInput) -> tvm.ir.Expr:
    """Return activation(alpha * op(A) @ op(B) + beta * C). Inputs: A, B, C (optional)."""
    emit = node.builder.emit
    factors = [
        emit(relax.op.permute_dims(node.input(place))) if node.integer(name, 0) else node.input(place)
        for place, name in enumerate(("transA", "transB"))
    ]
    result = emit(relax.op.matmul(*factors))
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    if alpha != 1.0:
        result = emit(relax.op.multiply(result, scalar_like(alpha, result)))
    addend = node.optional(2)
    if addend is not None:
        scaled = addend if beta == 1.0 else emit(relax.op.multiply(addend, scalar_like(beta, addend)))
        result = emit(relax.op.add(result, scaled))
    return activate(node, result)


@converts("com.microsoft.MatMulNBits")
def convert_matmul_n_bits(node: ConverterInput) -> tvm.ir.Expr:
    """Return A @ W^T of weights packed in 2, 4 or 8 bits, unpacked here to A's dtype.

    Inputs: A (..., K), packed W (N, blocks, bytes a block) uint8, scales (N * blocks), zero points (optional: packed
    (N * bytes a row), or of A's dtype), group index (must be left out), bias (N) (optional).
    """
    if node.optional(4) is not None:
        raise ValueError("input 4 (g_idx): expected it to be left out; quantise without act_order")
    data = node.input(0)
    rows, columns = node.integer("N", 0), node.integer("K", 0)
    bits, block = node.integer("bits", 4), node.integer("block_size", 32)
    packed, scales = constant_value(node.input(1)), constant_value(node.input(2))
    if packed is None or scales is None:
        raise ValueError("inputs 1 and 2 (weights and scales): expected constants")
    zero = node.optional(3)
    zeros = constant_value(zero)
    if zero is not None and zeros is None:
        raise ValueError("input 3 (zero points): expected a constant")
    weight = unpack_weights(packed, scales, zeros, rows=rows, columns=columns, bits=bits, block=block)
    transposed = constant(np.ascontiguousarray(weight.T.astype(dtype_of(data))))
    product = relax.op.matmul(data, transposed)
    bias = node.optional(5)
    return product if bias is None else relax.op.add(node.builder.emit(product), bias)


def unpack_weights(
    packed: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, *, rows: int, columns: int, bits: int, block: int
) -> np.ndarray:
    """Return weights (rows, columns) float32 of MatMulNBits: (quantised - zero point) * scale, block by block.

    Parameters
    ----------
    packed : array
        uint8 (rows, blocks, block * bits / 8); the first number of a byte is in its low bits.
    scales : array
        rows * blocks of them.
    zeros : array or None
        Packed as the weights, each row padded to a byte, or numbers; None for 2 ** (bits - 1).
    """
    blocks = -(-columns // block)
    quantised = unpack_bits(packed.reshape(rows, blocks, -1), bits)[..., :block].astype("float32")
    if zeros is None:
        zero: np.ndarray = np.full((rows, blocks), 2.0 ** (bits - 1), "float32")
    elif zeros.dtype == np.uint8:
        zero = unpack_bits(zeros.reshape(rows, -1), bits)[:, :blocks].astype("float32")
    else:
        zero = zeros.reshape(rows, blocks).astype("float32")
    values = (quantised - zero[..., None]) * scales.reshape(rows, blocks, 1).astype("float32")
    return np.asarray(values.reshape(rows, blocks * block)[:, :columns])


def unpack_bits(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of `bits` bits in bytes; the last axis grows."""
    parts = [(packed >> (bits * index)) & (2**bits - 1) for index in range(8 // bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)
