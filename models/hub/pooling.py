"""One vector of each text: pooling and normalisation behind an encoder's last layer, inside the graph."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper, parser, version_converter

from relaxtune.models.errors import ModelFileError, UnsupportedModelError

EMBEDDING_OUTPUT = "sentence_embedding"
_MASK = "attention_mask"
# Axes of ReduceSum are an input, and Unsqueeze's too.
_OPSET = 13
_MODULES = ("Transformer", "Pooling", "Normalize")
# The key of sentence-transformers before version 5.4 -> our mode.
_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}
# `mask` [batch, tokens] and `hidden` [batch, tokens, width], in float32, to [batch, width].
_GRAPHS = {
    "mean": """
        seen = Unsqueeze(mask, last)
        shown = Mul(hidden, seen)
        total = ReduceSum<keepdims = 0>(shown, axis)
        count = ReduceSum<keepdims = 1>(mask, axis)
        least = Constant<value = float {1e-9}>()
        divisor = Max(count, least)
        pooled = Div(total, divisor)
    """,
    "cls": """
        zero = Constant<value = int64 {0}>()
        pooled = Gather<axis = 1>(hidden, zero)
    """,
    "lasttoken": """
        place = ArgMax<axis = 1, keepdims = 1, select_last_index = 1>(mask)
        pooled = GatherND<batch_dims = 1>(hidden, place)
    """,
}
_NORMALISED = """
        squares = Mul(pooled, pooled)
        square = ReduceSum<keepdims = 1>(squares, axis)
        length = Sqrt(square)
        shortest = Constant<value = float {1e-12}>()
        scale = Max(length, shortest)
        vector = Div(pooled, scale)
"""


@dataclass(frozen=True)
class Pooling:
    """How the vectors of tokens become one: `mean`, `cls` or `lasttoken`; a text has at most `max_tokens`."""

    mode: str = "mean"
    normalise: bool = True
    max_tokens: int | None = None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises `ModelFileError`: it cannot be read, or is none.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelFileError(f"{path} cannot be read as JSON: {e}; copy the folder again") from e


def read_pooling(folder: Path) -> Pooling | None:
    """Return the pooling that a folder of sentence-transformers names; None where it is no such folder.

    Raises `UnsupportedModelError`: it has other modules than a pooling and a normalisation, or another pooling.
    """
    if not (folder / "modules.json").is_file():
        return None
    modules = {str(one["type"]).rpartition(".")[2]: folder / one["path"] for one in read_json(folder / "modules.json")}
    if "Pooling" not in modules:
        return None
    unknown = [name for name in modules if name not in _MODULES]
    if unknown:
        raise UnsupportedModelError(
            f"{folder} has the module {unknown[0]} behind its encoder; expected {', '.join(_MODULES)}"
        )
    config = read_json(modules["Pooling"] / "config.json")
    set_modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = [_KEYS.get(key, key.removeprefix("pooling_mode_")) for key in set_modes]
    mode = "+".join(modes) or str(config.get("pooling_mode", "mean"))
    if mode not in _GRAPHS:
        raise UnsupportedModelError(f"{folder} has the pooling {mode}; expected one of {', '.join(_GRAPHS)}")
    limits = folder / "sentence_bert_config.json"
    most = read_json(limits).get("max_seq_length") if limits.is_file() else None
    return Pooling(mode, "Normalize" in modules, most)


def pool(model: onnx.ModelProto, pooling: Pooling) -> None:
    """Rewrite an encoder so that its one output is a vector [batch, width] of each text, in float32.

    Raises `UnsupportedModelError`: the graph has no output of tokens, or no attention mask.
    """
    ready = [value for value in model.graph.output if value.name == EMBEDDING_OUTPUT]
    if not ready:
        opset = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
        if opset < _OPSET:
            model.CopyFrom(version_converter.convert_version(model, _OPSET))
        ready = [_pooled(model, pooling)]
    del model.graph.output[:]
    model.graph.output.extend(ready)


def _pooled(model: onnx.ModelProto, pooling: Pooling) -> onnx.ValueInfoProto:
    graph = model.graph
    hidden = next((value for value in graph.output if len(value.type.tensor_type.shape.dim) == 3), None)
    if hidden is None or _MASK not in [value.name for value in graph.input]:
        raise UnsupportedModelError(
            f"the graph cannot be pooled: expected an input {_MASK} and an output [batch, tokens, width], got "
            f"{', '.join(value.name for value in graph.output)}; export the encoder without a head"
        )
    tail = parser.parse_graph(f"""pool (int64[b, s] {_MASK}, float[b, s, w] {hidden.name}) => (float[b, w] vector) {{
        axis = Constant<value = int64[1] {{1}}>()
        last = Constant<value = int64[1] {{2}}>()
        mask = Cast<to = 1>({_MASK})
        hidden = Cast<to = 1>({hidden.name})
        {_GRAPHS[pooling.mode]}
        {_NORMALISED if pooling.normalise else "vector = Identity(pooled)"}
    }}""")
    outer = {_MASK: _MASK, hidden.name: hidden.name, "vector": EMBEDDING_OUTPUT}
    for node in tail.node:
        for names in (node.input, node.output):
            names[:] = [outer.get(name, f"pooling/{name}") for name in names]
        node.name = f"pooling/{node.op_type}/{node.output[0]}"
    graph.node.extend(tail.node)
    sizes = hidden.type.tensor_type.shape.dim
    shape = [size.dim_param or size.dim_value or None for size in (sizes[0], sizes[2])]
    return helper.make_tensor_value_info(EMBEDDING_OUTPUT, TensorProto.FLOAT, shape)
