"""The table of zoo models: every name, its architecture, sizes, inputs and defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import onnx

from relaxtune.models.errors import UnknownModelError
from relaxtune.models.spec import TensorSpec
from relaxtune.models.zoo.bert import BertConfig, build_bert
from relaxtune.models.zoo.decoding import TOTAL_AFTER_NEW, TOTAL_AFTER_PAST
from relaxtune.models.zoo.gpt2 import Gpt2Config, build_gpt2
from relaxtune.models.zoo.graph import Dim, Precision
from relaxtune.models.zoo.llama import LlamaConfig, build_llama
from relaxtune.models.zoo.outliers import Outliers, add_outliers
from relaxtune.models.zoo.t5 import T5Config, build_t5
from relaxtune.models.zoo.vit import VitConfig, build_vit
from relaxtune.models.zoo.whisper import WhisperConfig, build_whisper

Config = BertConfig | Gpt2Config | LlamaConfig | VitConfig | T5Config | WhisperConfig

_OUTLIERS = "outliers"
# Of a decoder's presets: the prefill, the decode step, the step of any number of tokens behind a cache.
_SUFFIXES = ("", "-decode", "-with-past")
# Name and builder of each architecture.
_ARCHITECTURES: Mapping[type[Config], tuple[str, Callable[..., onnx.ModelProto]]] = {
    BertConfig: ("BERT encoder, {0.layers} layers, hidden {0.hidden}", build_bert),
    Gpt2Config: ("GPT-2 decoder, {0.layers} layers, hidden {0.hidden}", build_gpt2),
    LlamaConfig: ("Llama-style decoder, {0.layers} layers, hidden {0.hidden}", build_llama),
    VitConfig: ("ViT classifier, {0.layers} layers, hidden {0.hidden}, image {0.image}", build_vit),
    T5Config: ("T5-style encoder, {0.layers} layers, hidden {0.hidden}", build_t5),
    WhisperConfig: ("Whisper encoder and decoder, {0.layers} layers each, hidden {0.hidden}", build_whisper),
}

DEFAULT_DIMS: Mapping[str, int] = {"batch": 1, "sequence": 128, "past_sequence": 127}


@dataclass(frozen=True)
class Preset:
    """One model of the zoo.

    `inputs` is the signature with every free dimension symbolic; `limits` the largest value a dimension may take.
    """

    name: str
    description: str
    config: Config
    inputs: tuple[TensorSpec, ...]
    limits: Mapping[str, int] = field(default_factory=dict)
    decode: bool = False  # The graph is a step of a decoder, of one token or several.
    outliers: Outliers | None = None

    def build(self, title: str, dims: dict[str, Dim], precision: Precision, seed: int) -> onnx.ModelProto:
        """Return the graph, called `title`."""
        options = {"decode": True} if self.decode else {}
        proto = _ARCHITECTURES[type(self.config)][1](title, self.config, dims, precision, seed, **options)
        return proto if self.outliers is None else add_outliers(proto, self.config.hidden, self.outliers)


def _ids(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in names)


def _presets(name: str, config: Config) -> list[Preset]:
    """Return the preset of an architecture; of a decoder one for each of `_SUFFIXES`."""
    description = _ARCHITECTURES[type(config)][0].format(config)
    inputs = _ids("input_ids", "attention_mask")
    match config:
        case BertConfig():
            inputs += _ids("token_type_ids")
        case VitConfig():
            shape = ("batch", config.channels, config.image, config.image)
            inputs = (TensorSpec("pixel_values", "float32", shape),)
        case WhisperConfig():
            sound = TensorSpec("input_features", "float32", ("batch", config.mels, config.frames))
            inputs = (sound, *_ids("decoder_input_ids"))
    limits = {} if isinstance(config, VitConfig | T5Config) else {"sequence": config.max_positions}
    preset = Preset(name, description, config, inputs, limits)
    if not isinstance(config, Gpt2Config | LlamaConfig):
        return [preset]
    heads = config.kv_heads if isinstance(config, LlamaConfig) else config.heads
    # A cache has the dtype of the precision; float32 stands here for either.
    cache = ("batch", heads, "past_sequence", config.head_size)
    decode = Preset(
        name=name + _SUFFIXES[1],
        description=f"{description}, one decode step with its KV cache",
        config=config,
        inputs=(
            TensorSpec("input_ids", "int64", ("batch", 1)),
            TensorSpec("attention_mask", "int64", ("batch", TOTAL_AFTER_PAST)),
            TensorSpec("position_ids", "int64", ("batch", 1)),
            *(
                TensorSpec(f"past_key_values.{index}.{which}", "float32", cache)
                for index in range(config.layers)
                for which in ("key", "value")
            ),
        ),
        limits={"past_sequence": config.max_positions - 1},
        decode=True,
    )
    ids, mask, positions, *caches = decode.inputs
    with_past = replace(
        decode,
        name=name + _SUFFIXES[2],
        description=f"{description}, any number of tokens behind its KV cache",
        inputs=(
            replace(ids, shape=("batch", "sequence")),
            replace(mask, shape=("batch", TOTAL_AFTER_NEW)),
            replace(positions, shape=("batch", "sequence")),
            *caches,
        ),
        limits={TOTAL_AFTER_NEW: config.max_positions},
    )
    return [replace(preset, description=f"{description}, prefill"), decode, with_past]


def _with_outliers(preset: Preset, outliers: Outliers, *, layers: int | None = None) -> Preset:
    """Return the model with a few large channels; with `layers`, of so many layers, which a CPU runs in a test."""
    config = preset.config
    if not isinstance(config, BertConfig | LlamaConfig):
        raise TypeError(f"{preset.name} is neither BERT nor Llama; expected one of these for outliers")
    suffix = _OUTLIERS
    if layers is not None:
        config, suffix = replace(config, layers=layers), f"{layers}-layers-{_OUTLIERS}"
    whole = _presets(f"{preset.name}-{suffix}", config)[0]
    size = f"x {outliers.scale:g}, {outliers.count} channels x {outliers.factor:g} besides"
    return replace(whole, description=f"{whole.description}, residual stream {size}", outliers=outliers)


def _table() -> dict[str, Preset]:
    configs: dict[str, Config] = {
        "bert-tiny": BertConfig(layers=2, hidden=128, heads=2, ffn=512, vocab=1024, init_std=0.05),
        "bert-base": BertConfig(layers=12, hidden=768, heads=12, ffn=3072, vocab=30522),
        "bert-large": BertConfig(layers=24, hidden=1024, heads=16, ffn=4096, vocab=30522),
        "gpt2-tiny": Gpt2Config(layers=2, hidden=128, heads=2, vocab=1024, max_positions=512, init_std=0.05),
        "gpt2-small": Gpt2Config(layers=12, hidden=768, heads=12, vocab=50257),
        "llama-tiny": LlamaConfig(layers=2, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=1024, init_std=0.05),
        "llama-1b": LlamaConfig(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=32000),
        "vit-tiny": VitConfig(layers=2, hidden=128, heads=2, ffn=512, image=32, patch=8, classes=10, init_std=0.05),
        "vit-base": VitConfig(layers=12, hidden=768, heads=12, ffn=3072, image=224, patch=16, classes=1000),
        "t5-tiny": T5Config(layers=2, hidden=128, heads=2, head_size=64, ffn=512, vocab=1024, init_std=0.05),
        "t5-small": T5Config(layers=6, hidden=512, heads=8, head_size=64, ffn=2048, vocab=32128),
        "whisper-tiny": WhisperConfig(layers=2, hidden=128, heads=2, ffn=512, vocab=1024, frames=64, init_std=0.05),
        "whisper-base": WhisperConfig(layers=6, hidden=512, heads=8, ffn=2048, vocab=51865),
    }
    presets = [preset for name, config in configs.items() for preset in _presets(name, config)]
    named = {preset.name: preset for preset in presets}
    presets += [
        _with_outliers(named["bert-tiny"], Outliers(2, 8.0, 64.0)),
        _with_outliers(named["bert-large"], Outliers(4, 16.0, 64.0)),
        _with_outliers(named["bert-large"], Outliers(4, 16.0, 64.0), layers=2),
        _with_outliers(named["llama-tiny"], Outliers(2, 8.0, 500.0)),
        _with_outliers(named["llama-1b"], Outliers(4, 22.0, 100.0)),
        _with_outliers(named["llama-1b"], Outliers(4, 22.0, 100.0), layers=2),
    ]
    return {preset.name: preset for preset in presets}


def list_models() -> tuple[str, ...]:
    """Return the names of the zoo; each but those with outliers also stands with `-N-layers` behind it."""
    return tuple(_table())


def with_layers(preset: Preset, layers: int) -> Preset:
    """Return a model with so many layers and everything else the same, called `NAME-N-layers`.

    Raises `ValueError`: `layers` is below 1, or the preset is not a plain model of the zoo.
    """
    kind = next((kind for kind in (1, 2) if preset.name.endswith(_SUFFIXES[kind])), 0)
    name, config = preset.name.removesuffix(_SUFFIXES[kind]), replace(preset.config, layers=layers)
    if layers < 1 or _OUTLIERS in preset.name:
        raise ValueError(f"{preset.name} with {layers} layers: expected a plain model and at least 1 layer")
    made = _presets(name, config)[kind]
    return replace(made, name=f"{preset.name}-{layers}-layers")


def get_preset(name: str) -> Preset:
    """Return a preset by name; `NAME-N-layers` is the plain model NAME with N layers.

    Raises `UnknownModelError`: with the close matches and all the names.
    """
    table = _table()
    if name in table:
        return table[name]
    shorter = re.fullmatch(r"(.+)-([1-9]\d*)-layers", name)
    if shorter is not None and shorter[1] in table and _OUTLIERS not in shorter[1]:
        return with_layers(table[shorter[1]], int(shorter[2]))
    close = get_close_matches(name.lower(), table, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise UnknownModelError(
        f"no file and no zoo model is called {name!r}.{hint} Zoo models: {', '.join(table)}. A path must end in .onnx."
    )
