from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.importer.normalise import NormalisedGraph, normalise
from relaxtune.pipeline.importer.quiet import quiet_libraries
from tests.pipeline.importer.onnx_cases import ASSETS, float_tensor, make_model, run_reference, run_relax


def operators(graph: NormalisedGraph) -> Counter[str]:
    return Counter(node.op_type for node in graph.proto.graph.node)


def constants(graph: NormalisedGraph) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.proto.graph.initializer}


def shape_arithmetic() -> OnnxModel:
    """Return the graph torch writes for `x.view(x.shape[0], -1)`."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], name="shape"),
        helper.make_node("Constant", [], ["zero"], name="zero", value_int=0),
        helper.make_node("Gather", ["shape", "zero"], ["batch"], name="gather"),
        helper.make_node("Constant", [], ["axes"], name="axes", value_ints=[0]),
        helper.make_node("Unsqueeze", ["batch", "axes"], ["batch1"], name="unsqueeze"),
        helper.make_node("Constant", [], ["rest"], name="rest", value_ints=[-1]),
        helper.make_node("Concat", ["batch1", "rest"], ["target"], name="concat", axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"], name="reshape"),
    ]
    return make_model(nodes, {"x": ("float32", (2, 3, 4))}, {"y": ("float32", (2, 12))})


def test_normalise_leaves_only_the_reshape_of_static_shape_arithmetic() -> None:
    graph = normalise(shape_arithmetic().proto)
    assert operators(graph) == {"Reshape": 1}
    target = graph.proto.graph.node[0].input[1]
    assert constants(graph)[target].tolist() == [2, -1]
    assert (graph.nodes_before, graph.nodes_after) == (8, 1)


def test_normalise_does_not_change_the_model_it_is_given() -> None:
    model = shape_arithmetic()
    before = model.proto.SerializeToString()
    normalise(model.proto)
    assert model.proto.SerializeToString() == before


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"value_float": 1.5}, np.array(1.5, "float32")),
        ({"value_floats": [1.0, 2.0]}, np.array([1, 2], "float32")),
        ({"value": float_tensor([3.0])}, np.array([3], "float32")),
    ],
)
def test_normalise_makes_constants_of_every_kind_initializers(
    attribute: dict[str, object], expected: np.ndarray
) -> None:
    nodes = [
        helper.make_node("Constant", [], ["c"], **attribute),
        helper.make_node("Mul", ["x", "c"], ["y"]),
    ]
    graph = normalise(make_model(nodes, {"x": ("float32", (2,))}, {"y": ("float32", (2,))}).proto)
    assert operators(graph) == {"Mul": 1}
    (value,) = constants(graph).values()
    assert value.dtype == expected.dtype
    assert value.tolist() == expected.tolist()


def test_normalise_folds_constant_of_shape_and_masks_made_of_it() -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["ones"], value=float_tensor([1.0])),
        helper.make_node("Trilu", ["ones"], ["mask"], upper=0),
        helper.make_node("Add", ["x", "mask"], ["y"]),
    ]
    model = make_model(nodes, {"x": ("float32", (3, 3))}, {"y": ("float32", (3, 3))}, {"size": np.array([3, 3])})
    graph = normalise(model.proto)
    assert operators(graph) == {"Add": 1}
    (mask,) = constants(graph).values()
    assert mask.tolist() == np.tril(np.ones((3, 3))).tolist()


def test_normalise_inlines_functions_and_leads_their_nodes_back_to_the_call() -> None:
    function = helper.make_function(
        "local",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["s"]), helper.make_node("Neg", ["s"], ["b"])],
        [helper.make_opsetid("", 18)],
    )
    nodes = [
        helper.make_node("Twice", ["x"], ["t"], name="first", domain="local"),
        helper.make_node("Twice", ["t"], ["y"], name="second", domain="local"),
    ]
    graph = normalise(
        make_model(
            nodes,
            {"x": ("float32", (2,))},
            {"y": ("float32", (2,))},
            domains={"local": 1},
            functions=[function],
        ).proto
    )
    assert operators(graph) == {"Add": 2, "Neg": 2}
    assert not graph.proto.functions
    assert [graph.sources[node.name] for node in graph.proto.graph.node] == [("first",)] * 2 + [("second",)] * 2


def test_normalise_gives_unique_names_and_keeps_the_users_names_as_sources() -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Neg", ["a"], ["b"], name="same"),
        helper.make_node("Abs", ["b"], ["y"], name="same"),
    ]
    graph = normalise(make_model(nodes, {"x": ("float32", (2,))}, {"y": ("float32", (2,))}).proto)
    names = [node.name for node in graph.proto.graph.node]
    assert len(set(names)) == 3
    assert [graph.sources[name] for name in names] == [("Neg->a",), ("same",), ("same",)]


def test_normalise_drops_identities_and_nodes_nobody_reads() -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["a"]),
        helper.make_node("Neg", ["a"], ["unread"]),
        helper.make_node("Abs", ["a"], ["y"]),
    ]
    graph = normalise(make_model(nodes, {"x": ("float32", (2,))}, {"y": ("float32", (2,))}).proto)
    assert [(node.op_type, list(node.input)) for node in graph.proto.graph.node] == [("Abs", ["x"])]


def test_normalise_goes_on_without_a_step_that_fails_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """onnx-ir cannot drop an Identity in a branch that gives out what the whole graph gives out, too."""
    branches = {
        name: helper.make_graph(
            [helper.make_node(op, ["h"], [name])], name, [], [helper.make_tensor_value_info(name, 1, [3])]
        )
        for name, op in (("then", "Identity"), ("other", "Neg"))
    }
    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("If", ["flag"], ["y"], then_branch=branches["then"], else_branch=branches["other"]),
    ]
    specs = {"h": ("float32", (3,)), "y": ("float32", (3,))}
    model = make_model(nodes, {"x": ("float32", (3,)), "flag": ("bool", ())}, specs)
    graph = normalise(model.proto)
    assert "without the step 'drop identities', which fails on it" in caplog.text
    assert operators(graph) == {"Relu": 1, "If": 1}
    feeds = {"x": np.array([-1.0, 2.0, 3.0], "float32"), "flag": np.array(True)}
    for got, want in zip(run_relax(import_model(model), feeds), run_reference(model, feeds), strict=True):
        np.testing.assert_array_equal(got, want)


def test_normalise_keeps_symbolic_sizes_symbolic() -> None:
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Reshape", ["y", "s"], ["z"])]
    model = make_model(nodes, {"x": ("float32", ("n", 2)), "y": ("float32", ("m",))}, {"z": ("float32", ("n", 2))})
    graph = normalise(model.proto)
    assert operators(graph) == {"Shape": 1, "Reshape": 1}
    assert graph.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"


@pytest.mark.parametrize("file", sorted(path.name for path in ASSETS.glob("*.onnx")))
def test_normalised_export_computes_the_same_in_onnx_runtime(file: str) -> None:
    model = load_model(ASSETS / file)
    graph = normalise(model.proto)
    onnx.checker.check_model(graph.proto, full_check=True)
    feeds = {"input_ids": np.arange(16).reshape(1, 16), "attention_mask": np.array([[1] * 12 + [0] * 4])}
    normalised = OnnxModel(model.name, graph.proto, None, "0" * 64, model.inputs, model.outputs)
    for got, want in zip(run_reference(normalised, feeds), run_reference(model, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert graph.nodes_after <= graph.nodes_before
    left = operators(graph)
    assert not left.keys() & {"Constant", "ConstantOfShape", "Shape", "Identity"}


def test_quiet_libraries_restores_the_level_of_the_loggers() -> None:
    logger = logging.getLogger("onnxscript")
    before = logger.level
    with quiet_libraries():
        assert logger.level == logging.CRITICAL
    assert logger.level == before
