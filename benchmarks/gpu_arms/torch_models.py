"""The zoo's architectures as plain torch modules over the zoo's own weights: the peers' side of every case.

They are written the way that suits torch best: Q, K and V in one projection, gate and up in one, PyTorch's fused
attention, linear weights as (out, in). Each takes the inputs of the zoo's graph, in its order, and returns a dict of
its outputs by name. A padding mask is honoured where `masked` is set; without it all tokens are taken as real, which
lets attention run without a mask.

Notation: B batch, S tokens of a row, T keys, H heads, D head size, N hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_arms.cases import Case, Family
from benchmarks.gpu_arms.torch_layers import (
    BertLayer,
    LlamaLayer,
    PreNormLayer,
    T5Layer,
    Weights,
    causal_and_padding,
    distance_buckets,
    frozen,
    rotary_tables,
)
from relaxtune.models.zoo.bert import BertConfig
from relaxtune.models.zoo.gpt2 import Gpt2Config
from relaxtune.models.zoo.llama import LlamaConfig
from relaxtune.models.zoo.t5 import T5Config
from relaxtune.models.zoo.vit import VitConfig

Outputs = dict[str, Tensor]


class Bert(nn.Module):
    """Encoder layers with the norm after each residual, and the pooler."""

    def __init__(self, config: BertConfig, weights: Weights, *, masked: bool) -> None:
        """Take the weights of the preset."""
        super().__init__()
        self.masked = masked
        self.words = frozen(weights.get("embeddings.word_embeddings.weight"))
        self.types = frozen(weights.get("embeddings.token_type_embeddings.weight"))
        self.positions = frozen(weights.get("embeddings.position_embeddings.weight"))
        self.norm = weights.norm("embeddings.LayerNorm", config.epsilon)
        self.layers = nn.ModuleList(
            BertLayer(config, weights, f"encoder.layer.{index}") for index in range(config.layers)
        )
        self.pooler = weights.linear("pooler.dense")

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Outputs:
        """Return last_hidden_state (B, S, N) and pooler_output (B, N)."""
        placed = self.positions[: input_ids.shape[1]]
        hidden = self.norm(F.embedding(input_ids, self.words) + F.embedding(token_type_ids, self.types) + placed)
        mask = attention_mask[:, None, None, :].bool() if self.masked else None
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return {"last_hidden_state": hidden, "pooler_output": torch.tanh(self.pooler(hidden[:, 0]))}


class Vit(nn.Module):
    """Patches by a convolution, a class token, encoder layers with the norm before, and the classifier."""

    def __init__(self, config: VitConfig, weights: Weights) -> None:
        """Take the weights of the preset."""
        super().__init__()
        self.patch = config.patch
        self.kernel = frozen(weights.get("embeddings.patch_embeddings.projection.weight"))
        self.bias = frozen(weights.get("embeddings.patch_embeddings.projection.bias"))
        self.token = frozen(weights.get("embeddings.cls_token"))
        self.positions = frozen(weights.get("embeddings.position_embeddings"))
        self.layers = nn.ModuleList(
            PreNormLayer(
                config.heads,
                weights.norm(f"encoder.layer.{index}.layernorm_before", config.epsilon),
                weights.linear(*(f"encoder.layer.{index}.attention.{which}" for which in ("query", "key", "value"))),
                weights.linear(f"encoder.layer.{index}.attention.output.dense"),
                weights.norm(f"encoder.layer.{index}.layernorm_after", config.epsilon),
                weights.linear(f"encoder.layer.{index}.intermediate.dense"),
                weights.linear(f"encoder.layer.{index}.output.dense"),
                gelu="none",
                causal=False,
            )
            for index in range(config.layers)
        )
        self.norm = weights.norm("layernorm", config.epsilon)
        self.classifier = weights.linear("classifier")

    def forward(self, pixel_values: Tensor) -> Outputs:
        """Return logits (B, classes) and last_hidden_state (B, S, N)."""
        grid = F.conv2d(pixel_values, self.kernel, self.bias, stride=self.patch)
        token = self.token.expand(pixel_values.shape[0], -1, -1)
        hidden = torch.cat([token, grid.flatten(2).transpose(1, 2)], dim=1) + self.positions
        for layer in self.layers:
            hidden = layer(hidden, None)
        hidden = self.norm(hidden)
        return {"logits": self.classifier(hidden[:, 0]), "last_hidden_state": hidden}


class Gpt2(nn.Module):
    """Decoder layers with the norm before, and the output head tied to the word table."""

    def __init__(self, config: Gpt2Config, weights: Weights, *, masked: bool) -> None:
        """Take the weights of the preset."""
        super().__init__()
        self.masked = masked
        self.table = frozen(weights.get("transformer.wte.weight"))
        self.positions = frozen(weights.get("transformer.wpe.weight"))
        self.layers = nn.ModuleList(
            PreNormLayer(
                config.heads,
                weights.norm(f"transformer.h.{index}.ln_1", config.epsilon),
                weights.linear(f"transformer.h.{index}.attn.c_attn"),
                weights.linear(f"transformer.h.{index}.attn.c_proj"),
                weights.norm(f"transformer.h.{index}.ln_2", config.epsilon),
                weights.linear(f"transformer.h.{index}.mlp.c_fc"),
                weights.linear(f"transformer.h.{index}.mlp.c_proj"),
                gelu="tanh",
                causal=True,
            )
            for index in range(config.layers)
        )
        self.norm = weights.norm("transformer.ln_f", config.epsilon)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Outputs:
        """Return the logits (B, S, V)."""
        hidden = F.embedding(input_ids, self.table) + self.positions[: input_ids.shape[1]]
        mask = causal_and_padding(attention_mask) if self.masked else None
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return {"logits": F.linear(self.norm(hidden), self.table)}


class T5(nn.Module):
    """Encoder layers with RMS norms before, which share a bias looked up by the distance of key and query."""

    def __init__(self, config: T5Config, weights: Weights, *, masked: bool) -> None:
        """Take the weights of the preset."""
        super().__init__()
        self.config, self.masked = config, masked
        self.table = frozen(weights.get("shared.weight"))
        self.bias = frozen(weights.get("encoder.relative_attention_bias.weight"))
        self.layers = nn.ModuleList(
            T5Layer(config, weights, f"encoder.block.{index}") for index in range(config.layers)
        )
        self.norm = weights.rms_norm("encoder.final_layer_norm", config.epsilon)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Outputs:
        """Return last_hidden_state (B, S, N)."""
        hidden = F.embedding(input_ids, self.table)
        bias = self._position_bias(input_ids.shape[1])
        if self.masked:
            bias = bias.masked_fill(attention_mask[:, None, None, :] == 0, torch.finfo(bias.dtype).min)
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return {"last_hidden_state": self.norm(hidden)}

    def _position_bias(self, length: int) -> Tensor:
        """Return the bias (1, H, S, S), looked up once for each distance."""
        places = torch.arange(length, device=self.bias.device)
        distances = torch.arange(1 - length, length, device=self.bias.device)
        of_distance = F.embedding(distance_buckets(self.config, distances), self.bias)
        # Attention takes a bias whose keys lie side by side.
        return of_distance[places - places[:, None] + length - 1].permute(2, 0, 1).contiguous()[None]


class LlamaModel(nn.Module):
    """What prefill and the decode steps of Llama have: the tables, the layers and the output head."""

    def __init__(self, config: LlamaConfig, weights: Weights, *, masked: bool) -> None:
        """Take the weights of the preset."""
        super().__init__()
        self.masked = masked
        self.kv_heads = config.kv_heads
        self.table = frozen(weights.get("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(LlamaLayer(config, weights, index) for index in range(config.layers))
        self.norm = weights.rms_norm("model.norm", config.epsilon)
        self.head = weights.linear("lm_head", bias=False)
        self.cos, self.sin = (frozen(table) for table in rotary_tables(config, weights))


class Llama(LlamaModel):
    """Decoder layers with RMS norms, rotary positions, grouped queries and SwiGLU: prefill."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Outputs:
        """Return the logits (B, S, V)."""
        hidden = F.embedding(input_ids, self.table)
        cos, sin = self.cos[: input_ids.shape[1]], self.sin[: input_ids.shape[1]]
        mask = causal_and_padding(attention_mask) if self.masked else None
        for layer in self.layers:
            query, key, value = layer.project(hidden, cos, sin)
            context = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            hidden = layer.finish(hidden, context.transpose(1, 2).flatten(2))
        return {"logits": self.head(self.norm(hidden))}


