from __future__ import annotations

from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T, helper

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.importer.converters.matmuls import unpack_weights
from relaxtune.pipeline.onnx_runtime import graph as graph_module
from relaxtune.pipeline.onnx_runtime.graph import SplitGraph
from relaxtune.pipeline.precision.graph_dtypes import compute_dtype, computes_in_half
from relaxtune.pipeline.validate.reference import Reference, peer_session
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.pipeline.validate.upcast import upcast_to_float32
from tests.pipeline.importer.onnx_cases import make_model


def save(tmp_path: Path, nodes: list[onnx.NodeProto], **signature: object) -> OnnxModel:
    weight = onnx.numpy_helper.from_array(np.full((4,), 1 / 3, np.float16), "w")
    graph = helper.make_graph(nodes, "g", signature["inputs"], signature["outputs"], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx")
    return load_model(tmp_path / "m.onnx")


@pytest.fixture
def half_model(tmp_path: Path) -> OnnxModel:
    """Half precision in a weight, a Constant, a Cast, the input, both branches of an If, and the outputs."""
    then = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["t"])], "then", [], [helper.make_tensor_value_info("t", T.FLOAT16, [4])]
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["e"])], "else", [], [helper.make_tensor_value_info("e", T.FLOAT16, [4])]
    )
    tiny = onnx.numpy_helper.from_array(np.asarray(2e-5, np.float16), "tiny")
    nodes = [
        helper.make_node("Constant", [], ["c"], value=tiny),
        helper.make_node("If", ["flag"], ["scaled"], then_branch=then, else_branch=other),
        helper.make_node("Add", ["scaled", "c"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["single"], to=T.FLOAT),
        helper.make_node("Cast", ["single"], ["y"], to=T.FLOAT16),
        helper.make_node("Identity", ["x"], ["same"]),
    ]
    return save(
        tmp_path,
        nodes,
        inputs=[helper.make_tensor_value_info("x", T.FLOAT16, [4]), helper.make_tensor_value_info("flag", T.BOOL, [])],
        outputs=[
            helper.make_tensor_value_info("y", T.FLOAT16, [4]),
            helper.make_tensor_value_info("same", T.FLOAT16, [4]),
        ],
    )


@pytest.mark.parametrize("flag", [True, False])
def test_half_precision_is_computed_in_float32(half_model: OnnxModel, flag: bool) -> None:
    reference = Reference(half_model)
    assert reference.upcast
    assert "half precision rewritten to float32" in reference.description
    x = np.asarray([1.0, 3.0, -5.0, 7.0], np.float16)
    got = reference.run({"x": x, "flag": np.asarray(flag)})
    third, tiny = np.float32(np.float16(1 / 3)), np.float32(np.float16(2e-5))
    exact = (x.astype(np.float32) * third if flag else -x.astype(np.float32)) + tiny
    assert got["y"].dtype == np.float32
    np.testing.assert_allclose(got["y"], exact, rtol=1e-6)
    np.testing.assert_array_equal(got["same"], x.astype(np.float32))


def test_an_input_returned_as_it_is_keeps_its_name_when_upcast(tmp_path: Path) -> None:
    model = save(
        tmp_path,
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        inputs=[helper.make_tensor_value_info("x", T.FLOAT16, [4])],
        outputs=[helper.make_tensor_value_info("y", T.FLOAT16, [4])],
    )
    graph = upcast_to_float32(model.inline_proto()).graph
    assert [value.name for value in graph.input] == ["x"]
    assert graph.input[0].type.tensor_type.elem_type == T.FLOAT16
    assert graph.output[0].type.tensor_type.elem_type == T.FLOAT
    assert model.proto.graph.initializer[0].data_type == T.FLOAT16


def test_a_zoo_model_in_half_precision_runs() -> None:
    model = load_model("bert-tiny", shapes=dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 8)))
    assert not computes_in_half(model)
    assert compute_dtype(model) == "float32"
    reference = Reference(model)
    assert not reference.upcast
    outputs = reference.run(random_inputs(model, seed=0))
    assert list(outputs) == [spec.name for spec in model.outputs]


