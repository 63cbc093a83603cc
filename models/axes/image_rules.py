"""Rules of images: how often a window fits in, how far a transposed one reaches, and sizes after a Resize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import numpy_helper

from relaxtune.models.axes.facts import AxisFacts, Known, Rule, number_of, sizes_of
from relaxtune.models.onnx_model import attribute_of
from relaxtune.polynomials import Polynomial, quotient


def _window(facts: AxisFacts, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    """Convolution or pooling: how often a window fits in."""
    given = {item.name: list(item.ints) for item in node.attribute if item.ints}
    mode = next((item.s.decode() for item in node.attribute if item.name == "auto_pad"), "") or "NOTSET"
    data = sizes_of(inputs[0])
    weights = sizes_of(inputs[1]) if node.op_type == "Conv" else None
    kernel = given.get("kernel_shape") or [number_of(size) for size in (weights or ())[2:]]
    if len(kernel) != len(data) - 2:
        return None
    count = len(kernel)
    pads, strides, dilations = (given.get(name, [fill] * many) for name, fill, many in
                                (("pads", 0, 2 * count), ("strides", 1, count), ("dilations", 1, count)))  # fmt: skip
    pads = [0] * 2 * count if mode == "VALID" else pads
    # The room that is left for steps, and what rounds their number up.
    if mode.startswith("SAME"):
        room, up = [size - 1 for size in data[2:]], [0] * count
    else:
        room = [size + pads[axis] + pads[axis + count] - (dilations[axis] * (kernel[axis] - 1) + 1)
                for axis, size in enumerate(data[2:])]  # fmt: skip
        up = [stride - 1 if attribute_of(node, "ceil_mode", 0) else 0 for stride in strides]
    places = [quotient(size + up[axis], Polynomial.number(strides[axis])) + 1 for axis, size in enumerate(room)]
    return [Known((data[0], data[1] if weights is None else weights[0], *places))] + [Known()] * (len(node.output) - 1)


def _transposed_window(facts: AxisFacts, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    """ConvTranspose: as far as the last window reaches."""
    given = {item.name: list(item.ints) for item in node.attribute if item.ints}
    if "output_shape" in given or any(item.name == "auto_pad" and item.s not in (b"", b"NOTSET")
                                      for item in node.attribute):  # fmt: skip
        return None
    data, weights = sizes_of(inputs[0]), sizes_of(inputs[1])
    count = len(data) - 2
    pads, strides, dilations, extra = (
        given.get(name, [fill] * many)
        for name, fill, many in
        (("pads", 0, 2 * count), ("strides", 1, count), ("dilations", 1, count), ("output_padding", 0, count))
    )  # fmt: skip
    reach = [dilation * (number_of(size) - 1) + 1 for dilation, size in zip(dilations, weights[2:], strict=True)]
    sizes = [
        (size - 1) * Polynomial.number(strides[axis]) + (reach[axis] + extra[axis] - pads[axis] - pads[axis + count])
        for axis, size in enumerate(data[2:])
    ]
    return [Known((data[0], weights[1] * attribute_of(node, "group", 1), *sizes))]


def _resize(facts: AxisFacts, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    """Resize and Upsample: the sizes given, or sizes times whole scales or over them."""
    data = sizes_of(inputs[0])
    if any(item.name in {"axes", "keep_aspect_ratio_policy"} for item in node.attribute):
        return None
    if len(inputs) > 3 and inputs[3].data is not None:
        return [Known(inputs[3].data)]
    scales = facts.constants.get(next((name for name in reversed(node.input[1:3]) if name), ""))
    factors = [] if scales is None else [float(factor) for factor in numpy_helper.to_array(scales).reshape(-1)]
    if len(factors) != len(data):
        return None
    sizes = []
    for size, factor in zip(data, factors, strict=True):
        if factor == round(factor):
            sizes.append(size * round(factor))
        elif factor > 0 and 1 / factor == round(1 / factor):
            sizes.append(quotient(size, Polynomial.number(round(1 / factor))))
        else:
            return None
    return [Known(tuple(sizes))]


IMAGE_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("AveragePool", "Conv", "LpPool", "MaxPool"), _window),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "ConvTranspose": _transposed_window,
}
