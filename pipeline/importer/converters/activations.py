"""Activations: ONNX Runtime's GELU family (domain com.microsoft), and those of ONNX that TVM lacks or converts wrongly.

Formulas: ONNX Runtime, docs/ContribOperators.md; ONNX, Operators.md (Swish, opset 24).
"""

from __future__ import annotations

import math

import tvm
from tvm import relax

from relaxtune.pipeline.importer.converter_input import ConverterInput, converts, dtype_of, scalar_like

_QUICK_GELU_ALPHA = 1.702
_SELU_ALPHA, _SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


@converts("com.microsoft.Gelu")
def convert_gelu(node: ConverterInput) -> tvm.ir.Expr:
    """Return x / 2 * (1 + erf(x / sqrt(2)))."""
    return relax.op.nn.gelu(node.input(0))


@converts("com.microsoft.BiasGelu")
def convert_bias_gelu(node: ConverterInput) -> tvm.ir.Expr:
    """Return gelu(x + bias), bias over the last axis."""
    return relax.op.nn.gelu(node.builder.emit(relax.op.add(node.input(0), node.input(1))))


@converts("com.microsoft.FastGelu")
def convert_fast_gelu(node: ConverterInput) -> tvm.ir.Expr:
    """Return the tanh form of gelu of x, plus a bias over the last axis where the node has one."""
    data, bias = node.input(0), node.optional(1)
    if bias is not None:
        data = node.builder.emit(relax.op.add(data, bias))
    cube = relax.op.multiply(relax.op.multiply(data, data), data)
    inner = relax.op.add(data, relax.op.multiply(cube, scalar_like(0.044715, data)))
    bend = relax.op.tanh(relax.op.multiply(inner, scalar_like(math.sqrt(2 / math.pi), data)))
    half = relax.op.multiply(data, scalar_like(0.5, data))
    return relax.op.multiply(half, relax.op.add(bend, scalar_like(1.0, data)))


@converts("com.microsoft.QuickGelu")
def convert_quick_gelu(node: ConverterInput) -> tvm.ir.Expr:
    """Return x * sigmoid(alpha * x)."""
    return _sigmoid_product(node, node.number("alpha", _QUICK_GELU_ALPHA))


@converts("Swish")
def convert_swish(node: ConverterInput) -> tvm.ir.Expr:
    """Return x * sigmoid(alpha * x), alpha 1 unless given."""
    return _sigmoid_product(node, node.number("alpha", 1.0))


@converts("Celu")
def convert_celu(node: ConverterInput) -> tvm.ir.Expr:
    """Return max(0, x) + min(0, alpha * (exp(x / alpha) - 1))."""
    data, alpha = node.input(0), node.number("alpha", 1.0)
    zero, one, by = (scalar_like(number, data) for number in (0.0, 1.0, alpha))
    bent = relax.op.multiply(relax.op.subtract(relax.op.exp(relax.op.divide(data, by)), one), by)
    return relax.op.add(relax.op.maximum(data, zero), relax.op.minimum(bent, zero))


@converts("Elu")
def convert_elu(node: ConverterInput) -> tvm.ir.Expr:
    """Return x where it is above 0, else alpha * (exp(x) - 1)."""
    return _elu(node.input(0), node.number("alpha", 1.0))


@converts("Selu")
def convert_selu(node: ConverterInput) -> tvm.ir.Expr:
    """Return gamma times the ELU of x; the numbers that a node leaves out are those of the ONNX standard."""
    data = node.input(0)
    bent = _elu(data, node.number("alpha", _SELU_ALPHA))
    return relax.op.multiply(bent, scalar_like(node.number("gamma", _SELU_GAMMA), data))


@converts("PRelu")
def convert_prelu(node: ConverterInput) -> tvm.ir.Expr:
    """Return x, times the slope where it is below 0; TVM has neither integers nor bfloat16, nor every slope."""
    data, slope = node.input(0), node.input(1)
    below = relax.op.less(data, scalar_like(0, data))
    return relax.op.where(below, relax.op.multiply(data, slope), data)


@converts("Shrink")
def convert_shrink(node: ConverterInput) -> tvm.ir.Expr:
    """Return x + bias below -lambd, x - bias above lambd, else 0; of integers in float64, which has their signs."""
    data, dtype = node.input(0), dtype_of(node.input(0))
    bias, edge = node.number("bias", 0.0), node.number("lambd", 0.5)
    if "int" in dtype:
        data = node.builder.emit(relax.op.astype(data, "float64"))
    low, high, by, zero = (scalar_like(number, data) for number in (-edge, edge, bias, 0.0))
    above = relax.op.where(relax.op.greater(data, high), relax.op.subtract(data, by), zero)
    shrunk = relax.op.where(relax.op.less(data, low), relax.op.add(data, by), above)
    return relax.op.astype(node.builder.emit(shrunk), dtype) if "int" in dtype else shrunk


@converts("Sign")
def convert_sign(node: ConverterInput) -> tvm.ir.Expr:
    """Return 1, 0 or -1; of an unsigned type, which has no -1, the lesser of x and 1."""
    data = node.input(0)
    unsigned = dtype_of(data).startswith("uint")
    return relax.op.minimum(data, scalar_like(1, data)) if unsigned else relax.op.sign(data)


def _elu(data: tvm.ir.Expr, alpha: float) -> tvm.ir.Expr:
    zero, one, by = (scalar_like(number, data) for number in (0.0, 1.0, alpha))
    bent = relax.op.multiply(relax.op.subtract(relax.op.exp(relax.op.minimum(data, zero)), one), by)
    return relax.op.where(relax.op.greater(data, zero), data, bent)


@converts("ThresholdedRelu")
def convert_thresholded_relu(node: ConverterInput) -> tvm.ir.Expr:
    """Return x where it is above alpha, else 0: of NaN and -inf too, which TVM's product makes NaN."""
    data = node.input(0)
    above = relax.op.greater(data, scalar_like(node.number("alpha", 1.0), data))
    return relax.op.where(above, data, scalar_like(0.0, data))


def _sigmoid_product(node: ConverterInput, alpha: float) -> tvm.ir.Expr:
    data = node.input(0)
    scaled = data if alpha == 1.0 else relax.op.multiply(data, scalar_like(alpha, data))
    return relax.op.multiply(data, relax.op.sigmoid(scaled))


def activate(node: ConverterInput, data: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return the activation that a fused operator's attribute `activation` names, of a value; without it, the value.

    Raises
    ------
    ValueError
        An activation that ONNX Runtime's fusions do not write.
    """
    name = node.attributes.get("activation", "")
    given = node.attributes.get("activation_params")
    alpha = node.number("activation_alpha", 0.01)
    numbers = [float(item) for item in given] if isinstance(given, list) else [alpha]
    match name:
        case "":
            return data
        case "Relu":
            return relax.op.nn.relu(data)
        case "Tanh":
            return relax.op.tanh(data)
        case "Sigmoid":
            return relax.op.sigmoid(data)
        case "LeakyRelu":
            return relax.op.nn.leakyrelu(data, numbers[0])
        case "Clip":
            return relax.op.clip(data, numbers[0], numbers[1])
    raise ValueError(f"attribute 'activation': expected Relu, Tanh, Sigmoid, LeakyRelu or Clip, got {name!r}")
