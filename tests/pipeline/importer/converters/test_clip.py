"""Clip with each way to give its bounds, and of numbers that older opsets did not take, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tests.pipeline.importer.onnx_cases import assert_agrees, make_model

FORMS = {
    "both": ["x", "low", "high"],
    "low": ["x", "low"],
    "high": ["x", "", "high"],
    "none": ["x"],
    "crossed": ["x", "high", "low"],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "int64"])
@pytest.mark.parametrize("computed", [False, True])
def test_bounds_are_those_of_onnx_runtime(dtype: str, form: str, computed: bool) -> None:
    """As constants, and as inputs: exporters of mixtures of experts compute them."""
    x = np.linspace(-3, 3, 12).reshape(3, 4).astype(dtype)
    names = FORMS[form]
    bounds = {name: np.array(value, dtype) for name, value in (("low", -1), ("high", 2)) if name in names}
    given = {name: (dtype, ()) for name in bounds} if computed else {}
    model = make_model(
        [helper.make_node("Clip", names, ["y"])],
        {"x": (dtype, ("n", 4)), **given},
        {"y": (dtype, ("n", 4))},
        {} if computed else bounds,
        opset=20,
    )
    assert_agrees(model, {"x": x, **(bounds if computed else {})})
