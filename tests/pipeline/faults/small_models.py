"""Models of one layer, small enough to be compiled and bisected in a second or two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.zoo.bert import BertConfig, build_bert
from relaxtune.models.zoo.gpt2 import Gpt2Config, build_gpt2
from relaxtune.models.zoo.graph import Precision
from relaxtune.models.zoo.llama import LlamaConfig, build_llama

_DIMS: dict[str, int | str] = {"batch": 2, "sequence": 12, "past_sequence": 7}
_SYMBOLIC: dict[str, int | str] = {"batch": "batch", "sequence": "sequence"}
# Weights large enough that attention is not uniform: else a fault in the scores would not be seen.
_BERT = BertConfig(layers=1, hidden=64, heads=2, ffn=128, vocab=96, init_std=0.1)
_GPT2 = Gpt2Config(layers=1, hidden=64, heads=2, vocab=96, max_positions=32, init_std=0.1)
_LLAMA = LlamaConfig(layers=1, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=96, init_std=0.1)


def _windowed() -> onnx.ModelProto:
    """Return one head of attention with a sliding window of three positions."""
    rng = np.random.default_rng(3)
    size, length = 16, 12
    i, j = np.indices((length, length))
    constants = {
        "window": (j <= i) & (j > i - 3),
        "masked": np.float32(-1e9),
        "scale": np.float32(0.25),
        **{f"w_{name}": rng.normal(0, 0.4, (size, size)).astype(np.float32) for name in "qkvo"},
    }
    nodes = [
        *(helper.make_node("MatMul", ["x", f"w_{name}"], [name], name=f"/{name}/MatMul") for name in "qkv"),
        helper.make_node("Transpose", ["k"], ["kt"], name="/Transpose", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["products"], name="/scores/MatMul"),
        helper.make_node("Mul", ["products", "scale"], ["scores"], name="/scores/Mul"),
        helper.make_node("Where", ["window", "scores", "masked"], ["kept"], name="/Where"),
        helper.make_node("Softmax", ["kept"], ["weights"], name="/Softmax", axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["context"], name="/context/MatMul"),
        helper.make_node("MatMul", ["context", "w_o"], ["y"], name="/out/MatMul"),
    ]
    return _model("windowed", nodes, {"x": [2, length, size]}, {"y": [2, length, size]}, constants)


def _rounded() -> onnx.ModelProto:
    """Return a look-up in a table of buckets, the bucket rounded from a float."""
    rng = np.random.default_rng(4)
    constants = {
        "steps": np.float32(3.0),
        "last": np.float32(11.0),
        "first": np.float32(0.0),
        "table": rng.normal(0, 1, (12, 16)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Abs", ["x"], ["size"], name="/Abs"),
        helper.make_node("Mul", ["size", "steps"], ["scaled"], name="/Mul"),
        helper.make_node("Clip", ["scaled", "first", "last"], ["clipped"], name="/Clip"),
        helper.make_node("Round", ["clipped"], ["rounded"], name="/Round"),
        helper.make_node("Cast", ["rounded"], ["bucket"], name="/Cast", to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "bucket"], ["y"], name="/Gather"),
    ]
    return _model("rounded", nodes, {"x": [4, 8]}, {"y": [4, 8, 16]}, constants)


def _deep_sum() -> onnx.ModelProto:
    """Return a matmul with sums of 16384 products in half precision, and what follows it."""
    rng = np.random.default_rng(5)
    constants = {"w": rng.normal(0, 0.01, (16384, 16)).astype(np.float16)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["summed"], name="/MatMul"),
        helper.make_node("Relu", ["summed"], ["y"], name="/Relu"),
    ]
    return _model("deep-sum", nodes, {"x": [4, 16384]}, {"y": [4, 16]}, constants, TensorProto.FLOAT16)


def _model(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int]],
    outputs: dict[str, list[int]],
    constants: dict[str, np.ndarray],
    dtype: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(which, dtype, shape) for which, shape in inputs.items()],
        [helper.make_tensor_value_info(which, dtype, shape) for which, shape in outputs.items()],
        [numpy_helper.from_array(np.asarray(array), which) for which, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


_BUILDERS: dict[str, Callable[[], onnx.ModelProto]] = {
    "bert": lambda: build_bert("bert", _BERT, _DIMS, Precision.FP32, 0),
    "bert-fp16": lambda: build_bert("bert", _BERT, _DIMS, Precision.FP16, 0),
    "bert-symbolic": lambda: build_bert("bert", _BERT, _SYMBOLIC, Precision.FP32, 0),
    "gpt2": lambda: build_gpt2("gpt2", _GPT2, _DIMS, Precision.FP32, 0),
    "llama": lambda: build_llama("llama", _LLAMA, _DIMS, Precision.FP32, 0),
    "llama-decode": lambda: build_llama("llama", _LLAMA, _DIMS, Precision.FP32, 0, decode=True),
    "windowed": _windowed,
    "rounded": _rounded,
    "deep-sum": _deep_sum,
}


def make_model(name: str, folder: Path) -> OnnxModel:
    """Return one of the models, written into a folder as a user's file would be."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        onnx.save(_BUILDERS[name](), str(path))
    return load_model(path)
