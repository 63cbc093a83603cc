"""What the plain torch modules of the cases are made of; see torch_models for the notation."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relaxtune.models.zoo.bert import BertConfig
from relaxtune.models.zoo.llama import LlamaConfig, inverse_frequencies
from relaxtune.models.zoo.t5 import BUCKET_NUDGE, T5Config


class Weights:
    """The zoo's weights by name, as tensors on one device in one dtype."""

    def __init__(self, arrays: Mapping[str, np.ndarray], device: str, dtype: torch.dtype) -> None:
        """Hold arrays that are copied to the device when asked for."""
        self._arrays = arrays
        self.device = device
        self.dtype = dtype

    def get(self, name: str) -> Tensor:
        """Return one weight."""
        return torch.from_numpy(np.array(self._arrays[name])).to(self.device, self.dtype)

    def linear(self, *names: str, bias: bool = True) -> Linear:
        """Return projections of the same input as one, the first of `names` first in its output."""
        weight = torch.cat([self.get(f"{name}.weight") for name in names], dim=1).t().contiguous()
        return Linear(weight, torch.cat([self.get(f"{name}.bias") for name in names]) if bias else None)

    def norm(self, name: str, epsilon: float) -> LayerNorm:
        """Return a layer normalisation."""
        return LayerNorm(self.get(f"{name}.weight"), self.get(f"{name}.bias"), epsilon)

    def rms_norm(self, name: str, epsilon: float) -> RmsNorm:
        """Return an RMS normalisation."""
        return RmsNorm(self.get(f"{name}.weight"), epsilon)


class Linear(nn.Module):
    """x W^T + b with W (out, in)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Hold the weights."""
        super().__init__()
        self.weight = frozen(weight)
        self.bias = None if bias is None else frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection of (..., in)."""
        return F.linear(x, self.weight, self.bias)


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis."""

    def __init__(self, weight: Tensor, bias: Tensor, epsilon: float) -> None:
        """Hold the weights."""
        super().__init__()
        self.weight, self.bias = frozen(weight), frozen(bias)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class RmsNorm(nn.Module):
    """RMS normalisation over the last axis."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """Hold the gain."""
        super().__init__()
        self.weight = frozen(weight)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class BertLayer(nn.Module):
    """One layer of the encoder."""

    def __init__(self, config: BertConfig, weights: Weights, name: str) -> None:
        """Take the weights of one layer."""
        super().__init__()
        self.heads = config.heads
        self.qkv = weights.linear(*(f"{name}.attention.{which}" for which in ("query", "key", "value")))
        self.mixed = weights.linear(f"{name}.attention.output.dense")
        self.mixed_norm = weights.norm(f"{name}.attention.output.LayerNorm", config.epsilon)
        self.wide = weights.linear(f"{name}.intermediate.dense")
        self.narrow = weights.linear(f"{name}.output.dense")
        self.norm = weights.norm(f"{name}.output.LayerNorm", config.epsilon)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return the next hidden state (B, S, N)."""
        context = _self_attention(self.qkv(hidden), self.heads, mask=mask)
        hidden = self.mixed_norm(self.mixed(context) + hidden)
        return self.norm(self.narrow(F.gelu(self.wide(hidden))) + hidden)


