"""Resize, an axis at a time: nearest neighbours are picked, linear and cubic interpolation is a product with a matrix.

Interpolation is linear in the input and separable, so each axis has a matrix (output size, input size) of weights,
which depends on sizes and attributes alone. It is computed at import by onnx's own reference implementation, on the
identity; that covers every mode of coordinates, rounding and antialiasing. TVM's own converter knows fewer of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from onnx import helper
from onnx.reference import ReferenceEvaluator
from tvm import relax

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
from relaxtune.pipeline.importer.sizes import simplify

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
        weights = _weights(node, static_size(data, axis), size, scale)
        if mode == "nearest":
            places = constant(weights.argmax(axis=1).astype("int64"))
            result = node.builder.emit(relax.op.take(result, places, axis))
        else:
            result = _interpolate(node, result, axis, weights)
    return result if dtype_of(result) == dtype else _cast(node, result, dtype)


def _resized_axes(node: ConverterInput) -> list[tuple[int, int, float]]:
    """Return axis, new size and scale of each axis that changes."""
    data, rank = node.input(0), int(node.input(0).ty.ndim)
    given = node.attributes.get("axes")
    axes = [int(axis) % rank for axis in given] if isinstance(given, list) and given else list(range(rank))
    scales, sizes = _numbers(node, 2 if node.opset > 10 else 1), _numbers(node, 3)
    if sizes is None:
        axes, sizes = _drop_kept_axes(node, axes)
    if sizes is None and scales is None:
        raise ValueError("inputs 2 and 3 (scales and sizes): expected a constant, got values known at run time only")
    if sizes is not None:
        factors = [size / static_size(data, axis) for size, axis in zip(sizes, axes, strict=True)]
        policy = node.attributes.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factor = min(factors) if policy == "not_larger" else max(factors)
            factors = [factor] * len(axes)
            sizes = [int(factor * static_size(data, axis) + 0.5) for axis in axes]
        results = [int(size) for size in sizes]
    else:
        assert scales is not None
        factors = [float(np.float32(scale)) for scale in scales]
        changed = [place for place, factor in enumerate(factors) if factor != 1.0]
        axes, factors = [axes[place] for place in changed], [factors[place] for place in changed]
        results = [int(np.floor(static_size(data, axis) * factor)) for axis, factor in zip(axes, factors, strict=True)]
    return [(axis, size, factor) for axis, size, factor in zip(axes, results, factors, strict=True) if factor != 1.0]


def _drop_kept_axes(node: ConverterInput, axes: list[int]) -> tuple[list[int], list[float] | None]:
    """Return the axes that change and their sizes, where all that is symbolic in the sizes is an axis's own size."""
    listed, data = size_list(node.optional(3)), sizes_of(node.input(0))
    if listed is None:
        return axes, None
    kept = [
        isinstance(gap := simplify(size - data[axis]), int) and gap == 0
        for axis, size in zip(axes, listed, strict=True)
    ]
    changed = [(axis, size) for axis, size, same in zip(axes, listed, kept, strict=True) if not same]
    if not all(isinstance(size, int) for _, size in changed):
        return axes, None
    return [axis for axis, _ in changed], [float(size) for _, size in changed if isinstance(size, int)]


def _numbers(node: ConverterInput, place: int) -> Sequence[float] | None:
    found = node.optional(place)
    value = None if found is None else constant_value(found)
    return None if value is None or not value.size else [float(item) for item in value]


def _weights(node: ConverterInput, before: int, after: int, scale: float) -> np.ndarray:
    """Return (after, before) float32: what each element of an axis takes from those before."""
    attributes = {name: node.attributes[name] for name in _WEIGHT_ATTRIBUTES if name in node.attributes}
    # A size given is kept to the letter: rounding errors of size * scale must not lose an element.
    by_size = node.optional(3) is not None and scale * before == after
    inputs = ["x", "", "", "sizes"] if by_size else ["x", "", "scales"]
    reference = ReferenceEvaluator(
        helper.make_model(
            helper.make_graph(
                [helper.make_node("Resize", inputs, ["y"], **attributes)],
                "weights",
                [helper.make_value_info(name, helper.make_tensor_type_proto(1, None)) for name in inputs if name],
                [helper.make_value_info("y", helper.make_tensor_type_proto(1, None))],
            ),
            opset_imports=[helper.make_opsetid("", _REFERENCE_OPSET)],
        )
    )
    feeds = {"x": np.eye(before, dtype="float32")}
    if by_size:
        feeds["sizes"] = np.array([after, before], "int64")
    else:
        feeds["scales"] = np.array([scale, 1.0], "float32")
    weights = np.asarray(reference.run(None, feeds)[0], "float32")
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
