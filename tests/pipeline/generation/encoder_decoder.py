"""A small encoder-decoder as three files, without torch, and its tokens by ONNX Runtime."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, helper

from tests.pipeline.importer.onnx_cases import make_model

HEADS, WIDTH, WORDS, START = 2, 8, 32, 7
_HIDDEN = HEADS * WIDTH
_SIDES = ("key", "value")


def _node(operator: str, inputs: str, output: str, **attributes: object) -> NodeProto:
    return helper.make_node(operator, inputs.split(), [output], **attributes)


def _heads(source: str, name: str) -> list[NodeProto]:
    split, turned = _node("Reshape", f"{source} split", f"{name}_split"), {"perm": [0, 2, 1, 3]}
    return [split, _node("Transpose", f"{name}_split", name, **turned)]


def _attention(key: str, value: str, prefix: str, mask: str = "") -> list[NodeProto]:
    return [
        _node("Transpose", key, f"{prefix}_turned", perm=[0, 1, 3, 2]),
        _node("MatMul", f"query {prefix}_turned", f"{prefix}_products"),
        _node("Add", f"{prefix}_products {mask or 'zero'}", f"{prefix}_scores"),
        _node("Softmax", f"{prefix}_scores", f"{prefix}_weights", axis=-1),
        _node("MatMul", f"{prefix}_weights {value}", f"{prefix}_mixed"),
    ]


def _decoder(*, past: bool) -> onnx.ModelProto:
    """Return the decoder with past, or that of a prompt, which makes keys and values of the encoder's output."""
    draw = np.random.default_rng(1)
    cross = {side: f"past_key_values.0.encoder.{side}" if past else f"present.0.encoder.{side}" for side in _SIDES}
    own = {side: f"present.0.decoder.{side}" for side in _SIDES}
    nodes = [_node("Gather", "words input_ids", "x")]
    for name in ("query", *_SIDES):
        nodes += [
            _node("MatMul", f"x weights_{name}", f"x_{name}"),
            *_heads(f"x_{name}", "query" if name == "query" else f"new_{name}"),
        ]
    for side in _SIDES:
        if past:
            nodes.append(_node("Concat", f"past_key_values.0.decoder.{side} new_{side}", own[side], axis=2))
        else:
            nodes.append(_node("Identity", f"new_{side}", own[side]))
            nodes += [
                _node("MatMul", f"encoder_hidden_states cross_{side}", f"hidden_{side}"),
                *_heads(f"hidden_{side}", cross[side]),
            ]
    nodes += [
        _node("Cast", "encoder_attention_mask", "seen", to=onnx.TensorProto.FLOAT),
        _node("Sub", "seen one", "unseen"),
        _node("Mul", "unseen large", "hiding"),
        _node("Unsqueeze", "hiding axes", "hidden_places"),
        *_attention(own["key"], own["value"], "own"),
        *_attention(cross["key"], cross["value"], "cross", "hidden_places"),
        _node("Add", "own_mixed cross_mixed", "both"),
        _node("Transpose", "both", "back", perm=[0, 2, 1, 3]),
        _node("Reshape", "back joined", "joined_heads"),
        _node("Add", "joined_heads x", "y"),
        _node("MatMul", "y head", "logits"),
    ]  # fmt: skip
    words = draw.standard_normal((WORDS, _HIDDEN)).astype("float32")
    square = {name: draw.standard_normal((_HIDDEN, _HIDDEN)).astype("float32") / 2 for name in (
        "weights_query", "weights_key", "weights_value", "cross_key", "cross_value")}  # fmt: skip
    if past:
        square = {name: array for name, array in square.items() if not name.startswith("cross")}
    kept = ("batch", HEADS, "source", WIDTH)
    inputs = {
        "encoder_attention_mask": ("int64", ("batch", "source")),
        "input_ids": ("int64", ("batch", 1 if past else "new")),
        **({} if past else {"encoder_hidden_states": ("float32", ("batch", "source", _HIDDEN))}),
        **{
            f"past_key_values.0.decoder.{side}": ("float32", ("batch", HEADS, "past", WIDTH)) for side in _SIDES if past
        },
        **{f"past_key_values.0.encoder.{side}": ("float32", kept) for side in _SIDES if past},
    }
    grown = ("batch", HEADS, "past + 1" if past else "new", WIDTH)
    outputs = {
        "logits": ("float32", ("batch", 1 if past else "new", WORDS)),
        **{own[side]: ("float32", grown) for side in _SIDES},
        **{cross[side]: ("float32", kept) for side in _SIDES if not past},
    }
    constants = {
        "words": words, "head": np.ascontiguousarray(words.T[:, ::-1]), **square, "zero": np.zeros(1, "float32"),
        "one": np.ones(1, "float32"), "large": np.full(1, 1e9, "float32"), "axes": np.array([1, 2]),
        "split": np.array([0, 0, HEADS, WIDTH]), "joined": np.array([0, 0, _HIDDEN]),
    }  # fmt: skip
    return make_model(nodes, inputs, outputs, constants).proto


def write_files(folder: Path) -> Path:
    """Write the encoder, both decoders and the start of texts into a folder."""
    folder.mkdir()
    words = np.random.default_rng(2).standard_normal((WORDS, _HIDDEN)).astype("float32")
    ids = {name: ("int64", ("batch", "source")) for name in ("input_ids", "attention_mask")}
    encoder = make_model(
        [
            _node("Gather", "words input_ids", "x"),
            _node("Cast", "attention_mask", "seen", to=onnx.TensorProto.FLOAT),
            _node("Unsqueeze", "seen last", "seen_1"),
            _node("Mul", "x seen_1", "last_hidden_state"),
        ],
        ids,
        {"last_hidden_state": ("float32", ("batch", "source", _HIDDEN))},
        {"words": words, "last": np.array([2])},
    ).proto
    onnx.save(encoder, folder / "encoder_model.onnx")
    onnx.save(_decoder(past=False), folder / "decoder_model.onnx")
    onnx.save(_decoder(past=True), folder / "decoder_with_past_model.onnx")
    (folder / "config.json").write_text(json.dumps({"decoder_start_token_id": START}))
    return folder


def greedy(folder: Path, ids: np.ndarray, mask: np.ndarray, count: int) -> list[list[int]]:
    """Return the likeliest tokens of each text."""
    encoder, prompt, step = (
        ort.InferenceSession(folder / f"{name}.onnx")
        for name in ("encoder_model", "decoder_model", "decoder_with_past_model")
    )
    (hidden,) = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    last = np.full((len(ids), 1), START)
    given = {"encoder_attention_mask": mask, "input_ids": last, "encoder_hidden_states": hidden}
    logits, key, value, *cross = prompt.run(None, given)
    found = []
    for _ in range(count):
        last = logits[:, -1].argmax(-1)[:, None]
        found.append(last[:, 0])
        caches = zip((f"past_key_values.0.{side}.{part}" for side in ("decoder", "encoder") for part in _SIDES),
                     (key, value, *cross), strict=True)  # fmt: skip
        logits, key, value = step.run(None, {"encoder_attention_mask": mask, "input_ids": last, **dict(caches)})
    return np.stack(found, 1).tolist()