class PreNormLayer(nn.Module):
    """One layer with the norm before attention and before the two-matmul network, as ViT and GPT-2 have it."""

    def __init__(
        self,
        heads: int,
        norm: LayerNorm,
        qkv: Linear,
        mixed: Linear,
        after: LayerNorm,
        wide: Linear,
        narrow: Linear,
        *,
        gelu: str,
        causal: bool,
    ) -> None:
        """Take the parts of one layer; `gelu` is torch's name of the approximation."""
        super().__init__()
        self.heads, self.gelu, self.causal = heads, gelu, causal
        self.norm, self.qkv, self.mixed = norm, qkv, mixed
        self.after, self.wide, self.narrow = after, wide, narrow

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return the next hidden state (B, S, N); a mask given is the causal one too."""
        causal = self.causal and mask is None
        context = _self_attention(self.qkv(self.norm(hidden)), self.heads, mask=mask, causal=causal)
        hidden = self.mixed(context) + hidden
        return hidden + self.narrow(F.gelu(self.wide(self.after(hidden)), approximate=self.gelu))


class T5Layer(nn.Module):
    """One layer of the encoder: RMS norms before, attention that is not scaled, no biases."""

    def __init__(self, config: T5Config, weights: Weights, name: str) -> None:
        """Take the weights of one layer."""
        super().__init__()
        self.heads = config.heads
        self.norm = weights.rms_norm(f"{name}.layer.0.layer_norm", config.epsilon)
        self.qkv = weights.linear(*(f"{name}.layer.0.SelfAttention.{which}" for which in "qkv"), bias=False)
        self.mixed = weights.linear(f"{name}.layer.0.SelfAttention.o", bias=False)
        self.after = weights.rms_norm(f"{name}.layer.1.layer_norm", config.epsilon)
        self.wide = weights.linear(f"{name}.layer.1.DenseReluDense.wi", bias=False)
        self.narrow = weights.linear(f"{name}.layer.1.DenseReluDense.wo", bias=False)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Return the next hidden state (B, S, N); the bias (B or 1, H, S, S) is added to the scores."""
        hidden = hidden + self.mixed(_self_attention(self.qkv(self.norm(hidden)), self.heads, mask=bias, scale=1.0))
        return hidden + self.narrow(F.relu(self.wide(self.after(hidden))))


class LlamaLayer(nn.Module):
    """One layer without its attention, which prefill and decode do differently."""

    def __init__(self, config: LlamaConfig, weights: Weights, index: int) -> None:
        """Take the weights of one layer."""
        super().__init__()
        name = f"model.layers.{index}"
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.norm = weights.rms_norm(f"{name}.input_layernorm", config.epsilon)
        self.qkv = weights.linear(*(f"{name}.self_attn.{which}_proj" for which in "qkv"), bias=False)
        self.mixed = weights.linear(f"{name}.self_attn.o_proj", bias=False)
        self.after = weights.rms_norm(f"{name}.post_attention_layernorm", config.epsilon)
        self.gate_up = weights.linear(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj", bias=False)
        self.down = weights.linear(f"{name}.mlp.down_proj", bias=False)

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query (B, H, S, D), key and value (B, KV, S, D), query and key turned to their positions."""
        mixed = self.qkv(self.norm(hidden)).unflatten(2, (-1, self.head_size)).transpose(1, 2)
        query, key, value = mixed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value

    def finish(self, hidden: Tensor, context: Tensor) -> Tensor:
        """Return the next hidden state (B, S, N) from the attention's context (B, S, H*D)."""
        hidden = hidden + self.mixed(context)
        gate, up = self.gate_up(self.after(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


def rotary_tables(config: LlamaConfig, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position times frequency for all positions, in float32 rounded to the weights' dtype."""
    positions = torch.arange(config.max_positions, dtype=torch.float32)
    angles = positions[:, None] * torch.from_numpy(inverse_frequencies(config))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(weights.device, weights.dtype), angles.sin().to(weights.device, weights.dtype)


def distance_buckets(config: T5Config, distance: Tensor) -> Tensor:
    """Return the bucket of each key position - query position, as the zoo's graph computes it."""
    half = config.buckets // 2
    exact = half // 2
    size = distance.abs()
    scale = (half - exact) / math.log(config.max_distance / exact)
    steps = (torch.log(size.clamp(min=1).float() / exact) * scale + BUCKET_NUDGE).long()
    return (distance > 0).long() * half + torch.where(size < exact, size, (steps + exact).clamp(max=half - 1))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def _self_attention(
    qkv: Tensor, heads: int, *, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return the context (B, S, H*D) from (B, S, 3*H*D) with all heads of Q first, then K, then V."""
    query, key, value = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    return context.transpose(1, 2).flatten(2)


def causal_and_padding(attention_mask: Tensor) -> Tensor:
    """Return a bool mask (B, 1, S, S), true where a query may look at a key."""
    length = attention_mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    return causal & attention_mask[:, None, None, :].bool()


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
