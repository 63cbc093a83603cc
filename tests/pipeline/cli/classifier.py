"""The small model that the commands are tried on."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CLASSES = 8


def classifier(bias: float = 0.5) -> onnx.ModelProto:
    """Two dense layers and a softmax over 8 classes."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((32, 64)).astype(np.float32),
        "b1": np.full((64,), bias, np.float32),
        "w2": rng.standard_normal((64, CLASSES)).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h1"], name="first/MatMul"),
        helper.make_node("Add", ["h1", "b1"], ["h2"], name="first/Add"),
        helper.make_node("Relu", ["h2"], ["h3"], name="first/Relu"),
        helper.make_node("MatMul", ["h3", "w2"], ["logits"], name="second/MatMul"),
        helper.make_node("Softmax", ["logits"], ["scores"], name="scores", axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 32))],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ("batch", CLASSES))],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
