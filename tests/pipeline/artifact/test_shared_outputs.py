"""Outputs of `run_device` belong to the caller: writing one changes neither the model nor the inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest

FLOAT = TensorProto.FLOAT
WEIGHT = np.arange(16, dtype=np.float32).reshape(4, 4)


def save_graph(path: Path, batch: int | str) -> None:
    """Outputs: an input, the input reshaped, a weight, it reshaped, a product, it again, it reshaped."""
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Reshape", ["x", "flat"], ["reshaped"]),
        helper.make_node("Identity", ["w"], ["weight"]),
        helper.make_node("Reshape", ["w", "flat"], ["weight_reshaped"]),
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Identity", ["product"], ["again"]),
        helper.make_node("Reshape", ["product", "flat"], ["product_reshaped"]),
    ]
    shapes = {"same": [batch, 4], "weight": [4, 4], "product": [batch, 4], "again": [batch, 4]}
    outputs = [
        helper.make_tensor_value_info(node.output[0], FLOAT, shapes.get(node.output[0], [None])) for node in nodes
    ]
    weights = [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(np.array([-1], np.int64), "flat")]
    inputs = [helper.make_tensor_value_info("x", FLOAT, [batch, 4])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.mark.parametrize(("batch", "embedded"), [(2, False), ("batch", False), (2, True)])
def test_outputs_written_by_the_caller_change_nothing(tmp_path: Path, batch: int | str, embedded: bool) -> None:
    save_graph(tmp_path / "m.onnx", batch)
    lowering = LoweringOptions(embed_weights=embedded)
    compile_model(ModelRequest(tmp_path / "m.onnx", target="llvm", lowering=lowering), tmp_path / "a", samples=1)
    module = Module.load(tmp_path / "a")
    x = np.ones((2, 4), np.float32)
    expected = module.run({"x": x})
    np.testing.assert_array_equal(expected["weight"], WEIGHT)
    given = module.to_device({"x": x})
    for _ in range(2):
        outputs = module.run_device(given)
        for output in outputs:
            others = [other.numpy() for other in outputs if other is not output]
            output.copyfrom(np.full(output.shape, -1.0, np.float32))
            for before, other in zip(others, (o for o in outputs if o is not output), strict=True):
                np.testing.assert_array_equal(other.numpy(), before)
        np.testing.assert_array_equal(given[0].numpy(), x)
        for name, array in module.run({"x": x}).items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
