"""LSTM, GRU and RNN of any number of steps and sequences, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model, run_relax

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def _layer(kind: str, hidden: int, *, lengths: bool = False, begins: bool = False, **attributes: Any) -> OnnxModel:
    rng, features = np.random.default_rng(hidden), 6
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    rows = GATES[kind] * hidden
    constants = {
        "w": rng.standard_normal((directions, rows, features)) * 0.3,
        "r": rng.standard_normal((directions, rows, hidden)) * 0.3,
        "b": rng.standard_normal((directions, 2 * rows)) * 0.3,
    }
    state = [directions, "batch", hidden]
    inputs: dict[str, Any] = {"x": ("float32", ["steps", "batch", features])}
    names = ["x", "w", "r", "b", "lengths" if lengths else ""]
    if lengths:
        inputs["lengths"] = ("int32", ["batch"])
    for role in "hc" if kind == "LSTM" and begins else "h" if begins else "":
        inputs[f"first_{role}"] = ("float32", state)
        names.append(f"first_{role}")
    outputs = {"y": ("float32", ["steps", directions, "batch", hidden]), "last_h": ("float32", state)}
    if kind == "LSTM":
        outputs["last_c"] = ("float32", state)
    node = helper.make_node(kind, names, list(outputs), hidden_size=hidden, **attributes)
    return make_model([node], inputs, outputs, {name: one.astype("float32") for name, one in constants.items()})


@pytest.mark.parametrize(
    ("kind", "hidden", "more"),
    [
        ("LSTM", 16, {"direction": "bidirectional", "lengths": True}),
        ("LSTM", 24, {"begins": True}),
        ("GRU", 16, {"linear_before_reset": 1, "direction": "reverse", "lengths": True, "begins": True}),
        # LLVM takes 0.2 s for it or half a minute, by the order in which the stock pipeline's code comes.
        pytest.param(
            *("GRU", 16, {"linear_before_reset": 1, "direction": "bidirectional", "lengths": True, "begins": True}),
            marks=pytest.mark.slow,
        ),
        ("RNN", 7, {"direction": "reverse", "lengths": True}),
        ("RNN", 8, {"activations": ["Relu"]}),
    ],
)
def test_layer_agrees_with_onnx_runtime(kind: str, hidden: int, more: dict[str, Any]) -> None:
    model = _layer(kind, hidden, **more)
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((6, 3, 6), dtype=np.float32), "lengths": np.array([6, 1, 4], "int32")}
    directions = 2 if more.get("direction") == "bidirectional" else 1
    for role in "hc":
        feeds[f"first_{role}"] = rng.standard_normal((directions, 3, hidden), dtype=np.float32)
    assert_agrees(model, {spec.name: feeds[spec.name] for spec in model.inputs})


def test_length_beyond_the_sequence_reads_nothing_behind_it() -> None:
    model = _layer("LSTM", 16, direction="reverse", lengths=True)
    x = np.random.default_rng(1).standard_normal((4, 2, 6), dtype=np.float32)
    graph = import_model(model)
    beyond, whole = (run_relax(graph, {"x": x, "lengths": np.full(2, n, "int32")}) for n in (1000, 4))
    for got, want in zip(beyond, whole, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("GRU", {}, "linear_before_reset"),
        ("LSTM", {"activations": ["Sigmoid", "Tanh", "Softsign"]}, "activations"),
        ("LSTM", {"input_forget": 1}, "forget gate"),
        ("LSTM", {"layout": 1}, "layout"),
    ],
)
def test_other_forms_are_refused_by_name(kind: str, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ImportFailedError, match=reason):
        import_model(_layer(kind, 8, **more))