class LlamaStep(LlamaModel):
    """One decode step that takes its caches and returns them grown, as the zoo's graph does.

    The query heads that share a key head are taken as rows of one attention problem, so no key is repeated.
    """

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *caches: Tensor) -> Outputs:
        """Return the logits (B, 1, V) and the grown caches (B, KV, T, D); given are keys, values of each layer."""
        hidden = F.embedding(input_ids, self.table)
        # (B, 1, 1, D) and the place in the cache, which is the last whatever the position says of padding.
        cos, sin = self.cos[position_ids][:, None], self.sin[position_ids][:, None]
        mask = attention_mask[:, None, None, :].bool() if self.masked else None
        present: Outputs = {}
        for index, layer in enumerate(self.layers):
            query, key, value = layer.project(hidden, cos, sin)
            keys, values = self.grown(caches[2 * index], key), self.grown(caches[2 * index + 1], value)
            present |= {f"present.{index}.key": keys, f"present.{index}.value": values}
            grouped = query.squeeze(2).unflatten(1, (self.kv_heads, -1))
            context = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            hidden = layer.finish(hidden, context.flatten(1)[:, None])
        return {"logits": self.head(self.norm(hidden)), **present}

    @staticmethod
    def grown(cache: Tensor, new: Tensor) -> Tensor:
        """Return a cache with the new token's keys or values."""
        return torch.cat([cache, new], dim=2)


