"""Resize, an axis at a time: nearest neighbours are picked, linear and cubic interpolation is a product with a matrix.

Interpolation is linear in the input and separable, so each axis has a matrix (output size, input size) of weights,
which depends on sizes and attributes alone. It is computed at import by onnx's own reference implementation, on the
identity; that covers every mode of coordinates, rounding and antialiasing. TVM's own converter knows fewer of them.

An axis of symbolic size has no matrix: each of its places computes the one or two elements that it takes, for nearest
neighbours and linear interpolation without antialiasing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tvm
from onnx import helper
from tvm import relax, te, tirx

from relaxtune.models.onnx_model import result_of
from relaxtune.pipeline.importer.converter_input import (
    ConverterInput,
    constant,
    constant_value,
    converts,
    dtype_of,
    sizes_of,
    static_size,
)
from relaxtune.pipeline.importer.shape_values import size_list
from relaxtune.pipeline.importer.sizes import size_text
from relaxtune.schedules.sizes import Size, simplify

# The attributes that shape the weights of one axis; their meaning has not changed since opset 11.
_WEIGHT_ATTRIBUTES = (
    "antialias",
    "coordinate_transformation_mode",
    "cubic_coeff_a",
    "exclude_outside",
    "mode",
    "nearest_mode",
)
_REFERENCE_OPSET = 19
_HALF = tirx.const(0.5, "float32")
# Place x in the result, scale, sizes before and after -> place in the input, as ONNX defines each mode.
_COORDINATES: Mapping[str, Callable[..., tirx.Expr]] = {
    "half_pixel": lambda x, scale, _before, _after: (x + _HALF) / scale - _HALF,
    "pytorch_half_pixel": lambda x, scale, _before, after: tirx.Select(after > 1, (x + _HALF) / scale - _HALF, 0.0 * x),
    "align_corners": lambda x, _scale, before, after: tirx.Select(
        after > 1, x * (before - 1) / tirx.max(after - 1, tirx.const(1.0, "float32")), 0.0 * x
    ),
    "asymmetric": lambda x, scale, _before, _after: x / scale,
}
_ROUNDING: Mapping[str, Callable[[tirx.Expr], tirx.Expr]] = {
    "round_prefer_floor": lambda x: tirx.ceil(x - _HALF),
    "round_prefer_ceil": lambda x: tirx.floor(x + _HALF),
    "floor": tirx.floor,
    "ceil": tirx.ceil,
}


@converts("Resize")
def convert_resize(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return x resized by scales or to sizes, of all axes or of `axes`; a resized region is left to TVM.

    Inputs: x, region (unused), scales, sizes; in opset 10: x, scales.
    """
    if node.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return None
    data = node.input(0)
    mode = str(node.attributes.get("mode", "nearest"))
    dtype = dtype_of(data)
    result = data if mode == "nearest" or dtype.startswith("float") else _cast(node, data, "float32")
    for axis, size, scale in _resized_axes(node):
        if not isinstance(sizes_of(data)[axis], tirx.IntImm) or not isinstance(size, int) or scale is None:
            result = _resize_symbolic_axis(node, result, axis, size, scale)
            continue
        weights = _weights(node, static_size(data, axis), size, scale)
        if mode == "nearest":
            places = constant(weights.argmax(axis=1).astype("int64"))
            result = node.builder.emit(relax.op.take(result, places, axis))
        else:
            result = _interpolate(node, result, axis, weights)
    return result if dtype_of(result) == dtype else _cast(node, result, dtype)


def _resized_axes(node: ConverterInput) -> list[tuple[int, Size, float | None]]:
    """Return axis, new size and scale of each axis that changes; None is the quotient of symbolic sizes."""
    data, rank = node.input(0), int(node.input(0).ty.ndim)
    axes = [axis % rank for axis in node.integers("axes", list(range(rank)))]
    scales, sizes = _numbers(node, 2 if node.opset > 10 else 1), _numbers(node, 3)
    listed = size_list(node.optional(3)) if sizes is None else [int(size) for size in sizes]
    if listed is not None:
        return _axes_of_sizes(node, axes, listed)
    if scales is None:
        raise ValueError("inputs 2 and 3 (scales and sizes): expected a constant, got values known at run time only")
    factors = [float(np.float32(scale)) for scale in scales]
    return [
        (axis, _scaled(sizes_of(data)[axis], factor), factor)
        for axis, factor in zip(axes, factors, strict=True)
        if factor != 1.0
    ]


def _scaled(size: tirx.Expr, factor: float) -> Size:
    """Return floor(size * factor); of a symbolic size, where the factor or its inverse is a whole number."""
    if isinstance(size, tirx.IntImm):
        return int(np.floor(int(size) * factor))
    if factor == round(factor):
        return size * int(factor)
    if factor > 0 and 1 / factor == round(1 / factor):
        return size // round(1 / factor)
    raise ValueError(
        f"input of scales: expected a whole number or one over it for an axis of symbolic size, got {factor:g}"
    )


