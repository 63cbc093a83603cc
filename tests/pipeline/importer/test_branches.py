"""`If` whose branches are of two ranks or of types that only one of them can take, against ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import OnnxModel, random_inputs
from relaxtune.models.axes.relations import find_relations
from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model, run_relax


def _branch(nodes: list[onnx.NodeProto], result: str) -> onnx.GraphProto:
    value = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, result, [], [value])


def _squeezed() -> OnnxModel:
    """As TorchScript writes `squeeze(1)` of an axis of unknown size, which a matmul reads."""
    squeezed = _branch([helper.make_node("Squeeze", ["pooled", "axis"], ["squeezed"])], "squeezed")
    kept = _branch([helper.make_node("Identity", ["pooled"], ["kept"])], "kept")
    nodes = [
        helper.make_node("MaxPool", ["x"], ["pooled"], kernel_shape=[4], strides=[4]),
        helper.make_node("Shape", ["pooled"], ["shape"]),
        helper.make_node("Gather", ["shape", "axis"], ["size"]),
        helper.make_node("Equal", ["size", "one"], ["is_one"]),
        helper.make_node("If", ["is_one"], ["chosen"], then_branch=squeezed, else_branch=kept),
        helper.make_node("Gemm", ["chosen", "w"], ["y"]),
    ]
    constants = {"axis": np.array([2]), "one": np.array([1]), "w": np.ones((3, 2), "float32")}
    return make_model(nodes, {"x": ("float32", ["n", 3, "length"])}, {"y": ("float32", ["n", 2])}, constants)


@pytest.mark.parametrize("length", [4, 7])
def test_axis_is_squeezed_that_what_follows_needs_to_have_one_place(length: int) -> None:
    assert_agrees(_squeezed(), {"x": np.random.default_rng(0).standard_normal((2, 3, length)).astype("float32")})


def test_axis_of_two_places_is_refused_in_the_call() -> None:
    graph = import_model(_squeezed())
    with pytest.raises(Exception, match=r"match_cast|Mismatched|ErrorContext"):
        run_relax(graph, {"x": np.zeros((2, 3, 8), "float32")})


def test_branches_of_a_rate_ask_for_their_own_sizes_alone() -> None:
    """The axis has one place in a branch and is free in the other; a first state has the batch in both."""
    weights = {name: np.full((1, 8, rows), 0.1, "float32") for name, rows in (("w", 2), ("r", 2))}
    inner = [helper.make_node("LSTM", ["t", "w", "r", "", "", "h", "h"], ["", "out"], hidden_size=2)]
    then = _branch([helper.make_node("Identity", ["x"], ["t"]), *inner], "out")
    other_nodes = [
        helper.make_node("Mul", ["x", "two"], ["t2"]),
        helper.make_node("LSTM", ["t2", "w", "r", "", "", "h", "h"], ["", "out2"], hidden_size=2),
        helper.make_node("Squeeze", ["x", "axis"], ["unread"]),
    ]
    nodes = [
        helper.make_node("Equal", ["rate", "wide"], ["is_wide"]),
        helper.make_node("If", ["is_wide"], ["y"], then_branch=then, else_branch=_branch(other_nodes, "out2")),
    ]
    model = make_model(
        nodes,
        {"x": ("float32", ["steps", "batch", 2]), "h": ("float32", [1, "rows", 2]), "rate": ("int64", [])},
        {"y": ("float32", [1, "batch", 2])},
        {**weights, "wide": np.array(16000), "two": np.float32(2), "axis": np.array([0])},
    )
    assert [(one.axis, one.sign, one.size) for one in find_relations(model.proto)] == [("rows", "=", "batch")]
    assert random_inputs(model, seed=0, dims={"steps": 2, "batch": 1, "rows": 1})["rate"] == 16000


def test_type_that_onnx_cannot_infer_in_a_branch_is_no_error() -> None:
    """The pads come of a cast that onnx's inference of a single node does not know the type of."""
    pads = numpy_helper.from_array(np.array([0, 0, 0, 1], "float32"), "pads")
    nodes = [
        helper.make_node("Cast", ["pads"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Pad", ["x", "whole"], ["padded"]),
    ]
    then = _branch(nodes, "padded")
    then.initializer.append(pads)
    other = _branch([helper.make_node("Concat", ["x", "last"], ["longer"], axis=1)], "longer")
    model = make_model(
        [helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)],
        {"x": ("float32", ["n", "length"]), "last": ("float32", ["n", 1]), "c": ("bool", [])},
        {"y": ("float32", ["n", "longer"])},
    )
    model = replace(model, relations=find_relations(model.proto))
    feeds = {"x": np.ones((2, 3), "float32"), "last": np.ones((2, 1), "float32")}
    for chosen in (True, False):
        assert_agrees(model, {**feeds, "c": np.array(chosen)})
