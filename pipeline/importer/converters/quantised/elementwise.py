"""Elementwise operators and softmax over 8-bit integers, of ONNX Runtime's quantiser (format QOperator).

Each is dequantise, compute in float32, quantise. ONNX Runtime computes some of them by tables or with other factors
(core/mlas/lib/qladd.cpp, qlsoftmax.cc), so that where a result lies between two integers it may take the other one.
Formulas: ONNX Runtime, docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from relaxtune.pipeline.importer.converter_input import Converter, ConverterInput, converts
from relaxtune.pipeline.importer.converters.quantised.quantise import dequantise, integer_type, quantise


def convert_binary(operator: Callable[[tvm.ir.Expr, tvm.ir.Expr], tvm.ir.Expr]) -> Converter:
    """Return the converter of an operator on A and B.

    Inputs: A, its scale and zero point, B, its scale and zero point, those of the result.
    """

    def convert(node: ConverterInput) -> tvm.ir.Expr:
        left = dequantise(node, node.input(0), node.input(1), node.optional(2))
        right = dequantise(node, node.input(3), node.input(4), node.optional(5))
        return _quantised(node, operator(left, right), 6)

    return convert


def convert_unary(function: Callable[[ConverterInput, tvm.ir.Expr], tvm.ir.Expr]) -> Converter:
    """Return the converter of a function of X. Inputs: X, its scale and zero point, those of the result."""

    def convert(node: ConverterInput) -> tvm.ir.Expr:
        data = dequantise(node, node.input(0), node.input(1), node.optional(2))
        return _quantised(node, function(node, data), 3)

    return convert


@converts("com.microsoft.QLinearConcat")
def convert_concat(node: ConverterInput) -> tvm.ir.Expr:
    """Return parts joined along an axis. Inputs: scale and zero point of the result, then three for each part."""
    parts = [
        dequantise(node, node.input(place), node.input(place + 1), node.optional(place + 2))
        for place in range(2, len(node.inputs), 3)
    ]
    joined = node.builder.emit(relax.op.concat(parts, axis=node.integer("axis", 0)))
    return quantise(node, joined, node.input(0), node.optional(1), integer_type(node, 1))


def _softmax(node: ConverterInput, data: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return softmax as of the opset the node names: over one axis from 13 on, before over all from `axis` on."""
    axis = node.integer("axis", -1)
    last = axis in (-1, int(data.ty.ndim) - 1)
    if node.integer("opset", 13) < 13 and not last:
        msg = f"attribute 'axis': expected the last of {int(data.ty.ndim)} for a softmax of opset < 13, got {axis}"
        raise ValueError(msg)
    return relax.op.nn.softmax(data, axis)


def _leaky_relu(node: ConverterInput, data: tvm.ir.Expr) -> tvm.ir.Expr:
    return relax.op.nn.leakyrelu(data, node.number("alpha", 0.01))


def _sigmoid(node: ConverterInput, data: tvm.ir.Expr) -> tvm.ir.Expr:
    del node
    return relax.op.sigmoid(data)


def _quantised(node: ConverterInput, value: tvm.ir.Expr, place: int) -> tvm.ir.Expr:
    """Return a value quantised by the scale and zero point at two places of the inputs."""
    return quantise(node, node.builder.emit(value), node.input(place), node.optional(place + 1), integer_type(node, 0))


converts("com.microsoft.QLinearAdd")(convert_binary(relax.op.add))
converts("com.microsoft.QLinearLeakyRelu")(convert_unary(_leaky_relu))
converts("com.microsoft.QLinearMul")(convert_binary(relax.op.multiply))
converts("com.microsoft.QLinearSigmoid")(convert_unary(_sigmoid))
converts("com.microsoft.QLinearSoftmax")(convert_unary(_softmax))
