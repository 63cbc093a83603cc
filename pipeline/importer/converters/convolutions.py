"""Convolutions with something else in one node, ONNX Runtime's FusedConv; padding that follows from symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.frontend.onnx import onnx_frontend

from relaxtune.pipeline.importer.converter_input import (
    Converter,
    ConverterInput,
    constant,
    constant_value,
    converts,
    has_known_sizes,
    sizes_of,
    static_size,
)
from relaxtune.pipeline.importer.converters.activations import activate
from relaxtune.schedules.sizes import simplify

_CONVOLUTIONS: Mapping[int, Callable[..., tvm.ir.Expr]] = {
    1: relax.op.nn.conv1d,
    2: relax.op.nn.conv2d,
    3: relax.op.nn.conv3d,
}


@converts("com.microsoft.FusedConv")
def convert_fused_conv(node: ConverterInput) -> tvm.ir.Expr:
    """Return activation(conv(x, weights) + bias + z). Inputs: x, weights, bias (optional), z (optional)."""
    emit, data = node.builder.emit, node.input(0)
    result = convolve(node, data, node.input(1))
    bias, addend = node.optional(2), node.optional(3)
    if bias is not None:
        result = emit(relax.op.add(result, a_channel(node, bias, int(data.ty.ndim) - 2)))
    if addend is not None:
        result = emit(relax.op.add(result, addend))
    return activate(node, result)


def convolve(node: ConverterInput, data: tvm.ir.Expr, weight: tvm.ir.Expr, out_dtype: str = "") -> tvm.ir.Expr:
    """Return the convolution that the node's attributes describe, of data (N, C, ...) and weights (F, C, ...).

    Raises
    ------
    ValueError
        Not 1, 2 or 3 spatial axes.
    """
    spatial = int(data.ty.ndim) - 2
    if spatial not in _CONVOLUTIONS:
        raise ValueError(f"input of {spatial} spatial axes: expected 1, 2 or 3")
    strides, dilations = (node.integers(name, [1] * spatial) for name in ("strides", "dilations"))
    kernel = [static_size(weight, axis + 2) for axis in range(spatial)]
    return node.builder.emit(
        _CONVOLUTIONS[spatial](
            data,
            weight,
            strides=strides,
            padding=_padding(node, data, kernel, strides, dilations),
            dilation=dilations,
            groups=node.integer("group", 1),
            out_dtype=out_dtype or None,
        )
    )


def a_channel(node: ConverterInput, values: tvm.ir.Expr, spatial: int) -> tvm.ir.Expr:
    """Return values, one an output channel, in a shape that broadcasts against (N, C, ...); one number stays one."""
    return shaped(node, values, [-1, *[1] * spatial])


def shaped(node: ConverterInput, values: tvm.ir.Expr, shape: list[int]) -> tvm.ir.Expr:
    """Return a vector in another shape; a scalar stays one."""
    if values.ty.ndim == 0:
        return values
    value = constant_value(values)
    if value is not None:
        return constant(np.reshape(value, shape))
    return node.builder.emit(relax.op.reshape(values, shape))


@converts("ConvTranspose")
def check_output_shape(node: ConverterInput) -> None:
    """Refuse a ConvTranspose with an output shape other than its pads give, which TVM ignores; it has all others."""
    data, weight = node.input(0), node.input(1)
    spatial = int(data.ty.ndim) - 2
    wanted = node.integers("output_shape", [])
    if not wanted:
        return
    strides, dilations = (node.integers(name, [1] * spatial) for name in ("strides", "dilations"))
    pads, extra = node.integers("pads", [0] * 2 * spatial), node.integers("output_padding", [0] * spatial)
    given = [
        (static_size(data, axis + 2) - 1) * strides[axis]
        + (static_size(weight, axis + 2) - 1) * dilations[axis]
        + 1
        + extra[axis]
        - pads[axis]
        - pads[axis + spatial]
        for axis in range(spatial)
    ]
    if wanted[-spatial:] != given:
        msg = f"attribute 'output_shape': expected {given}, as the pads give, got {wanted}; set pads instead"
        raise ValueError(msg)


def _padding(
    node: ConverterInput, data: tvm.ir.Expr, kernel: list[int], strides: list[int], dilations: list[int]
) -> list[int]:
    """Return the paddings, all at the front first; `auto_pad` gives an output of size / stride, rounded up."""
    spatial, mode = len(strides), node.attributes.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        return node.integers("pads", [0] * (2 * spatial)) if mode == "NOTSET" else [0] * (2 * spatial)
    totals = []
    for axis, (stride, dilation) in enumerate(zip(strides, dilations, strict=True)):
        size, reach = sizes_of(data)[axis + 2], (kernel[axis] - 1) * dilation + 1
        total = simplify(((size + stride - 1) // stride - 1) * stride + reach - size)
        if isinstance(total, int):
            totals.append(max(total, 0))
            continue
        raise ValueError(
            f"attribute 'auto_pad' of axis {axis + 2}, whose size a call decides: expected pads, or a stride of 1, got "
            f"a stride of {stride}"
        )
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return [*small, *large] if mode == "SAME_UPPER" else [*large, *small]


def with_known_padding(operator: str) -> Converter:
    """Return the converter of a window with `auto_pad` over axes of symbolic size: TVM's own, given the padding."""

    def convert(node: ConverterInput) -> tvm.ir.Expr | None:
        data, mode = node.input(0), str(node.attributes.get("auto_pad", "NOTSET"))
        if not mode.startswith("SAME") or not has_known_sizes(data):
            return None
        spatial = sizes_of(data)[2:]
        if all(isinstance(size, tirx.IntImm) for size in spatial):
            return None
        kernel = node.integers("kernel_shape", [])
        kernel = kernel or [static_size(node.input(1), axis + 2) for axis in range(len(spatial))]
        strides, dilations = (node.integers(name, [1] * len(spatial)) for name in ("strides", "dilations"))
        pads = _padding(node, data, kernel, strides, dilations)
        stock = onnx_frontend._get_convert_map()[operator].get_converter(node.opset)
        attributes = {**node.attributes, "auto_pad": b"NOTSET", "pads": pads}
        return stock(node.builder, [*node.inputs, None][:3], attributes, [{}, {}])

    return convert


converts("AveragePool")(with_known_padding("AveragePool"))
converts("Conv")(with_known_padding("Conv"))
converts("MaxPool")(with_known_padding("MaxPool"))
