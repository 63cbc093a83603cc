"""Small models, and plans over them, that tests carry out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

PLAN = """\
name = "small"
database = "records.db"
out = "made"
samples = 1
[budget]
candidates = 6
[defaults]
targets = ["llvm"]
shapes = ["x=16x32"]
[[cells]]
models = ["first.onnx"]
importance = 3
tags = ["kept"]
[[cells]]
models = ["second.onnx", "strange.onnx"]
[[cells]]
models = ["first.onnx"]
shapes = ["x=8x32"]
limits = { max_latency_ms = 1e-6 }
"""
FIRST = '[[cells]]\nmodels = ["first.onnx"]\n'


def dense(operator: str = "Relu", seed: int = 0) -> onnx.ModelProto:
    """A dense layer and an activation."""
    weights = np.random.default_rng(seed).standard_normal((32, 64)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="dense/MatMul"),
        helper.make_node(operator, ["h"], ["y"], name="dense/activation"),
    ]
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 32))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", 64))],
        [numpy_helper.from_array(weights, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def write_models(folder: Path) -> None:
    """Write the models of `PLAN`: two that differ in their weights, and one that is none."""
    onnx.save(dense(), folder / "first.onnx")
    onnx.save(dense(seed=1), folder / "second.onnx")
    (folder / "strange.onnx").write_bytes(b"this is no model")


def plan_of(folder: Path, name: str, changes: dict[str, str] | None = None, cells: str = "") -> Path:
    """Write a plan of the same database, with artifacts of its own."""
    text = PLAN if not cells else PLAN.partition("[[cells]]")[0] + cells
    for old, new in {'"small"': f'"{name}"', '"made"': f'"{name}"', **(changes or {})}.items():
        text = text.replace(old, new)
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path