def test_large_weights_are_read_where_they_lie(bert_tiny: OnnxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(bert_tiny, seed=0)
    split = SplitGraph(bert_tiny.inline_proto())
    assert len(split.graph) < split.weights.where.size / 10
    got = Reference(bert_tiny).run(inputs)
    monkeypatch.setattr(graph_module, "_SHARED_TYPES", frozenset())
    monkeypatch.setattr(SplitGraph, "_living", WeakValueDictionary())
    within = Reference(bert_tiny).run(inputs)
    assert all(np.array_equal(got[name], within[name]) for name in within)


def test_the_peer_and_the_reference_of_a_model_share_its_weights(bert_tiny: OnnxModel) -> None:
    peer, reference = peer_session(bert_tiny, 1), Reference(bert_tiny)
    assert reference._loaded is not None
    assert peer._graph is reference._loaded[1]._graph
    assert peer._graph.weights.where.places


def test_large_weights_that_no_node_reads_do_no_harm(bert_tiny: OnnxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    unread = onnx.ModelProto()
    unread.CopyFrom(bert_tiny.inline_proto())
    large = np.zeros((graph_module._LARGE_BYTES,), np.float32)
    unread.graph.initializer.append(onnx.numpy_helper.from_array(large, "left_behind"))
    monkeypatch.setattr(type(bert_tiny), "inline_proto", lambda _: unread)
    assert peer_session(bert_tiny, 1).providers


def test_a_model_that_onnx_runtime_refuses_is_named(bert_tiny: OnnxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = onnx.ModelProto()
    broken.CopyFrom(bert_tiny.inline_proto())
    broken.graph.node[0].op_type = "NoSuchOperator"
    monkeypatch.setattr(type(bert_tiny), "inline_proto", lambda _: broken)
    with pytest.raises(PipelineError, match=r"ONNX Runtime .* does not load the model 'bert-tiny'"):
        peer_session(bert_tiny, 1)


def test_known_samples_are_not_computed_again_and_others_still_are(half_model: OnnxModel) -> None:
    flag, plain = np.asarray(True), Reference(half_model)
    first, second = ({"x": np.full(4, value, np.float16), "flag": flag} for value in (1.0, 2.0))
    known = Reference(half_model)
    known.remember([first])
    assert known._loaded is None
    for inputs in (first, second, {**first, "flag": np.asarray(False)}):
        for name, want in plain.run(inputs).items():
            np.testing.assert_array_equal(known.run(inputs)[name], want)
    assert known._loaded is not None


def test_activations_of_4_bit_matmuls_are_not_rounded_to_8_bits(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    packed, scales = draw.integers(0, 256, (8, 2, 16), np.uint8), draw.random(16, np.float32)
    node = helper.make_node(
        "MatMulNBits", ["x", "p", "s"], ["y"], domain="com.microsoft", K=64, N=8, bits=4, block_size=32,
        accuracy_level=4,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", T.FLOAT, [4, 64])], [helper.make_tensor_value_info("y", T.FLOAT, [4, 8])],
        [onnx.numpy_helper.from_array(one, name) for one, name in ((packed, "p"), (scales, "s"))],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    model = load_model(tmp_path / "m.onnx")
    x = draw.standard_normal((4, 64)).astype(np.float32)
    weight = unpack_weights(packed, scales, None, rows=8, columns=64, bits=4, block=32)
    exact = x.astype(np.float64) @ weight.T
    assert np.abs(Reference(model).run({"x": x})["y"] - exact).max() < 1e-4
    # What a user would run instead rounds.
    assert np.abs(peer_session(model, 1).run(["y"], {"x": x})[0] - exact).max() > 1e-2


def test_numbers_that_decide_sizes_are_not_rounded_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    """A scale of 2 that is rounded down makes 19 of 10 places, and what follows does not fit."""
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["large"], mode="nearest"),
        helper.make_node("Add", ["large", "z"], ["y"]),
    ]
    inputs = {"x": ("float32", (1, 1, 10, 10)), "z": ("float32", (1, 1, 20, 20))}
    result = {"y": ("float32", (1, 1, 20, 20))}
    scales = np.array([1, 1, 2, 2], "float32")
    feeds = {
        name: np.random.default_rng(0).standard_normal(shape).astype("float32") for name, (_, shape) in inputs.items()
    }
    plain = Reference(make_model(nodes, inputs, result, {"scales": scales}))
    assert 0 < plain.moves(feeds, 2.0**-24, Tolerance(1e-4, 1e-4))["y"].largest < 1e-5
    assert "is skipped" not in caplog.text
    # Here the scale is computed, and rounded: that answer is left out.
    nodes.insert(0, helper.make_node("Mul", ["half", "four"], ["scales"]))
    constants = {"half": scales / 4, "four": np.array(4, "float32")}
    with caplog.at_level("INFO"):
        computed = Reference(make_model(nodes, inputs, result, constants)).moves(feeds, 2.0**-10, Tolerance(1e-4, 1e-4))
    assert computed["y"].largest < 1e-5
    assert "is skipped" in caplog.text


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Pow", ["x", "three"], ["cubes"]), helper.make_node("ReduceSum", ["cubes"], ["y"])],
        # As decoders mask: what is kept gets 0 times the least number.
        [
            helper.make_node("Mul", ["zeros", "least"], ["mask"]),
            helper.make_node("Add", ["x", "mask"], ["masked"]),
            helper.make_node("ReduceSum", ["masked"], ["y"]),
        ],
    ],
    ids=["an exponent", "the least number"],
)
def test_numbers_that_may_not_be_rounded_make_no_answer_nan(nodes: list[onnx.NodeProto]) -> None:
    x = np.random.default_rng(0).standard_normal(64).astype("float32")
    spec = ("float32", (64,))
    constants = {"three": np.array(3, "float32"), "least": np.full(64, np.finfo("float32").min)}
    used = {name: value for name, value in constants.items() if any(name in node.input for node in nodes)}
    model = make_model(nodes, {"x": spec, "zeros": spec}, {"y": ("float32", (1,))}, used)
    moved = Reference(model).moves({"x": x, "zeros": np.zeros(64, "float32")}, 2.0**-24, Tolerance(1e-4, 1e-4))["y"]
    assert 0 < moved.largest < 1e-4
