"""Sizes known at run time beside sizes of the graph, as mixtures of experts have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper

from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.schedules.fallback import apply_fallback
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model, run_reference
from tests.pipeline.passes.pass_cases import LLVM, UNOPTIMISED, run_lowered


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


def test_sizes_that_two_ranges_have_at_run_time_are_two() -> None:
    """TVM names both alike, and what was computed of the second was then what had been computed of the first."""
    nodes = []
    for name in ("a", "b"):
        nodes += [
            helper.make_node("Range", ["zero", name, "one"], [f"range_{name}"]),
            helper.make_node("Shape", [f"range_{name}"], [f"shape_{name}"]),
            helper.make_node("Mul", [f"shape_{name}", "factor"], [f"times_{name}"]),
        ]
    nodes.append(helper.make_node("Concat", ["times_a", "times_b"], ["y"], axis=0))
    constants = {"zero": np.array(0), "one": np.array(1)}
    inputs: dict[str, tuple[str, tuple[object, ...]]] = {name: ("int64", ()) for name in ("a", "b", "factor")}
    model = make_model(nodes, inputs, {"y": ("int64", (2,))}, constants)
    feeds = {"a": np.array(3), "b": np.array(5), "factor": np.array(2)}
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), feeds)
    np.testing.assert_array_equal(got, [6, 10])


@pytest.mark.parametrize("count", [0, 2, 12])
def test_parts_of_rows_of_symbolic_axes_are_as_many_as_there_were(count: int) -> None:
    """As a mixture of experts with symbolic axes; FuseOps puts what reads a computed size before the size."""
    nodes = [
        helper.make_node("Reshape", ["x", "rows_of_4"], ["rows"]),
        helper.make_node("Reshape", ["w", "rows_of_1"], ["weights"]),
        helper.make_node("ReduceSum", ["chosen"], ["cut"], keepdims=0),
        helper.make_node("Mul", ["cut", "one"], ["end"]),
        helper.make_node("Shape", ["rows"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["all"]),
        helper.make_node("Range", ["zero", "cut", "one"], ["early"]),
        helper.make_node("Range", ["end", "all", "one"], ["late"]),
        helper.make_node("Gather", ["rows", "early"], ["a"]),
        helper.make_node("Gather", ["rows", "late"], ["b"]),
        helper.make_node("MatMul", ["a", "first"], ["a1"]),
        helper.make_node("MatMul", ["b", "second"], ["b1"]),
        helper.make_node("Concat", ["a1", "b1"], ["joined"], axis=0),
        helper.make_node("Sigmoid", ["joined"], ["gated"]),
        # The experts' second matmul reads the same rows again.
        helper.make_node("Gather", ["gated", "early"], ["c"]),
        helper.make_node("Gather", ["gated", "late"], ["d"]),
        helper.make_node("MatMul", ["c", "second"], ["c1"]),
        helper.make_node("MatMul", ["d", "first"], ["d1"]),
        helper.make_node("Concat", ["c1", "d1"], ["joined_again"], axis=0),
        helper.make_node("Mul", ["joined_again", "weights"], ["weighted"]),
        helper.make_node("Reshape", ["weighted", "pairs_of_4"], ["pairs"]),
        helper.make_node("ReduceSum", ["pairs", "middle"], ["y"], keepdims=0),
    ]
    inputs = {
        "x": ("float32", ("b", "s", 2, 4)),
        "w": ("float32", ("b", "s", 2)),
        "chosen": ("int64", (3,)),
    }
    rng = np.random.default_rng(0)
    constants = {
        **{"zero": np.array(0), "one": np.array(1), "middle": np.array([1])},
        **{"rows_of_4": np.array([-1, 4]), "rows_of_1": np.array([-1, 1]), "pairs_of_4": np.array([-1, 2, 4])},
        **{name: rng.standard_normal((4, 4)).astype("float32") for name in ("first", "second")},
    }
    model = make_model(nodes, inputs, {"y": ("float32", ("rows", 4))}, constants)
    feeds = {name: rng.standard_normal((2, 3, 2, 4)[:rank]).astype("float32") for name, rank in (("x", 4), ("w", 3))}
    feeds["chosen"] = np.array([count, 0, 0])
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), feeds)
    np.testing.assert_allclose(got, run_reference(model, feeds)[0], rtol=1e-5, atol=1e-6)


def test_size_that_is_computed_gives_way_to_that_of_a_constant() -> None:
    """Learnt positions: an image of any side is cut into patches, and 4 of them have positions."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["patches"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("Reshape", ["patches", "flat"], ["rows"]),
        helper.make_node("Add", ["rows", "positions"], ["y"]),
    ]
    constants = {"flat": np.array([1, 3, -1]), "positions": np.ones((1, 3, 4), "float32")}
    model = make_model(nodes, {"x": ("float32", (1, 3, "h", "h"))}, {"y": ("float32", (1, 3, 4))}, constants)
    graph = assert_agrees(model, {"x": np.arange(192, dtype="float32").reshape(1, 3, 8, 8)})
    assert [int(size) for size in graph.mod["main"].ret_ty.shape] == [1, 3, 4]


@pytest.mark.parametrize(("samples", "first"), [(47, "frames"), (61, "cut"), (31, "frames")])
def test_frames_cut_by_one_are_those_beside_them(samples: int, first: str) -> None:
    """The stem of a speech encoder: positions by a convolution of even width, cut by one, then a norm."""
    names = [first, "cut" if first == "frames" else "frames"]
    nodes = [
        helper.make_node("Conv", ["x", "coarse"], ["c"], strides=[5]),
        helper.make_node("Conv", ["c", "fine"], ["frames"], strides=[2]),
        helper.make_node("Conv", ["frames", "wide"], ["positions"], group=2, pads=[2, 2]),
        helper.make_node("Slice", ["positions", "zero", "minus", "two"], ["cut"]),
        helper.make_node("Add", names, ["sum"]),
        helper.make_node("Transpose", ["sum"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("LayerNormalization", ["rows", "scale"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    shapes = {"coarse": (4, 1, 10), "fine": (4, 4, 3), "wide": (4, 2, 4), "scale": (4,)}
    constants = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    constants |= {"zero": np.array([0]), "minus": np.array([-1]), "two": np.array([2])}
    inputs = {"x": ("float32", ("batch", 1, "samples"))}
    model = make_model(nodes, inputs, {"y": ("float32", ("batch", "f", 4))}, constants)
    feeds = {"x": rng.standard_normal((2, 1, samples)).astype("float32")}
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), feeds)
    np.testing.assert_allclose(got, run_reference(model, feeds)[0], rtol=1e-4, atol=1e-5)
