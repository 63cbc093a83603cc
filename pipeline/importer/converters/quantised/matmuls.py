"""Matmuls of 8-bit integers, summed in int32: ONNX's MatMulInteger and QLinearMatMul, and ONNX Runtime's own.

Formulas: ONNX, Operators.md; ONNX Runtime, docs/ContribOperators.md. The sums are exact; what follows them is computed
in float32 in ONNX Runtime's order.
"""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm import relax

from relaxtune.pipeline.importer.converter_input import ConverterInput, constant, constant_value, converts, sizes_of
from relaxtune.pipeline.importer.converters.attention.contrib import convert_packed_attention
from relaxtune.pipeline.importer.converters.quantised.quantise import (
    centre,
    dequantise,
    integer_type,
    quantise_dynamically,
    requantise,
)


@converts("MatMulInteger")
def convert_matmul_integer(node: ConverterInput) -> tvm.ir.Expr:
    """Return (A - a zero point) @ (B - b zero point) in int32; zero points (optional) one number, or one a row of A."""
    return _product(node, node.input(0), node.optional(2), node.input(1), node.optional(3))


@converts("QLinearMatMul")
def convert_qlinear_matmul(node: ConverterInput) -> tvm.ir.Expr:
    """Return A @ B requantised.

    Inputs: A, its scale and zero point, B, its scale and zero point, those of the result.
    """
    sums = _product(node, node.input(0), node.input(2), node.input(3), node.input(5))
    scale = product_scale(node, rows(node, node.input(1)), node.input(4), node.input(6))
    return requantise(node, sums, scale, node.input(7), integer_type(node, 7))


@converts("com.microsoft.MatMulIntegerToFloat")
def convert_matmul_integer_to_float(node: ConverterInput) -> tvm.ir.Expr:
    """Return A @ B of integers as numbers: inputs A, B, their scales, their zero points and a bias (each optional)."""
    sums = _product(node, node.input(0), node.optional(4), node.input(1), node.optional(5))
    scale = product_scale(node, rows(node, node.input(2)), node.input(3))
    return _scaled(node, sums, scale, node.optional(6))


@converts("com.microsoft.DynamicQuantizeMatMul")
def convert_dynamic_quantize_matmul(node: ConverterInput) -> tvm.ir.Expr:
    """Return A @ B of an A quantised here. Inputs: A float32, B, its scale, its zero point and a bias (optional)."""
    data, scale_a, zero_a = quantise_dynamically(node, node.input(0))
    sums = _product(node, data, zero_a, node.input(1), node.optional(3))
    scale = product_scale(node, scale_a, node.input(2))
    return _scaled(node, sums, scale, node.optional(4))


@converts("com.microsoft.QGemm")
def convert_qgemm(node: ConverterInput) -> tvm.ir.Expr:
    """Return alpha * op(A) @ op(B) + C requantised, or as numbers where the result has no scale; C is int32.

    Inputs: A, its scale and zero point, B, its scale and zero point, C (optional), the result's scale and zero point
    (optional).
    """
    emit = node.builder.emit
    factors = []
    for place, name in ((0, "transA"), (3, "transB")):
        turned = node.integer(name, 0)
        factors.append(emit(relax.op.permute_dims(node.input(place))) if turned else node.input(place))
    sums = _product(node, factors[0], node.input(2), factors[1], node.input(5))
    if node.optional(6) is not None:
        sums = emit(relax.op.add(sums, node.input(6)))
    alpha = relax.const(node.number("alpha", 1.0), "float32")
    scale_a = product_scale(node, alpha, node.input(1))
    result = node.optional(7)
    if result is None:
        return _scaled(node, sums, product_scale(node, scale_a, node.input(4)), None)
    return requantise(
        node, sums, product_scale(node, scale_a, node.input(4), result), node.optional(8), integer_type(node, 8)
    )


@converts("com.microsoft.QAttention")
def convert_qattention(node: ConverterInput) -> tvm.ir.Expr:
    """Convert com.microsoft QAttention: Attention over integers.

    Inputs: x, weights, bias float32, the scales of x and weights, mask, zero points of x and weights, past.
    """
    data = dequantise(node, node.input(0), node.input(3), node.optional(6))
    weights = dequantise(node, node.input(1), node.input(4), node.optional(7))
    inputs = (data, weights, node.input(2), node.optional(5), node.optional(8))
    return convert_packed_attention(replace(node, inputs=inputs, element_types=()))


def product_scale(
    node: ConverterInput, a: tvm.ir.Expr, b: tvm.ir.Expr, result: tvm.ir.Expr | None = None
) -> tvm.ir.Expr:
    """Return a * b / result of scales in float32, computed now where they are constants."""
    first, second, third = map(constant_value, (a, b, result))
    if first is not None and second is not None and (result is None or third is not None):
        product = first.astype("float32") * second.astype("float32")
        return constant(product if third is None else product / third.astype("float32"))
    emit = node.builder.emit
    factor_a, factor_b = (emit(relax.op.astype(scale, "float32")) for scale in (a, b))
    factor = emit(relax.op.multiply(factor_a, factor_b))
    return factor if result is None else emit(relax.op.divide(factor, emit(relax.op.astype(result, "float32"))))


def rows(node: ConverterInput, values: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return values, one a row of a matrix, as a column that broadcasts; one number stays one."""
    if values.ty.ndim == 1 and not _single(values):
        return node.builder.emit(relax.op.expand_dims(values, 1))
    return values


def _product(
    node: ConverterInput, a: tvm.ir.Expr, zero_a: tvm.ir.Expr | None, b: tvm.ir.Expr, zero_b: tvm.ir.Expr | None
) -> tvm.ir.Expr:
    left = centre(node, a, None if zero_a is None else rows(node, zero_a))
    right = centre(node, b, zero_b)
    return node.builder.emit(relax.op.matmul(left, right, out_dtype="int32"))


def _scaled(node: ConverterInput, sums: tvm.ir.Expr, scale: tvm.ir.Expr, bias: tvm.ir.Expr | None) -> tvm.ir.Expr:
    emit = node.builder.emit
    product = emit(relax.op.multiply(emit(relax.op.astype(sums, "float32")), scale))
    return product if bias is None else emit(relax.op.add(product, bias))


def _single(values: tvm.ir.Expr) -> bool:
    sizes = sizes_of(values)
    return len(sizes) == 0 or (len(sizes) == 1 and isinstance(sizes[0], tvm.tirx.IntImm) and int(sizes[0]) == 1)
