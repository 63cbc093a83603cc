"""Sizes that leave the windows of poolings and convolutions room, and those that do not.

A window that is larger than what it slides over has no place in the output. ONNX says so; ONNX Runtime divides towards
zero and computes one place all the same, of what is there. Such sizes are no test of a model, and an error where they
are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper, shape_inference

from relaxtune.models.dims import evaluate_dim
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.onnx_model import is_short, light_copy

# Where the weights of an operator stand among its inputs; a pooling has none.
_WINDOWS = {"MaxPool": None, "AveragePool": None, "LpPool": None, "Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
_DOUBLINGS = 6
# Where the search for the least sizes begins; doubled until there is room.
_START = 16

Shapes = Mapping[str, Sequence[int | None]]


@dataclass(frozen=True)
class Narrow:
    """A window without room: `size` places of an axis, padding included, of at least `least`."""

    node: str
    axis: int
    size: int
    least: int


def check_windows(graph: onnx.GraphProto) -> None:
    """Check the windows over axes of known size; the graph's values have their shapes.

    Raises
    ------
    ModelShapeError
        A window is larger than what it slides over.
    """
    _refuse(_narrow(graph, _shapes_of(graph)))


def check_sizes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> None:
    """Check that a graph's windows have room where its symbolic axes have these sizes.

    Raises
    ------
    ModelShapeError
        A window has none.
    """
    if sizes and has_windows(model):
        _refuse(_at(model, sizes), ", ".join(f"{axis}={size}" for axis, size in sizes.items()))


def has_windows(model: onnx.ModelProto) -> bool:
    """Return whether a graph has poolings or convolutions."""
    return any(node.op_type in _WINDOWS for node in model.graph.node)


def with_room(model: onnx.ModelProto, sizes: Mapping[str, int], free: Sequence[str]) -> dict[str, int]:
    """Return the sizes, those of free axes doubled until all windows have room; as they are if that does not help."""
    found = dict(sizes)
    for _ in range(_DOUBLINGS * max(1, len(free))):
        missing = _missing(model, found)
        if not missing:
            return found
        doubled = [{**found, name: 2 * found[name]} for name in free]
        best = min(doubled, key=lambda one: _missing(model, one), default=found)
        # One doubling may not be enough to give a place more behind many strides.
        found = best if _missing(model, best) < missing else {**found, **{name: 2 * found[name] for name in free}}
    return dict(sizes)


def least_sizes(model: onnx.ModelProto, axes: Sequence[str]) -> dict[str, int]:
    """Return axis -> the least size with which all windows have room, where that is more than 1.

    It is found with the other axes large. A window over the sum of two axes needs both of them large enough, and one at
    a time does not say so.
    """
    roomy = with_room(model, dict.fromkeys(axes, _START), axes) if has_windows(model) else {}
    if not roomy or _missing(model, roomy):
        return {}
    found = {}
    for axis in axes:
        least, most = 1, roomy[axis]
        while least < most:
            middle = (least + most) // 2
            least, most = (middle + 1, most) if _missing(model, {**roomy, axis: middle}) else (least, middle)
        if least > 1:
            found[axis] = least
    return found


def _missing(model: onnx.ModelProto, sizes: Mapping[str, int]) -> int:
    return sum(one.least - one.size for one in _at(model, sizes))


def _at(model: onnx.ModelProto, sizes: Mapping[str, int]) -> list[Narrow]:
    """Return the windows without room where the symbolic axes have these sizes."""
    light = light_copy(model, is_short)
    for value in light.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                size = evaluate_dim(dim.dim_param or f"{value.name}_{axis}", sizes)
                if isinstance(size, int):
                    dim.dim_value = size
    del light.graph.value_info[:]
    for value in light.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = shape_inference.infer_shapes(light, data_prop=True).graph
    except (shape_inference.InferenceError, RuntimeError, ValueError):
        return []
    return list(_narrow(inferred, _shapes_of(inferred)))


def _shapes_of(graph: onnx.GraphProto) -> dict[str, list[int | None]]:
    shapes = {
        value.name: [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    return shapes | {tensor.name: list(tensor.dims) for tensor in graph.initializer}


def _narrow(graph: onnx.GraphProto, shapes: Shapes) -> Iterator[Narrow]:
    """Yield the windows that have no room, in the graph's order."""
    for node in graph.node:
        given = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        weights = _WINDOWS.get(node.op_type)
        kernel = given.get("kernel_shape") or (shapes.get(node.input[weights], [])[2:] if weights else [])
        if node.op_type not in _WINDOWS or given.get("auto_pad", b"") in (b"SAME_UPPER", b"SAME_LOWER"):
            continue
        pads = given.get("pads", [0] * 2 * len(kernel))
        for place, size in enumerate(shapes.get(node.input[0], [])[2:]):
            width = kernel[place] if place < len(kernel) else None
            # Nothing at all, an empty cache for example, is what a graph may be given.
            if not size or width is None:
                continue
            least = (width - 1) * given.get("dilations", [1] * len(kernel))[place] + 1
            if given.get("ceil_mode"):
                least -= given.get("strides", [1] * len(kernel))[place] - 1
            padded = size + pads[place] + pads[place + len(kernel)]
            if padded < least:
                yield Narrow(f"{node.op_type} node {node.name or node.output[0]!r}", 2 + place, padded, least)


def _refuse(narrow: Iterator[Narrow] | Sequence[Narrow], sizes: str = "") -> None:
    for one in narrow:
        raise ModelShapeError(
            f"{one.node} slides a window over {one.size} places of axis {one.axis} of its input, padding included, and "
            f"expected at least {one.least}{f', with the sizes {sizes}' if sizes else ''}; give the model larger inputs"
        )
