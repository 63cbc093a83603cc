"""Llama style: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, separate output head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from relaxtune.models.zoo import layers
from relaxtune.models.zoo.decoding import DecoderInputs, decoder_inputs, keys_and_values
from relaxtune.models.zoo.graph import Dim, GraphBuilder, Precision


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-style decoder; `kv_heads` divides `heads`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    max_positions: int = 4096
    rope_theta: float = 10000.0
    epsilon: float = 1e-5
    init_std: float = 0.02

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.hidden // self.heads


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Return the D/2 rotary frequencies theta^(-2i/D), float32."""
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    return np.asarray((config.rope_theta**-exponents).astype(np.float32))


def build_llama(
    name: str, config: LlamaConfig, dims: dict[str, Dim], precision: Precision, seed: int, *, decode: bool = False
) -> onnx.ModelProto:
    """Return the prefill graph, or the decode-step graph."""
    b = GraphBuilder(name, precision, seed, config.init_std)
    inputs = decoder_inputs(b, dims, decode=decode)
    with b.scope("model"):
        hidden = b.op("Gather", b.matrix("embed_tokens.weight", config.vocab, config.hidden), inputs.input_ids)
        cos, sin = _rotary_tables(b, config, inputs)
        blocked = b.op("Not", inputs.visible)
        bias = b.op("Mul", b.op("Cast", blocked, to=precision.element_type), b.real(precision.mask_fill))
        for index in range(config.layers):
            with b.scope(f"layers.{index}"):
                hidden = _layer(b, config, hidden, inputs, index, cos, sin, bias)
        hidden = layers.rms_norm(b, "norm", hidden, config.hidden, config.epsilon)
    logits = layers.linear(b, "lm_head", hidden, config.hidden, config.vocab, bias=False)
    b.output(logits, "logits", precision.element_type, [inputs.batch, inputs.length, config.vocab])
    inputs.declare_caches(b, config.kv_heads, config.head_size)
    return b.build()


def _rotary_tables(b: GraphBuilder, config: LlamaConfig, inputs: DecoderInputs) -> tuple[str, str]:
    """Return cos and sin (B or 1, 1, S, D) of position times frequency, computed in fp32."""
    with b.scope("rotary_emb"):
        positions = inputs.position_ids or b.op("Unsqueeze", inputs.query_positions, b.int64([0]))
        wide = b.op("Cast", b.op("Unsqueeze", positions, b.int64([2])), to=TensorProto.FLOAT)
        angles = b.op("Mul", wide, b.const(inverse_frequencies(config)[None, None], TensorProto.FLOAT))
        angles = b.op("Unsqueeze", b.op("Concat", angles, angles, axis=-1), b.int64([1]))
        return layers.from_fp32(b, b.op("Cos", angles)), layers.from_fp32(b, b.op("Sin", angles))


def _rotate(b: GraphBuilder, x: str, cos: str, sin: str, head_size: int) -> str:
    """Return x * cos + rotate_half(x) * sin for x (B, H, S, D)."""
    half = head_size // 2
    low = b.op("Slice", x, b.int64([0]), b.int64([half]), b.int64([3]), b.int64([1]))
    high = b.op("Slice", x, b.int64([half]), b.int64([head_size]), b.int64([3]), b.int64([1]))
    turned = b.op("Concat", b.op("Neg", high), low, axis=-1)
    return b.op("Add", b.op("Mul", x, cos), b.op("Mul", turned, sin))


def _repeat_heads(b: GraphBuilder, x: str, config: LlamaConfig, batch: Dim, total: Dim) -> str:
    """Return (B, KV, T, D) as (B, H, T, D), every key head repeated for its group of query heads."""
    group = config.heads // config.kv_heads
    if group == 1:
        return x
    wide = b.op("Unsqueeze", x, b.int64([2]))
    if isinstance(batch, int) and isinstance(total, int):
        shape = [batch, config.kv_heads, group, total, config.head_size]
    else:
        # Expand broadcasts both ways: ones keep the axes whose size is not known here.
        shape = [1, 1, group, 1, 1]
    expanded = b.op("Expand", wide, b.int64(shape))
    ends = (batch if isinstance(batch, int) else 0, total if isinstance(total, int) else -1)
    return b.op("Reshape", expanded, b.int64([ends[0], config.heads, ends[1], config.head_size]))


def _layer(
    b: GraphBuilder, config: LlamaConfig, hidden: str, inputs: DecoderInputs, index: int, cos: str, sin: str, bias: str
) -> str:
    normed = layers.rms_norm(b, "input_layernorm", hidden, config.hidden, config.epsilon)
    with b.scope("self_attn"):
        context = _attention(b, config, normed, inputs, index, cos, sin, bias)
        hidden = b.op("Add", hidden, layers.linear(b, "o_proj", context, config.hidden, config.hidden, bias=False))
    normed = layers.rms_norm(b, "post_attention_layernorm", hidden, config.hidden, config.epsilon)
    with b.scope("mlp"):
        gate = layers.linear(b, "gate_proj", normed, config.hidden, config.ffn, bias=False)
        up = layers.linear(b, "up_proj", normed, config.hidden, config.ffn, bias=False)
        gated = b.op("Mul", layers.silu(b, gate), up)
        return b.op("Add", hidden, layers.linear(b, "down_proj", gated, config.ffn, config.hidden, bias=False))


def _attention(
    b: GraphBuilder, config: LlamaConfig, normed: str, inputs: DecoderInputs, index: int, cos: str, sin: str, bias: str
) -> str:
    size = config.head_size
    of_query, of_key = ((inputs.batch, inputs.length, heads, size) for heads in (config.heads, config.kv_heads))
    (query,) = layers.project_heads(b, ["q_proj"], normed, config.hidden, of_query, bias=False)
    key, value = layers.project_heads(b, ["k_proj", "v_proj"], normed, config.hidden, of_key, bias=False)
    query, key = _rotate(b, query, cos, sin, size), _rotate(b, key, cos, sin, size)
    key, value = keys_and_values(b, inputs, index, key, value, config.kv_heads, size)
    key, value = (_repeat_heads(b, x, config, inputs.batch, inputs.total) for x in (key, value))
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = b.op("Add", b.op("Mul", scores, b.real(1.0 / math.sqrt(size))), bias)
    return layers.merge_heads(b, layers.attend(b, scores, value), inputs.batch, inputs.length, config.hidden)
