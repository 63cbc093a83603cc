"""Sizes known at run time beside sizes of the graph, as mixtures of experts have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper

from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.schedules.fallback import apply_fallback
from tests.pipeline.importer.onnx_cases import make_model
from tests.pipeline.passes.pass_cases import LLVM, UNOPTIMISED, run_lowered, run_reference


@pytest.mark.parametrize("first", [0, 2, 6])
def test_parts_of_rows_joined_again_are_as_many_as_there_were(first: int) -> None:
    """Each expert takes its rows; all of them are weighted together. Before, code generation refused the product."""
    nodes = [
        helper.make_node("Range", ["zero", "cut", "one"], ["early"]),
        helper.make_node("Range", ["cut", "six", "one"], ["late"]),
        helper.make_node("Gather", ["x", "early"], ["a"]),
        helper.make_node("Gather", ["x", "late"], ["b"]),
        helper.make_node("Neg", ["b"], ["c"]),
        helper.make_node("Concat", ["a", "c"], ["joined"], axis=0),
        helper.make_node("Mul", ["joined", "weights"], ["y"]),
    ]
    inputs = {"x": ("float32", (6, 4)), "cut": ("int64", ()), "weights": ("float32", (6, 1))}
    constants = {"zero": np.array(0), "one": np.array(1), "six": np.array(6)}
    model = make_model(nodes, inputs, {"y": ("float32", (6, 4))}, constants)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(dtype) for name, (dtype, shape) in inputs.items()}
    feeds["cut"] = np.array(first)
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), feeds)
    np.testing.assert_array_equal(got, run_reference(model, feeds)[0])


def test_truth_values_are_compared_by_vectors() -> None:
    x = np.arange(64).reshape(4, 16) % 3 == 0
    node = helper.make_node("Equal", ["x", "true"], ["y"])
    model = make_model([node], {"x": ("bool", (4, 16))}, {"y": ("bool", (4, 16))}, {"true": np.array(True)})
    lowered = lower(import_model(model), LLVM)
    (got,) = run_lowered(replace(lowered, mod=apply_fallback(lowered.mod, LLVM)), {"x": x}, LLVM)
    np.testing.assert_array_equal(got, x)
