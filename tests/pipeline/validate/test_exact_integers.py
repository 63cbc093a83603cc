"""The reference of graphs with 8-bit integers is exact on processors where ONNX Runtime's own sums saturate."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.validate.exact_integers import with_unsigned_weights
from relaxtune.pipeline.validate.reference import Reference
from tests.pipeline.importer.onnx_cases import make_model

RNG = np.random.default_rng(0)
ACTIVATIONS = RNG.integers(200, 256, (5, 64)).astype(np.uint8)
WEIGHTS = RNG.integers(100, 128, (64, 6)).astype(np.int8)


def matmul(
    activations: str = "uint8", zeros: tuple[str, ...] = (), constants: dict[str, np.ndarray] | None = None
) -> OnnxModel:
    given = constants or {}
    inputs = {"a": (activations, (5, 64)), "b": ("int8", (64, 6)), "zb": ("int8", (6,))}
    named = ["a", "b", *zeros]
    return make_model(
        [helper.make_node("MatMulInteger", named, ["y"])],
        {name: spec for name, spec in inputs.items() if name in named and name not in given},
        {"y": ("int32", (5, 6))},
        given,
    )


def types_of_weights(model: OnnxModel) -> set[int]:
    graph = onnx.shape_inference.infer_shapes(with_unsigned_weights(model.proto)).graph
    types = {one.name: one.data_type for one in graph.initializer}
    types |= {one.name: one.type.tensor_type.elem_type for one in (*graph.input, *graph.value_info)}
    return {types[node.input[place]] for node in graph.node if node.op_type == "MatMulInteger" for place in (1, 3)}


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("zero", [True, False])
def test_reference_of_large_products_is_exact(constant: bool, zero: bool) -> None:
    zeros = np.arange(-3, 3).astype(np.int8)
    given = {"b": WEIGHTS, **({"zb": zeros} if zero else {})}
    model = matmul(zeros=("", "zb") if zero else (), constants=given if constant else None)
    feeds = {"a": ACTIVATIONS, **({} if constant else given)}
    wanted = ACTIVATIONS.astype(np.int64) @ (WEIGHTS.astype(np.int64) - (zeros if zero else 0))
    np.testing.assert_array_equal(Reference(model).run(feeds)["y"], wanted)
    assert types_of_weights(model) == {TensorProto.UINT8}


def test_signed_activations_keep_their_signed_weights() -> None:
    model = matmul("int8", constants={"b": WEIGHTS})
    assert with_unsigned_weights(model.proto).graph.initializer[0].data_type == TensorProto.INT8
    signed = (ACTIVATIONS.astype(np.int16) - 128).astype(np.int8)
    wanted = signed.astype(np.int64) @ WEIGHTS.astype(np.int64)
    np.testing.assert_array_equal(Reference(model).run({"a": signed})["y"], wanted)


def test_weights_that_two_matmuls_share_are_changed_once_and_others_that_read_them_keep_theirs() -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["a", "s", "z"]),
        helper.make_node("MatMulInteger", ["a", "b", "z"], ["one"]),
        helper.make_node("Transpose", ["a"], ["t"], perm=[1, 0]),
        helper.make_node("Transpose", ["t"], ["u"], perm=[1, 0]),
        helper.make_node("MatMulInteger", ["u", "b"], ["two"]),
        helper.make_node("Cast", ["b"], ["shown"], to=TensorProto.INT32),
    ]
    outputs = {"one": ("int32", (5, 6)), "two": ("int32", (5, 6)), "shown": ("int32", (64, 6))}
    model = make_model(nodes, {"x": ("float32", (5, 64))}, outputs, {"b": WEIGHTS})
    exact = with_unsigned_weights(model.proto).graph
    assert sorted(one.name for one in exact.initializer) == ["b", "b__unsigned", "zero__unsigned"]
    x = np.where(RNG.random((5, 64)) < 0.1, 0.0, 1.0).astype(np.float32)
    found = Reference(model).run({"x": x})
    wanted = (x * 255).astype(np.int64) @ WEIGHTS.astype(np.int64)
    np.testing.assert_array_equal(found["one"], wanted)
    np.testing.assert_array_equal(found["two"], wanted)
    np.testing.assert_array_equal(found["shown"], WEIGHTS)


def test_a_graph_without_8_bit_products_is_left_as_it_is() -> None:
    constant = {"b": numpy_helper.to_array(numpy_helper.from_array(np.ones((64, 6), np.float32)))}
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    model = make_model([node], {"a": ("float32", (5, 64))}, {"y": ("float32", (5, 6))}, constant)
    assert with_unsigned_weights(model.proto) is model.proto
