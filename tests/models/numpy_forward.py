"""The zoo's architectures as plain NumPy in float64: what the graphs are compared with.

Written from the architectures' definitions, not from the graph builders; only weight names and sizes are shared.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.special import erf

from relaxtune.models import OnnxModel
from relaxtune.models.zoo.bert import BertConfig
from relaxtune.models.zoo.gpt2 import Gpt2Config
from relaxtune.models.zoo.llama import LlamaConfig
from relaxtune.models.zoo.presets import get_preset
from relaxtune.models.zoo.t5 import T5Config
from relaxtune.models.zoo.vit import VitConfig
from relaxtune.models.zoo.whisper import WhisperConfig

Arrays = Mapping[str, np.ndarray]


class Weights:
    """Weights by dotted name under a prefix, in float64."""

    def __init__(self, arrays: Arrays, prefix: str = "") -> None:
        self._arrays, self._prefix = arrays, prefix

    def at(self, name: str) -> Weights:
        return Weights(self._arrays, f"{self._prefix}{name}.")

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[self._prefix + name].astype(np.float64)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self[f"{name}.weight"]
        return y + self[f"{name}.bias"] if f"{self._prefix}{name}.bias" in self._arrays else y

    def layer_norm(self, name: str, x: np.ndarray, epsilon: float) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
        return normed * self[f"{name}.weight"] + self[f"{name}.bias"]

    def rms_norm(self, name: str, x: np.ndarray, epsilon: float) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * self[f"{name}.weight"]


def forward(model: OnnxModel, inputs: Arrays) -> dict[str, np.ndarray]:
    """Return every output of a zoo model by name."""
    config = get_preset(model.name).config
    weights = Weights(dict(model.arrays()))
    match config:
        case BertConfig():
            return bert(config, weights, inputs)
        case Gpt2Config():
            return gpt2(config, weights, inputs)
        case LlamaConfig():
            return llama(config, weights, inputs)
        case VitConfig():
            return vit(config, weights, inputs)
        case T5Config():
            return t5(config, weights, inputs)
        case WhisperConfig():
            return whisper(config, weights, inputs)


def bert(config: BertConfig, weights: Weights, inputs: Arrays) -> dict[str, np.ndarray]:
    ids, length = inputs["input_ids"], inputs["input_ids"].shape[1]
    tables = weights.at("embeddings")
    x = tables["word_embeddings.weight"][ids] + tables["token_type_embeddings.weight"][inputs["token_type_ids"]]
    x = tables.layer_norm("LayerNorm", x + tables["position_embeddings.weight"][:length], config.epsilon)
    allowed = inputs["attention_mask"][:, None, None, :] == 1
    for index in range(config.layers):
        layer = weights.at(f"encoder.layer.{index}")
        q, k, v = (heads_of(layer.linear(f"attention.{name}", x), config.heads) for name in ("query", "key", "value"))
        context = attention(q, k, v, q.shape[-1] ** -0.5, allowed)
        x = layer.layer_norm(
            "attention.output.LayerNorm", layer.linear("attention.output.dense", context) + x, config.epsilon
        )
        wide = layer.linear("intermediate.dense", x)
        wide = wide * 0.5 * (1 + erf(wide / np.sqrt(2)))
        x = layer.layer_norm("output.LayerNorm", layer.linear("output.dense", wide) + x, config.epsilon)
    return {"last_hidden_state": x, "pooler_output": np.tanh(weights.linear("pooler.dense", x[:, 0]))}


def gpt2(config: Gpt2Config, weights: Weights, inputs: Arrays) -> dict[str, np.ndarray]:
    positions, allowed = decoder_view(inputs)
    body = weights.at("transformer")
    x = body["wte.weight"][inputs["input_ids"]] + body["wpe.weight"][positions]
    presents: dict[str, np.ndarray] = {}
    for index in range(config.layers):
        layer = body.at(f"h.{index}")
        mixed = layer.linear("attn.c_attn", layer.layer_norm("ln_1", x, config.epsilon))
        q, k, v = (heads_of(part, config.heads) for part in np.split(mixed, 3, axis=-1))
        k, v = grow(inputs, presents, index, k, v)
        x = x + layer.linear("attn.c_proj", attention(q, k, v, q.shape[-1] ** -0.5, allowed))
        wide = layer.linear("mlp.c_fc", layer.layer_norm("ln_2", x, config.epsilon))
        wide = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
        x = x + layer.linear("mlp.c_proj", wide)
    return {"logits": body.layer_norm("ln_f", x, config.epsilon) @ body["wte.weight"].T, **presents}


def llama(config: LlamaConfig, weights: Weights, inputs: Arrays) -> dict[str, np.ndarray]:
    positions, allowed = decoder_view(inputs)
    body = weights.at("model")
    x = body["embed_tokens.weight"][inputs["input_ids"]]
    size, group = config.hidden // config.heads, config.heads // config.kv_heads
    angles = positions[:, None, :, None] * config.rope_theta ** -(np.arange(0, size, 2) / size)
    presents: dict[str, np.ndarray] = {}
    for index in range(config.layers):
        layer = body.at(f"layers.{index}")
        normed = layer.rms_norm("input_layernorm", x, config.epsilon)
        q = rotary(heads_of(layer.linear("self_attn.q_proj", normed), config.heads), angles)
        k = rotary(heads_of(layer.linear("self_attn.k_proj", normed), config.kv_heads), angles)
        v = heads_of(layer.linear("self_attn.v_proj", normed), config.kv_heads)
        k, v = grow(inputs, presents, index, k, v)
        context = attention(q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1), size**-0.5, allowed)
        x = x + layer.linear("self_attn.o_proj", context)
        normed = layer.rms_norm("post_attention_layernorm", x, config.epsilon)
        gate = layer.linear("mlp.gate_proj", normed)
        x = x + layer.linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * layer.linear("mlp.up_proj", normed))
    return {"logits": weights.linear("lm_head", body.rms_norm("norm", x, config.epsilon)), **presents}


def vit(config: VitConfig, weights: Weights, inputs: Arrays) -> dict[str, np.ndarray]:
    pixels, step, side = inputs["pixel_values"].astype(np.float64), config.patch, config.image // config.patch
    patches = pixels.reshape(len(pixels), config.channels, side, step, side, step).transpose(0, 2, 4, 1, 3, 5)
    tables = weights.at("embeddings")
    kernel = tables["patch_embeddings.projection.weight"].reshape(config.hidden, -1)
    x = patches.reshape(len(pixels), side * side, -1) @ kernel.T + tables["patch_embeddings.projection.bias"]
    first = np.broadcast_to(tables["cls_token"], (len(pixels), 1, config.hidden))
    x = np.concatenate([first, x], axis=1) + tables["position_embeddings"]
    for index in range(config.layers):
        layer = weights.at(f"encoder.layer.{index}")
        normed = layer.layer_norm("layernorm_before", x, config.epsilon)
        q, k, v = (
            heads_of(layer.linear(f"attention.{name}", normed), config.heads) for name in ("query", "key", "value")
        )
        x = x + layer.linear("attention.output.dense", attention(q, k, v, q.shape[-1] ** -0.5, np.True_))
        wide = layer.linear("intermediate.dense", layer.layer_norm("layernorm_after", x, config.epsilon))
        x = x + layer.linear("output.dense", wide * 0.5 * (1 + erf(wide / np.sqrt(2))))
    x = weights.layer_norm("layernorm", x, config.epsilon)
    return {"logits": weights.linear("classifier", x[:, 0]), "last_hidden_state": x}


def t5(config: T5Config, weights: Weights, inputs: Arrays) -> dict[str, np.ndarray]:
    ids, length = inputs["input_ids"], inputs["input_ids"].shape[1]
    x = weights["shared.weight"][ids]
    body = weights.at("encoder")
    distances = np.arange(length)[None, :] - np.arange(length)[:, None]
    bucket = np.vectorize(lambda d: t5_bucket(int(d), config.buckets, config.max_distance))(distances)
    bias = body["relative_attention_bias.weight"][bucket].transpose(2, 0, 1)[None]
    allowed = inputs["attention_mask"][:, None, None, :] == 1
    for index in range(config.layers):
        layer = body.at(f"block.{index}")
        normed = layer.rms_norm("layer.0.layer_norm", x, config.epsilon)
        q, k, v = (heads_of(layer.linear(f"layer.0.SelfAttention.{name}", normed), config.heads) for name in "qkv")
        x = x + layer.linear("layer.0.SelfAttention.o", attention(q, k, v, 1.0, allowed, bias))
        wide = layer.linear("layer.1.DenseReluDense.wi", layer.rms_norm("layer.1.layer_norm", x, config.epsilon))
        x = x + layer.linear("layer.1.DenseReluDense.wo", np.maximum(wide, 0))
    return {"last_hidden_state": body.rms_norm("final_layer_norm", x, config.epsilon)}


def whisper(config: WhisperConfig, weights: Weights, inputs: Arrays) -> dict[str, np.ndarray]:
    def attend(layer: Weights, which: str, x: np.ndarray, others: np.ndarray | None, allowed: np.ndarray) -> np.ndarray:
        normed = layer.layer_norm(f"{which}_layer_norm", x, config.epsilon)
        source = normed if others is None else others
        block = layer.at(which)
        q, k, v = (
            heads_of(block.linear(f"{name}_proj", of), config.heads)
            for name, of in (("q", normed), ("k", source), ("v", source))
        )
        return x + block.linear("out_proj", attention(q, k, v, q.shape[-1] ** -0.5, allowed))

    def feed_forward(layer: Weights, x: np.ndarray) -> np.ndarray:
        return x + layer.linear(
            "fc2", gelu(layer.linear("fc1", layer.layer_norm("final_layer_norm", x, config.epsilon)))
        )

    encoder, decoder = weights.at("encoder"), weights.at("decoder")
    sound = inputs["input_features"].astype(np.float64)
    for name, stride in (("conv1", 1), ("conv2", 2)):
        padded = np.pad(sound, ((0, 0), (0, 0), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=2)[:, :, ::stride]
        sound = gelu(np.einsum("bilk,oik->bol", windows, encoder[f"{name}.weight"]) + encoder[f"{name}.bias"][:, None])
    heard = sound.transpose(0, 2, 1) + encoder["embed_positions.weight"]
    everything = np.ones((1, 1), bool)
    for index in range(config.layers):
        layer = encoder.at(f"layers.{index}")
        heard = feed_forward(layer, attend(layer, "self_attn", heard, None, everything))
    heard = encoder.layer_norm("layer_norm", heard, config.epsilon)
    ids = inputs["decoder_input_ids"]
    x = decoder["embed_tokens.weight"][ids] + decoder["embed_positions.weight"][: ids.shape[1]]
    causal = np.tri(ids.shape[1], dtype=bool)
    for index in range(config.layers):
        layer = decoder.at(f"layers.{index}")
        x = attend(layer, "encoder_attn", attend(layer, "self_attn", x, None, causal), heard, everything)
        x = feed_forward(layer, x)
    logits = decoder.layer_norm("layer_norm", x, config.epsilon) @ decoder["embed_tokens.weight"].T
    return {"logits": logits, "encoder_last_hidden_state": heard}


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def t5_bucket(distance: int, buckets: int, max_distance: int) -> int:
    """Return the bucket by integers only: the number of borders exact * (max / exact)^(k / steps) passed."""
    half = buckets // 2
    exact, size = half // 2, abs(distance)
    side = half if distance > 0 else 0
    if size < exact:
        return side + size
    steps = half - exact
    passed = sum((size**steps) * exact**k >= exact**steps * max_distance**k for k in range(1, steps))
    return side + exact + passed


def heads_of(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    allowed: np.ndarray | np.bool_,
    bias: np.ndarray | float = 0.0,
) -> np.ndarray:
    scores = np.where(allowed, q @ k.swapaxes(-1, -2) * scale + bias, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    context = (weights / weights.sum(-1, keepdims=True)) @ v
    return context.transpose(0, 2, 1, 3).reshape(context.shape[0], context.shape[2], -1)


def rotary(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotate the pairs (x[i], x[i + D/2]) as complex numbers."""
    low, high = np.split(x, 2, axis=-1)
    turned = (low + 1j * high) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def decoder_view(inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return positions (B, S) and which keys each query sees (B, 1, S, T)."""
    batch, length = inputs["input_ids"].shape
    mask = inputs["attention_mask"]
    total = mask.shape[1]
    places = np.arange(total - length, total)
    positions = inputs.get("position_ids", np.broadcast_to(places, (batch, length)))
    causal = np.arange(total)[None, :] <= places[:, None]
    return positions, causal[None, None] & (mask[:, None, None, :] == 1)


def grow(inputs: Arrays, presents: dict[str, np.ndarray], index: int, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Return keys and values behind their caches, and keep them as the caches to return."""
    grown = []
    for which, new in (("key", k), ("value", v)):
        past = inputs.get(f"past_key_values.{index}.{which}")
        if past is not None:
            new = np.concatenate([past.astype(np.float64), new], axis=2)
            presents[f"present.{index}.{which}"] = new
        grown.append(new)
    return grown
