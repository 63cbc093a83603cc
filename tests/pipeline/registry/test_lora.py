"""LoRA adapters are merged into the weights that their layers have in a graph, or refused by the layer's name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.registry.lora import ADAPTER_FILE, CONFIG_FILE, merge_lora

WIDTHS = (6, 5, 4, 3)
LAYERS = ("model.layers.0.q_proj", "model.layers.0.o_proj", "model.layers.1.q_proj")


@pytest.fixture
def model(tmp_path: Path) -> OnnxModel:
    """Return three layers, in the forms that exporters write: turned in the graph, a Gemm, and without a name."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape).astype("float32") for shape in zip(WIDTHS[1:], WIDTHS[:-1], strict=True)]
    nodes = [
        helper.make_node("Transpose", ["model.layers.0.q_proj.weight"], ["turned"], perm=[1, 0], name="n0"),
        helper.make_node("MatMul", ["x", "turned"], ["a"], name="n1"),
        helper.make_node("Gemm", ["a", "layers.0.o_proj.weight"], ["b"], transB=1, name="n2"),
        helper.make_node("MatMul", ["b", "onnx::MatMul_7"], ["y"], name="/base/model/layers.1/q_proj/MatMul"),
    ]
    stored = {
        "model.layers.0.q_proj.weight": weights[0],
        "layers.0.o_proj.weight": weights[1],
        "onnx::MatMul_7": weights[2].T.copy(),
    }
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, WIDTHS[0]))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, WIDTHS[-1]))],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    path = tmp_path / "layers.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return load_model(path)


def halves(number: int, rank: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number + 1)
    shapes = (rank, WIDTHS[number]), (WIDTHS[number + 1], rank)
    return rng.standard_normal(shapes[0]).astype("float32"), rng.standard_normal(shapes[1]).astype("float32")


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    if tensors is None:
        tensors = {}
        for number, layer in enumerate(LAYERS):
            for part, array in zip("AB", halves(number), strict=True):
                tensors[f"base_model.model.{layer}.lora_{part}.weight"] = array
    save_file(tensors, folder / ADAPTER_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"lora_alpha": 3, **config}))
    return folder


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (1.5, 1.5, 1.5)),
        ({"use_rslora": True}, (3 / np.sqrt(2),) * 3),
        ({"alpha_pattern": {"layers.0.o_proj": 8}}, (1.5, 4, 1.5)),
    ],
)
def test_layers_are_found_by_weight_or_node_and_either_way_round(
    model: OnnxModel, tmp_path: Path, config: dict[str, object], scales: tuple[float, ...]
) -> None:
    merged = merge_lora(model, write(tmp_path, **config))
    names = ("model.layers.0.q_proj.weight", "layers.0.o_proj.weight", "onnx::MatMul_7")
    for number, (name, scale) in enumerate(zip(names, scales, strict=True)):
        a, b = halves(number)
        change = merged.array(name) - model.array(name)
        np.testing.assert_allclose(change.T if number == 2 else change, scale * (b @ a), rtol=1e-4, atol=1e-6)
    assert merged.sha256 != model.sha256
    assert (merged.inputs, merged.outputs) == (model.inputs, model.outputs)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (
            {"other.lora_A.weight": np.ones((2, 6)), "other.lora_B.weight": np.ones((5, 2))},
            "other is no matmul's weight",
        ),
        ({"q_proj.lora_A.weight": np.ones((2, 6)), "q_proj.lora_B.weight": np.ones((5, 2))}, "q_proj is 2 weights"),
        (
            {f"{LAYERS[0]}.lora_A.weight": np.ones((2, 5)), f"{LAYERS[0]}.lora_B.weight": np.ones((6, 2))},
            r"q_proj\.weight is float32 \(5, 6\), expected a float \(6, 5\)",
        ),
        ({f"{LAYERS[0]}.lora_A.weight": np.ones((2, 6))}, r"has lora_A \(2, 6\); expected A \[rank, in\] and B"),
        ({"embed.lora_embedding_A": np.ones((2, 6))}, "holds embed.lora_embedding_A, expected lora_A and lora_B"),
        ({}, "holds nothing"),
    ],
)
def test_what_does_not_fit_is_named(
    model: OnnxModel, tmp_path: Path, tensors: dict[str, np.ndarray], said: str
) -> None:
    with pytest.raises(ArtifactError, match=said):
        merge_lora(model, write(tmp_path, tensors))


def test_an_adapter_without_its_config_or_of_another_kind_is_refused(model: OnnxModel, tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"not of a plain LoRA adapter: expected a number lora_alpha and no use_dora"
    ):
        merge_lora(model, write(tmp_path, use_dora=True))
    (tmp_path / CONFIG_FILE).unlink()
    with pytest.raises(
        ArtifactError, match=r"adapter_config\.json, which has the adapter's lora_alpha, cannot be read"
    ):
        merge_lora(model, tmp_path)
    (tmp_path / ADAPTER_FILE).write_bytes(b"no tensors")
    with pytest.raises(ArtifactError, match=r"cannot be read: .*; name the \.safetensors file that PEFT wrote"):
        merge_lora(model, tmp_path)
