"""Resize to sizes of which some are the input's own symbolic ones."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model

NODE = helper.make_node
SIZES = [NODE("Shape", ["x"], ["all"]), NODE("Gather", ["all", "places"], ["kept"])]
X = ("float32", ("batch", 3, 4, 5))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_axes_that_keep_their_symbolic_size_are_left_alone(mode: str, batch: int) -> None:
    model = make_model(
        [
            *SIZES,
            NODE("Concat", ["kept", "new"], ["sizes"], axis=0),
            NODE("Resize", ["x", "", "", "sizes"], ["y"], mode=mode),
        ],
        {"x": X},
        {"y": ("float32", ("batch", 3, 8, 9))},
        {"places": np.array([0, 1]), "new": np.array([8, 9])},
    )
    x = np.random.default_rng(0).standard_normal((batch, 3, 4, 5)).astype("float32")
    assert_agrees(model, {"x": x})


@pytest.mark.parametrize(
    ("mode", "coordinates", "rounding"),
    [
        ("nearest", "asymmetric", "floor"),
        ("nearest", "half_pixel", "round_prefer_ceil"),
        ("nearest", "align_corners", "round_prefer_floor"),
        ("linear", "half_pixel", "floor"),
        ("linear", "pytorch_half_pixel", "floor"),
        ("linear", "align_corners", "floor"),
    ],
)
@pytest.mark.parametrize("inputs", [["x", "", "doubled"], ["x", "", "halved"], ["x", "", "", "known"]])
def test_axes_of_any_size_are_resized(mode: str, coordinates: str, rounding: str, inputs: list[str]) -> None:
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
    model = make_model(
        [NODE("Resize", inputs, ["y"], **attributes)],
        {"x": ("float32", (1, 2, "height", "width"))},
        {"y": ("float32", (1, 2, "a", "b"))},
        {
            "doubled": np.array([1, 1, 2, 2], np.float32),
            "halved": np.array([1, 1, 0.5, 0.5], np.float32),
            "known": np.array([1, 2, 7, 9]),
        },
    )
    assert_agrees(model, {"x": np.random.default_rng(0).standard_normal((1, 2, 5, 8)).astype("float32")})


def test_an_axis_takes_the_size_of_another() -> None:
    model = make_model(
        [*SIZES, NODE("Concat", ["new", "kept"], ["sizes"], axis=0), NODE("Resize", ["x", "", "", "sizes"], ["y"])],
        {"x": ("float32", (2, 3, "height", "width"))},
        {"y": ("float32", (2, 3, "width", "height"))},
        {"places": np.array([3, 2]), "new": np.array([2, 3])},
    )
    assert_agrees(model, {"x": np.random.default_rng(0).standard_normal((2, 3, 4, 7)).astype("float32")})


@pytest.mark.parametrize(
    ("attributes", "scales", "reason"),
    [
        ({"mode": "cubic"}, [1, 1, 2, 2], "expected nearest or linear"),
        ({"mode": "nearest"}, [1, 1, 1.5, 1.5], "whole number"),
    ],
)
def test_other_forms_of_symbolic_sizes_are_refused_by_name(
    attributes: dict[str, str], scales: list[float], reason: str
) -> None:
    model = make_model(
        [NODE("Resize", ["x", "", "scales"], ["y"], **attributes)],
        {"x": ("float32", (1, 2, "height", "width"))},
        {"y": ("float32", (1, 2, "a", "b"))},
        {"scales": np.array(scales, np.float32)},
    )
    with pytest.raises(ImportFailedError, match=reason):
        import_model(model)
