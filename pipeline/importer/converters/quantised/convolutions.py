"""Convolutions of 8-bit integers, summed in int32: ONNX's ConvInteger and QLinearConv.

Padding is of zero points, which are zeros once the zero point is taken off. Formulas: ONNX, Operators.md.
"""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.importer.converter_input import ConverterInput, converts
from relaxtune.pipeline.importer.converters.convolutions import a_channel, convolve, shaped
from relaxtune.pipeline.importer.converters.quantised.matmuls import product_scale
from relaxtune.pipeline.importer.converters.quantised.quantise import centre, integer_type, requantise


@converts("ConvInteger")
def convert_conv_integer(node: ConverterInput) -> tvm.ir.Expr:
    """Return the convolution in int32. Inputs: x, weights, zero points of x and of the weights (optional)."""
    return _convolution(node, node.input(0), node.optional(2), node.input(1), node.optional(3))


@converts("QLinearConv")
def convert_qlinear_conv(node: ConverterInput) -> tvm.ir.Expr:
    """Return the convolution requantised.

    Inputs: x, its scale and zero point, weights, theirs, scale and zero point of the result, bias int32 (optional).
    """
    sums = _convolution(node, node.input(0), node.input(2), node.input(3), node.input(5))
    spatial = int(node.input(0).ty.ndim) - 2
    bias = node.optional(8)
    if bias is not None:
        sums = node.builder.emit(relax.op.add(sums, a_channel(node, bias, spatial)))
    scale = product_scale(node, node.input(1), a_channel(node, node.input(4), spatial), node.input(6))
    return requantise(node, sums, scale, node.input(7), integer_type(node, 7))


def _convolution(
    node: ConverterInput,
    data: tvm.ir.Expr,
    zero: tvm.ir.Expr | None,
    weight: tvm.ir.Expr,
    weight_zero: tvm.ir.Expr | None,
) -> tvm.ir.Expr:
    if weight_zero is not None:
        weight_zero = shaped(node, weight_zero, [-1, *[1] * (int(weight.ty.ndim) - 1)])
    return convolve(node, centre(node, data, zero), centre(node, weight, weight_zero), "int32")
