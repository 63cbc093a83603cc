"""Images of any height: maps of two strides that meet, and padding that follows from sizes, against ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.models.axes.relations import axis_sizes, check_bounds, find_relations
from relaxtune.models.errors import ModelShapeError
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model

_RNG = np.random.default_rng(0)
_STRIDED = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
_NEAREST = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}


def _pyramid(joint: str, back: str) -> OnnxModel:
    """Convolve in two strides of 2, enlarge the smaller map again, and join it with the larger one."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["half"], **_STRIDED),
        helper.make_node("Conv", ["half", "w2"], ["quarter"], **_STRIDED),
        helper.make_node("Resize", ["quarter", "", "twice"], ["large"], **_NEAREST)
        if back == "Resize"
        else helper.make_node("ConvTranspose", ["quarter", "w3"], ["large"], strides=[2, 2]),
        helper.make_node(joint, ["half", "large"], ["y"], **({"axis": 1} if joint == "Concat" else {})),
    ]
    constants = {
        "w": _RNG.standard_normal((4, 3, 3, 3)).astype("float32"),
        "w2": _RNG.standard_normal((4, 4, 3, 3)).astype("float32"),
        "w3": _RNG.standard_normal((4, 4, 2, 2)).astype("float32"),
        "twice": np.array([1, 1, 2, 2], "float32"),
    }
    model = make_model(
        nodes, {"x": ("float32", ["n", 3, "height", "width"])}, {"y": ("float32", ["n", "c", "h", "w"])}, constants
    )
    return replace(model, relations=find_relations(model.proto))


@pytest.mark.parametrize(("joint", "back"), [("Add", "Resize"), ("Concat", "Resize"), ("Concat", "ConvTranspose")])
@pytest.mark.parametrize("height", [4, 12])
def test_maps_of_two_strides_meet_where_an_axis_is_a_multiple(joint: str, back: str, height: int) -> None:
    model = _pyramid(joint, back)
    assert_agrees(model, {"x": _RNG.standard_normal((2, 3, height, 8)).astype("float32")}, 1e-4)


def test_size_that_is_no_multiple_is_refused_by_the_axis_and_the_multiple() -> None:
    model = _pyramid("Add", "Resize")
    assert [str(one) for one in model.relations] == [
        f"{axis} (x[{place}]) is a multiple of 4, by the graph" for place, axis in ((2, "height"), (3, "width"))
    ]
    with pytest.raises(ModelShapeError, match="axis 'height' has size 6, the graph takes multiples of 4"):
        check_bounds(model.relations, {"height": 6, "width": 8}, "model")
    assert axis_sizes(model) == {"n": 2, "height": 16, "width": 16}


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool", "Conv"])
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("width", [5, 8])
def test_window_of_stride_one_keeps_an_axis_of_any_size(operator: str, mode: str, width: int) -> None:
    inputs = ["x", "w"] if operator == "Conv" else ["x"]
    node = helper.make_node(operator, inputs, ["y"], kernel_shape=[2, 2], strides=[1, 1], auto_pad=mode)
    weights = {"w": _RNG.standard_normal((3, 3, 2, 2)).astype("float32")}
    model = make_model(
        [node, helper.make_node("Add", ["x", "y"], ["z"])],
        {"x": ("float32", ["n", 3, 7, "width"])}, {"z": ("float32", ["n", 3, 7, "width"])}, weights,
    )  # fmt: skip
    model = replace(model, relations=find_relations(model.proto))
    assert model.relations == ()
    assert_agrees(model, {"x": _RNG.standard_normal((1, 3, 7, width)).astype("float32")})
