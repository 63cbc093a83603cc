"""T5-style encoder: relative position bias shared by all layers, RMSNorm, unscaled attention, ReLU, no biases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from relaxtune.models.zoo import layers
from relaxtune.models.zoo.graph import Dim, GraphBuilder, Precision

# A distance on a bucket's border (16, 32, 64) gives a logarithm that is exactly a whole number, and one rounding error
# would move it to the next bucket. Adding this before truncation makes every runtime agree.
BUCKET_NUDGE = 1e-4


@dataclass(frozen=True)
class T5Config:
    """Sizes of a T5 encoder."""

    layers: int
    hidden: int
    heads: int
    head_size: int
    ffn: int
    vocab: int
    buckets: int = 32
    max_distance: int = 128
    epsilon: float = 1e-6
    init_std: float = 0.02


def build_t5(name: str, config: T5Config, dims: dict[str, Dim], precision: Precision, seed: int) -> onnx.ModelProto:
    """Return the graph: input_ids, attention_mask -> last_hidden_state."""
    b = GraphBuilder(name, precision, seed, config.init_std)
    batch, length = dims["batch"], dims["sequence"]
    ids, mask = (b.input(which, TensorProto.INT64, [batch, length]) for which in ("input_ids", "attention_mask"))
    # T5 has no norm before its first residual: embeddings of size 1 keep it comparable to what the layers add.
    hidden = b.op("Gather", b.matrix("shared.weight", config.vocab, config.hidden, std=1.0), ids)
    with b.scope("encoder"):
        bias = b.op("Add", _position_bias(b, config, ids, length), layers.padding_bias(b, mask))
        for index in range(config.layers):
            with b.scope(f"block.{index}"):
                hidden = _layer(b, config, hidden, bias, batch, length)
        hidden = layers.rms_norm(b, "final_layer_norm", hidden, config.hidden, config.epsilon)
    b.output(hidden, "last_hidden_state", precision.element_type, [batch, length, config.hidden])
    return b.build()


def _position_bias(b: GraphBuilder, config: T5Config, ids: str, length: Dim) -> str:
    """Return the bias (1, H, S, S) looked up by the bucket of key position - query position."""
    with b.scope("relative_attention_bias"):
        positions = layers.arange(b, layers.scalar_dim(b, ids, 1, length))
        keys, queries = b.op("Unsqueeze", positions, b.int64([0])), b.op("Unsqueeze", positions, b.int64([1]))
        bucket = _buckets(b, config, b.op("Sub", keys, queries))
        # Its own scale: the bias is added to scores of size 1.
        rows = b.op("Gather", b.matrix("weight", config.buckets, config.heads, std=0.5), bucket)
        return b.op("Unsqueeze", b.op("Transpose", rows, perm=[2, 0, 1]), b.int64([0]))


def _buckets(b: GraphBuilder, config: T5Config, distance: str) -> str:
    """Return the bucket of each distance (S, S): half for either sign, exact near 0, logarithmic further off."""
    half = config.buckets // 2
    exact = half // 2
    ahead = b.op("Cast", b.op("Greater", distance, b.int64(0)), to=TensorProto.INT64)
    side = b.op("Mul", ahead, b.int64(half))
    size = b.op("Abs", distance)
    # Max keeps log() away from 0; those distances take the exact branch.
    ratio = b.op(
        "Div", b.op("Cast", b.op("Max", size, b.int64(1)), to=TensorProto.FLOAT), b.const(exact, TensorProto.FLOAT)
    )
    scale = (half - exact) / math.log(config.max_distance / exact)
    steps = b.op("Mul", b.op("Log", ratio), b.const(scale, TensorProto.FLOAT))
    steps = b.op("Cast", b.op("Add", steps, b.const(BUCKET_NUDGE, TensorProto.FLOAT)), to=TensorProto.INT64)
    far = b.op("Min", b.op("Add", steps, b.int64(exact)), b.int64(half - 1))
    return b.op("Add", side, b.op("Where", b.op("Less", size, b.int64(exact)), size, far))


def _layer(b: GraphBuilder, config: T5Config, hidden: str, bias: str, batch: Dim, length: Dim) -> str:
    inner = config.heads * config.head_size
    normed = layers.rms_norm(b, "layer.0.layer_norm", hidden, config.hidden, config.epsilon)
    with b.scope("layer.0", "SelfAttention"):
        heads = (batch, length, config.heads, config.head_size)
        query, key, value = layers.project_heads(b, ("q", "k", "v"), normed, config.hidden, heads, bias=False)
        scores = b.op("Add", b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2])), bias)
        context = layers.merge_heads(b, layers.attend(b, scores, value), batch, length, inner)
        hidden = b.op("Add", hidden, layers.linear(b, "o", context, inner, config.hidden, bias=False))
    normed = layers.rms_norm(b, "layer.1.layer_norm", hidden, config.hidden, config.epsilon)
    with b.scope("layer.1", "DenseReluDense"):
        wide = b.op("Relu", layers.linear(b, "wi", normed, config.hidden, config.ffn, bias=False))
        return b.op("Add", hidden, layers.linear(b, "wo", wide, config.ffn, config.hidden, bias=False))
