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


def test_a_symbolic_size_that_is_another_than_the_axis_had_is_refused() -> None:
    model = make_model(
        [*SIZES, NODE("Concat", ["kept", "new"], ["sizes"], axis=0), NODE("Resize", ["x", "", "", "sizes"], ["y"])],
        {"x": X},
        {"y": ("float32", ("threes", "again", 8, 9))},
        {"places": np.array([1, 0]), "new": np.array([8, 9])},
    )
    with pytest.raises(ImportFailedError, match="Resize"):
        import_model(model)
