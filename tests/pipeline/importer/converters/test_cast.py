"""Casts to integers of numbers that no integer has: ONNX leaves them open, and they are ONNX Runtime's on x86 here."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from onnx import helper

from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.onnx_cases import make_model, run_reference, run_relax

NUMBERS = [np.inf, -np.inf, np.nan, 3000000123.0, -3000000123.0, 1e20, -1e20, 300.7, -1.5, 200.0, -200.0, 0.5]
NUMBERS += [4.5e9, -4.5e9, 9.3e18, -9.3e18, 1.8e19, 1.9e19]


@pytest.mark.parametrize("source", ["float16", "float32", "float64"])
@pytest.mark.parametrize("target", ["bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint32", "uint64"])
def test_what_no_integer_holds_is_the_least_one_as_in_onnx_runtime(source: str, target: str) -> None:
    with np.errstate(over="ignore"):
        x = np.array(NUMBERS, source)
    to = helper.np_dtype_to_tensor_dtype(np.dtype(target))
    model = make_model(
        [helper.make_node("Cast", ["x"], ["y"], to=to)], {"x": (source, ("n",))}, {"y": (target, ("n",))}
    )
    (got,) = run_relax(import_model(model), {"x": x})
    expected = (x != 0) if target == "bool" else np.array([_held(float(one), target) for one in x], target)
    np.testing.assert_array_equal(got, expected)
    if platform.machine() == "x86_64":
        # What ONNX Runtime makes of a number for uint32 depends on its place in the tensor.
        parts = np.split(x, x.size) if target == "uint32" else [x]
        wanted = [run_reference(model, {"x": part})[0] for part in parts]
        np.testing.assert_array_equal(got, np.concatenate(wanted))


def _held(number: float, target: str) -> int:
    bits, own = 64 if target in ("int64", "uint32", "uint64") else 32, np.iinfo(target)
    if target == "uint64" and number >= 2.0**63:
        return int(number) if number < 2.0**64 else 0
    whole = int(number) if np.isfinite(number) and abs(number) < 2.0 ** (bits - 1) else -(2 ** (bits - 1))
    return (whole - own.min) % 2**own.bits + own.min
