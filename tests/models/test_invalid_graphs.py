"""Graphs that break a rule of ONNX: the error's leaf and its message."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from relaxtune.models import load_model
from relaxtune.models.errors import InvalidModelError, ModelError, ModelShapeError, UnsupportedModelError
from tests.models.test_loading_errors import FLOAT, graph_model, relu, tensor, weight, write


def cycle() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Add", ["x", "c"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="second"),
        helper.make_node("Relu", ["b"], ["c"], name="third"),
        helper.make_node("Relu", ["c"], ["y"], name="fourth"),
    ]
    return graph_model(nodes)


def if_with_unknown_name() -> onnx.ModelProto:
    branch = helper.make_graph([relu("nowhere", "t", "inside")], "branch", [], [tensor("t")])
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch, else_branch=branch)
    return graph_model([node], inputs=[tensor("x"), tensor("c", [], TensorProto.BOOL)])


def no_opset() -> onnx.ModelProto:
    model = graph_model([relu()])
    del model.opset_import[:]
    return model


def two_opsets() -> onnx.ModelProto:
    model = graph_model([relu()])
    model.opset_import.append(helper.make_opsetid("ai.onnx", 17))
    return model


def no_output() -> onnx.ModelProto:
    model = graph_model([relu()])
    del model.graph.output[:]
    return model


def untyped_input() -> onnx.ModelProto:
    model = graph_model([relu()])
    model.graph.input[0].ClearField("type")
    return model


def unranked_input() -> onnx.ModelProto:
    model = graph_model([relu()])
    model.graph.input[0].type.tensor_type.ClearField("shape")
    return model


def unranked_output() -> onnx.ModelProto:
    model = graph_model([helper.make_node("Mystery", ["x"], ["y"], domain="com.microsoft", name="fused")])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def sequence_input() -> onnx.ModelProto:
    value = helper.make_tensor_sequence_value_info("x", FLOAT, None)
    return graph_model([helper.make_node("SequenceLength", ["x"], ["y"])], inputs=[value])


def custom_domain() -> onnx.ModelProto:
    model = graph_model([helper.make_node("Secret", ["x"], ["y"], domain="org.example", name="mine")])
    model.opset_import.append(helper.make_opsetid("org.example", 1))
    return model


def ml_without_opset() -> onnx.ModelProto:
    return graph_model([helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", name="scale")])


def short_weight() -> onnx.ModelProto:
    broken = weight()
    broken.raw_data = broken.raw_data[:-8]
    return graph_model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[broken])


def negative_weight() -> onnx.ModelProto:
    broken = weight()
    broken.dims[0] = -4
    return graph_model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[broken])


def string_weight() -> onnx.ModelProto:
    broken = helper.make_tensor("w", TensorProto.STRING, [1], [b"a"])
    return graph_model([relu()], weights=[broken])


def missing_attribute() -> onnx.ModelProto:
    return graph_model([helper.make_node("Concat", ["x", "x"], ["y"], name="cat")])


@pytest.mark.parametrize(
    ("make", "leaf", "message"),
    [
        (cycle, InvalidModelError, r"graph 'g' has a cycle: .*first \(Add\).*second \(Relu\).*; break it"),
        (lambda: graph_model([relu("z")]), InvalidModelError, r"node relu \(Relu\) reads 'z', which no input, init"),
        (if_with_unknown_name, InvalidModelError, r"node inside \(Relu\) reads 'nowhere'.*graph 'branch' defines"),
        (lambda: graph_model([relu("x", "h")]), InvalidModelError, "output 'y' of graph 'g' is produced by no node"),
        (
            lambda: graph_model([relu(), relu()]),
            InvalidModelError,
            "tensor 'y' is defined twice, .*outputs of node relu",
        ),
        (
            lambda: graph_model([relu()], inputs=[tensor("x"), tensor("x")]),
            InvalidModelError,
            "tensor 'x' is defined twice, the second time by inputs of graph 'g'",
        ),
        (
            lambda: graph_model([relu()], weights=[weight(), weight()]),
            InvalidModelError,
            "tensor 'w' is defined twice, .*initializers of graph 'g'; rename one",
        ),
        (
            lambda: graph_model([relu()], weights=[weight("x"), weight("x")]),
            InvalidModelError,
            "tensor 'x' is defined twice, by two initializers of graph 'g'",
        ),
        (no_opset, InvalidModelError, "declares no opset for the standard domain"),
        (two_opsets, InvalidModelError, "declares an opset twice"),
        (no_output, InvalidModelError, "graph 'g' has no output"),
        (untyped_input, InvalidModelError, "input 'x' has no type; declare its dtype and shape"),
        (short_weight, InvalidModelError, r"initializer 'w' holds 56 bytes, but FLOAT \[4, 4\] takes 64"),
        (negative_weight, InvalidModelError, r"initializer 'w' has the dims \[-4, 4\]"),
        (string_weight, InvalidModelError, "initializer 'w' has the dtype STRING, expected numbers or bool"),
        (missing_attribute, InvalidModelError, "graph 'g' is not valid ONNX: .*axis.*fix the export"),
        (ml_without_opset, InvalidModelError, r"node scale \(Scaler\) is of the domain 'ai.onnx.ml', but .* no opset"),
        (lambda: graph_model([relu()], ir_version=2), InvalidModelError, r"IR version 2, expected 3 to \d+"),
        (lambda: graph_model([relu()], ir_version=99), UnsupportedModelError, r"IR version 99, .*up to \d+"),
        (
            lambda: graph_model([relu()], opset=999),
            UnsupportedModelError,
            r"opset 999, .*1 to \d+; export it with opset_v",
        ),
        (lambda: graph_model([relu()], opset=-1), UnsupportedModelError, "declares opset -1"),
        (
            lambda: graph_model([helper.make_node("Rleu", ["x"], ["y"], name="typo")]),
            UnsupportedModelError,
            r"node typo \(Rleu\) is an unknown operator in opset 18 of the domain 'ai.onnx'; it is no standard ONNX",
        ),
        (
            lambda: graph_model([helper.make_node("Swish", ["x"], ["y"], name="new")]),
            UnsupportedModelError,
            r"node new \(Swish\) is an unknown operator in opset 18 .* it exists in opset 24: export the model with",
        ),
        (custom_domain, UnsupportedModelError, r"node mine \(Secret\) is of the domain 'org.example', .*com.microsoft"),
        (sequence_input, UnsupportedModelError, "input 'x' is a sequence, expected a tensor"),
        (unranked_input, UnsupportedModelError, "input 'x' has no shape, not even a rank"),
        (unranked_output, UnsupportedModelError, "output 'y' has no shape, not even a rank"),
        (
            lambda: graph_model([relu()], inputs=[tensor("x", None, TensorProto.STRING)]),
            UnsupportedModelError,
            r"input 'x' holds text \(STRING\), which is not supported; make numbers of it before the model",
        ),
        (
            lambda: graph_model([relu()], inputs=[tensor("x", None, 77)]),
            UnsupportedModelError,
            "input 'x' has element type 77",
        ),
        (lambda: graph_model([relu()], inputs=[tensor("x", [0, 4])]), ModelShapeError, "axis 0 of input 'x' is 0, exp"),
        (lambda: graph_model([relu()], outputs=[tensor("y", [0, 4])]), ModelShapeError, "axis 0 of output 'y' is 0"),
        (
            lambda: graph_model([relu()], outputs=[tensor("y", None, TensorProto.INT64)]),
            InvalidModelError,
            "graph 'g' has types or shapes that do not agree: .*fix the export",
        ),
        (
            lambda: graph_model(
                [helper.make_node("Add", ["x", "i"], ["y"], name="mixed")],
                inputs=[tensor("x"), tensor("i", None, TensorProto.INT64)],
            ),
            InvalidModelError,
            "types or shapes that do not agree: .*Add",
        ),
        (
            lambda: graph_model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[weight(shape=(5, 4))]),
            InvalidModelError,
            "types or shapes that do not agree: .*MatMul",
        ),
    ],
)
def test_graph_that_breaks_a_rule_is_refused(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], leaf: type[ModelError], message: str
) -> None:
    path = write(tmp_path, make())
    with pytest.raises(leaf, match=message) as caught:
        load_model(path)
    assert type(caught.value) is leaf
    assert os.listdir(tmp_path) == ["model.onnx"]
