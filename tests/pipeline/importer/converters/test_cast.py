"""Casts to integers of numbers that no integer has: ONNX leaves them open, and they are ONNX Runtime's on x86 here."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from onnx import helper

from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.onnx_cases import make_model, run_reference, run_relax

NUMBERS = [np.inf, -np.inf, np.nan, 3000000123.0, -3000000123.0, 1e20, -1e20, 300.7, -1.5, 200.0, -200.0, 0.5]


@pytest.mark.parametrize("source", ["float16", "float32", "float64"])
@pytest.mark.parametrize("target", ["bool", "int8", "uint8", "int16", "uint16", "int32", "int64"])
def test_what_no_integer_holds_is_the_least_one_as_in_onnx_runtime(source: str, target: str) -> None:
    with np.errstate(over="ignore"):
        x = np.array(NUMBERS, source)
    to = helper.np_dtype_to_tensor_dtype(np.dtype(target))
    model = make_model(
        [helper.make_node("Cast", ["x"], ["y"], to=to)], {"x": (source, ("n",))}, {"y": (target, ("n",))}
    )
    (got,) = run_relax(import_model(model), {"x": x})
    whole = np.int64 if target == "int64" else np.int32
    limits = np.iinfo(whole)
    held = [
        int(one) if np.isfinite(one) and abs(one) < -float(limits.min) else limits.min for one in x.astype("float64")
    ]
    expected = (x != 0) if target == "bool" else np.array(held, whole).astype(target)
    np.testing.assert_array_equal(got, expected)
    if platform.machine() == "x86_64":
        np.testing.assert_array_equal(got, run_reference(model, {"x": x})[0])
