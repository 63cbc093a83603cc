"""A NaN of the input is one of the output wherever ONNX Runtime keeps it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from tests.pipeline.importer.onnx_cases import make_model
from tests.pipeline.passes.pass_cases import UNOPTIMISED, run_lowered, run_reference

X = np.array([[np.nan, -2, 3, 0], [1, np.nan, -0.5, 7]], "float32")
Z = np.array([[1, 2, -3, np.nan], [4, -1, np.nan, 0]], "float32")
ROW = np.array([0.5, np.nan, 1, -1], "float32")
BOUND, LOW = np.array(0.5, "float32"), np.array(-0.5, "float32")


@pytest.mark.parametrize(
    ("operator", "feeds", "attributes"),
    [
        ("Relu", {"x": X}, {}),
        ("Sign", {"x": X}, {}),
        ("Elu", {"x": X}, {"alpha": 0.5}),
        ("HardSigmoid", {"x": X}, {}),
        ("Max", {"x": X, "z": Z}, {}),
        ("Min", {"z": Z, "x": X}, {}),
        ("Max", {"x": X, "z": Z, "row": ROW}, {}),
        ("Clip", {"x": X, "low": LOW}, {}),
        ("Clip", {"x": X, "low": LOW, "high": BOUND}, {}),
        ("Clip", {"x": X, "low": BOUND, "high": LOW}, {}),
    ],
)
def test_nan_comes_out(operator: str, feeds: dict[str, np.ndarray], attributes: dict[str, float]) -> None:
    node = helper.make_node(operator, list(feeds), ["y"], **attributes)
    model = make_model(
        [node], {name: ("float32", array.shape) for name, array in feeds.items()}, {"y": ("float32", X.shape)}
    )
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), feeds)
    (want,) = run_reference(model, feeds)
    np.testing.assert_allclose(got, want, rtol=1e-5, equal_nan=True)
    assert np.isnan(got).any()


def test_bounds_given_when_the_model_runs_are_scalars() -> None:
    """ONNX Runtime hands a scalar over as a scalar; a row of one element is another type."""
    node = helper.make_node("Clip", ["x", "", "high"], ["y"])
    model = make_model([node], {"x": ("float32", (2, 4)), "high": ("float32", ())}, {"y": ("float32", (2, 4))})
    feeds = {"x": X, "high": BOUND}
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), feeds)
    np.testing.assert_array_equal(got, np.minimum(X, BOUND))