class LlamaDecode(LlamaStep):
    """One decode step over a static cache of T places: the new token's keys and values are written in place."""

    def __init__(
        self, config: LlamaConfig, weights: Weights, caches: Mapping[str, np.ndarray], *, masked: bool
    ) -> None:
        """Take the weights of the preset and the caches (B, KV, T - 1, D) by the names of the zoo's inputs."""
        super().__init__(config, weights, masked=masked)
        for index in range(config.layers):
            for which in ("key", "value"):
                past = torch.from_numpy(caches[f"past_key_values.{index}.{which}"]).float()
                self.register_buffer(f"{which}_{index}", F.pad(past, (0, 0, 0, 1)).to(weights.device, weights.dtype))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Outputs:
        """Return the logits (B, 1, V); the grown caches are `present`."""
        returned = super().forward(input_ids, attention_mask, position_ids, *self.present().values())
        return {"logits": returned["logits"]}

    def present(self) -> Outputs:
        """Return the caches as the zoo's graph names its outputs."""
        return {
            f"present.{index}.{which}": getattr(self, f"{which}_{index}")
            for index in range(len(self.layers))
            for which in ("key", "value")
        }

    @staticmethod
    def grown(cache: Tensor, new: Tensor) -> Tensor:
        """Return the cache, the new token's keys or values in its last place."""
        cache[:, :, -1:] = new
        return cache


def build(
    case: Case,
    arrays: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    *,
    device: str,
    dtype: torch.dtype,
    masked: bool,
) -> nn.Module:
    """Return the module of a case over the zoo's weights.

    A decode step has the caches of `inputs` inside; without any, the module takes caches of all sizes and returns them.
    """
    config, weights = case.preset.config, Weights(arrays, device, dtype)
    if isinstance(config, BertConfig):
        module: nn.Module = Bert(config, weights, masked=masked)
    elif isinstance(config, T5Config):
        module = T5(config, weights, masked=masked)
    elif isinstance(config, Gpt2Config) and case.family is Family.GPT2:
        module = Gpt2(config, weights, masked=masked)
    elif isinstance(config, VitConfig):
        module = Vit(config, weights)
    elif isinstance(config, LlamaConfig) and case.family is Family.LLAMA:
        module = Llama(config, weights, masked=masked)
    elif isinstance(config, LlamaConfig) and inputs:
        module = LlamaDecode(config, weights, inputs, masked=masked)
    elif isinstance(config, LlamaConfig):
        module = LlamaStep(config, weights, masked=masked)
    else:
        raise ValueError(f"no torch module for zoo model {case.model!r}")
    return module.eval()


def device_inputs(case: Case, inputs: Mapping[str, np.ndarray], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return what the module's `forward` takes, on the device; caches are in the module."""
    tensors = [
        torch.from_numpy(inputs[spec.name]).to(device)
        for spec in case.preset.inputs
        if not spec.name.startswith("past_key_values")
    ]
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]


def outputs_of(module: nn.Module, returned: Mapping[str, Tensor]) -> Outputs:
    """Return copies of all outputs by name, the caches of a decode step included."""
    present = module.present() if isinstance(module, LlamaDecode) else {}
    return {name: tensor.clone() for name, tensor in {**returned, **present}.items()}
