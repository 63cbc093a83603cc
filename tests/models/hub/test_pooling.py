"""Pooling inside the graph, beside numpy; folders whose pooling is not known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from relaxtune.models.errors import ModelFileError, UnsupportedModelError
from relaxtune.models.hub.pooling import Pooling, pool, read_pooling

MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])


def encoder(opset: int = 17) -> onnx.ModelProto:
    """Return a graph whose hidden states are its input."""
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
    g (float[b, s, 6] x, int64[b, s] attention_mask) => (float[b, s, 6] last_hidden_state) {{
        last_hidden_state = Identity(x)
    }}"""
    return parser.parse_model(text)


def expected(hidden: np.ndarray, pooling: Pooling) -> np.ndarray:
    rows = range(len(hidden))
    vectors = {
        "mean": [hidden[row][MASK[row] == 1].mean(axis=0) for row in rows],
        "cls": [hidden[row, 0] for row in rows],
        "lasttoken": [hidden[row, np.flatnonzero(MASK[row])[-1]] for row in rows],
    }[pooling.mode]
    found = np.stack(vectors)
    return found / np.linalg.norm(found, axis=1, keepdims=True) if pooling.normalise else found


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_pooled_graph_gives_the_vector_of_each_row(mode: str, normalise: bool, opset: int) -> None:
    model, pooling = encoder(opset), Pooling(mode, normalise)
    pool(model, pooling)
    onnx.checker.check_model(model, full_check=True)
    hidden = np.random.default_rng(0).normal(size=(3, 5, 6)).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString())
    (got,) = session.run(None, {"x": hidden, "attention_mask": MASK})
    assert [one.name for one in session.get_outputs()] == ["sentence_embedding"]
    assert session.get_outputs()[0].shape == ["b", 6]
    np.testing.assert_allclose(got, expected(hidden, pooling), rtol=1e-5, atol=1e-6)


def test_graph_that_pools_itself_keeps_that_output_alone() -> None:
    model = encoder()
    pool(model, Pooling())
    nodes = len(model.graph.node)
    pool(model, Pooling("cls"))
    assert len(model.graph.node) == nodes


def test_graph_without_a_mask_is_refused() -> None:
    model = encoder()
    model.graph.input.pop()
    with pytest.raises(UnsupportedModelError, match="expected an input attention_mask and an output"):
        pool(model, Pooling())


def folder_of(tmp_path: Path, modules: list[str], config: dict[str, object]) -> Path:
    entries = [{"path": name if number else "", "type": f"s.models.{name}"} for number, name in enumerate(modules)]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 6}, "lasttoken"),
    ],
)
def test_pooling_is_that_of_the_folder(tmp_path: Path, config: dict[str, object], mode: str) -> None:
    assert read_pooling(tmp_path) is None
    folder = folder_of(tmp_path, ["Transformer", "Pooling"], config)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    assert read_pooling(folder) == Pooling(mode, normalise=False, max_tokens=77)


def test_unknown_pooling_modules_and_files_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, ["Transformer", "Pooling", "Dense"], {"pooling_mode_max_tokens": True})
    with pytest.raises(UnsupportedModelError, match="module Dense behind its encoder"):
        read_pooling(folder)
    folder_of_max = folder / "max"
    folder_of_max.mkdir()
    folder_of(folder_of_max, ["Transformer", "Pooling"], {"pooling_mode_max_tokens": True})
    with pytest.raises(UnsupportedModelError, match="pooling max_tokens; expected one of mean, cls, lasttoken"):
        read_pooling(folder_of_max)
    (folder / "modules.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"modules\.json cannot be read as JSON"):
        read_pooling(folder)
