"""The table of zoo models: every name, its architecture, sizes, inputs and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

import onnx

from models.errors import UnknownModelError
from models.spec import TensorSpec
from models.zoo.bert import BertConfig, build_bert
from models.zoo.graph import Dim, Precision

Builder = Callable[[str, dict[str, Dim], Precision, int], onnx.ModelProto]

DEFAULT_DIMS: Mapping[str, int] = {"batch": 1, "sequence": 128, "past_sequence": 127}


@dataclass(frozen=True)
class Preset:
    """One model of the zoo.

    `inputs` is the signature with every free dimension symbolic; `limits` the largest value a dimension may take.
    """

    name: str
    description: str
    inputs: tuple[TensorSpec, ...]
    build: Builder = field(repr=False)
    limits: Mapping[str, int] = field(default_factory=dict)


def _ids(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in names)


def _bert(name: str, config: BertConfig) -> Preset:
    return Preset(
        name=name,
        description=f"BERT encoder, {config.layers} layers, hidden {config.hidden}",
        inputs=_ids("input_ids", "attention_mask", "token_type_ids"),
        build=lambda title, dims, precision, seed: build_bert(title, config, dims, precision, seed),
        limits={"sequence": config.max_positions},
    )


def _table() -> dict[str, Preset]:
    presets = [
        _bert("bert-tiny", BertConfig(layers=2, hidden=128, heads=2, ffn=512, vocab=1024, init_std=0.05)),
        _bert("bert-base", BertConfig(layers=12, hidden=768, heads=12, ffn=3072, vocab=30522)),
        _bert("bert-large", BertConfig(layers=24, hidden=1024, heads=16, ffn=4096, vocab=30522)),
    ]
    return {preset.name: preset for preset in presets}


def list_models() -> tuple[str, ...]:
    """Return the names of the zoo."""
    return tuple(_table())


def get_preset(name: str) -> Preset:
    """Return a preset by name.

    Raises
    ------
    UnknownModelError
        With the close matches and all the names.
    """
    table = _table()
    if name in table:
        return table[name]
    close = get_close_matches(name.lower(), table, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    msg = (
        f"no file and no zoo model is called {name!r}.{hint} Zoo models: {', '.join(table)}. A path must end in .onnx."
    )
    raise UnknownModelError(msg)
