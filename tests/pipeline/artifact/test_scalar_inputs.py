"""A graph with scalars as its inputs or outputs is compiled, validated and run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest


def test_scalar_input_reaches_the_module(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        "case",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [3]),
            helper.make_tensor_value_info("factor", TensorProto.FLOAT, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "scaled.onnx")
    compile_model(ModelRequest(tmp_path / "scaled.onnx", target="llvm"), tmp_path / "artifact", samples=1)
    got = Module.load(tmp_path / "artifact").run({"x": np.ones(3, "float32"), "factor": np.array(2.5, "float32")})
    np.testing.assert_array_equal(got["y"], np.full(3, 2.5, "float32"))


def test_scalar_constant_that_is_an_output_keeps_its_shape(tmp_path: Path) -> None:
    """As transformers' exporter writes a sliding window's length beside the caches."""
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "case",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [2]),
            helper.make_tensor_value_info("window", TensorProto.INT64, []),
        ],
        [numpy_helper.from_array(np.array(8), "window")],
    )
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "window.onnx")
    compile_model(ModelRequest(tmp_path / "window.onnx", target="llvm"), tmp_path / "artifact", samples=1)
    got = Module.load(tmp_path / "artifact").run({"x": np.ones(2, "float32")})
    assert got["window"].shape == ()
    assert got["window"] == 8