def _axes_of_sizes(
    node: ConverterInput, axes: list[int], sizes: Sequence[Size]
) -> list[tuple[int, Size, float | None]]:
    """Return the axes whose new size is another, by sizes."""
    before = [sizes_of(node.input(0))[axis] for axis in axes]
    policy = node.attributes.get("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        factors = [_known(size) / static_size(node.input(0), axis) for axis, size in zip(axes, sizes, strict=True)]
        factor = min(factors) if policy == "not_larger" else max(factors)
        return [(axis, int(factor * _known(size) + 0.5), factor) for axis, size in zip(axes, before, strict=True)]
    found: list[tuple[int, Size, float | None]] = []
    for axis, old, new in zip(axes, before, sizes, strict=True):
        gap = simplify(new - old)
        if not (isinstance(gap, int) and gap == 0):
            known = isinstance(old, tirx.IntImm) and isinstance(new, int)
            found.append((axis, new, int(new) / int(old) if known else None))
    return found


def _known(size: Size) -> int:
    if not isinstance(size, int | tirx.IntImm):
        msg = f"attribute 'keep_aspect_ratio_policy': expected 'stretch' for sizes such as {size_text(size)}"
        raise ValueError(msg)  # noqa: TRY004
    return int(size)


def _resize_symbolic_axis(
    node: ConverterInput, data: tvm.ir.Expr, axis: int, size: Size, scale: float | None
) -> tvm.ir.Expr:
    """Return x resized along an axis by places that are computed in a call, in float32 as ONNX Runtime does."""
    mode = str(node.attributes.get("mode", "nearest"))
    coordinates = str(node.attributes.get("coordinate_transformation_mode", "half_pixel"))
    if mode == "cubic" or node.integer("antialias", 0) or coordinates not in _COORDINATES:
        raise ValueError(
            f"axis {axis} of symbolic size: expected nearest or linear, without antialiasing and of coordinates "
            f"{', '.join(_COORDINATES)}; got {mode}, {coordinates}"
        )
    size = tirx.IntImm("int64", size) if isinstance(size, int) else size
    rounding = _ROUNDING[str(node.attributes.get("nearest_mode", "round_prefer_floor"))]

    def resized(x: te.Tensor) -> te.Tensor:
        before, after = x.shape[axis].astype("float32"), size.astype("float32")
        factor = after / before if scale is None else tirx.const(scale, "float32")
        last = x.shape[axis] - 1

        def element(*index: tirx.Var) -> tirx.Expr:
            place = _COORDINATES[coordinates](index[axis].astype("float32"), factor, before, after)

            def at(number: tirx.Expr) -> tirx.Expr:
                inside = tirx.max(tirx.min(number, last), 0)
                return x(*index[:axis], inside, *index[axis + 1 :])

            if mode == "nearest":
                return at(rounding(place).astype("int64"))
            place = tirx.max(tirx.min(place, before - 1), tirx.const(0.0, "float32"))
            low = tirx.floor(place)
            share = (place - low).astype(x.dtype)
            return at(low.astype("int64")) * (1 - share) + at(low.astype("int64") + 1) * share

        return te.compute([*x.shape[:axis], size, *x.shape[axis + 1 :]], element, name="resize")

    return node.builder.emit_te(resized, data, primfunc_name_hint="resize")


def _numbers(node: ConverterInput, place: int) -> Sequence[float] | None:
    value = constant_value(node.optional(place))
    return None if value is None or not value.size else [float(item) for item in value]


def _weights(node: ConverterInput, before: int, after: int, scale: float) -> np.ndarray:
    """Return (after, before) float32: what each element of an axis takes from those before."""
    attributes = {name: node.attributes[name] for name in _WEIGHT_ATTRIBUTES if name in node.attributes}
    # A size given is kept to the letter: rounding errors of size * scale must not lose an element.
    by_size = node.optional(3) is not None and scale * before == after
    inputs = ["x", "", "", "sizes"] if by_size else ["x", "", "scales"]
    feeds = {"x": np.eye(before, dtype="float32")}
    if by_size:
        feeds["sizes"] = np.array([after, before], "int64")
    else:
        feeds["scales"] = np.array([scale, 1.0], "float32")
    resize = helper.make_node("Resize", inputs, ["y"], **attributes)
    weights = result_of(resize, feeds, {"": _REFERENCE_OPSET}).astype("float32")
    if weights.shape != (after, before):
        raise ValueError(f"axis of {before} elements, scale {scale}: expected {after} elements, got {weights.shape[0]}")
    return weights


def _interpolate(node: ConverterInput, data: tvm.ir.Expr, axis: int, weights: np.ndarray) -> tvm.ir.Expr:
    emit, rank = node.builder.emit, int(data.ty.ndim)
    matrix = weights.astype(dtype_of(data))
    if axis == rank - 1:
        return emit(relax.op.matmul(data, constant(np.ascontiguousarray(matrix.T))))
    if axis == rank - 2:
        return emit(relax.op.matmul(constant(matrix), data))
    order = [*(place for place in range(rank) if place != axis), axis]
    turned = emit(relax.op.permute_dims(data, order))
    product = emit(relax.op.matmul(turned, constant(np.ascontiguousarray(matrix.T))))
    return emit(relax.op.permute_dims(product, [order.index(place) for place in range(rank)]))


def _cast(node: ConverterInput, data: tvm.ir.Expr, dtype: str) -> tvm.ir.Expr:
    return node.builder.emit(relax.op.astype(data, dtype))
