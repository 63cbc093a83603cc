"""BERT: token, position and type embeddings, post-norm encoder layers, pooler."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from relaxtune.models.zoo import layers
from relaxtune.models.zoo.graph import Dim, GraphBuilder, Precision


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT encoder."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    max_positions: int = 512
    type_vocab: int = 2
    epsilon: float = 1e-12
    init_std: float = 0.02


def build_bert(name: str, config: BertConfig, dims: dict[str, Dim], precision: Precision, seed: int) -> onnx.ModelProto:
    """Return the graph: input_ids, attention_mask, token_type_ids -> last_hidden_state, pooler_output."""
    b = GraphBuilder(name, precision, seed, config.init_std)
    batch, length = dims["batch"], dims["sequence"]
    ids, mask, types = (
        b.input(which, TensorProto.INT64, [batch, length])
        for which in ("input_ids", "attention_mask", "token_type_ids")
    )
    bias = layers.padding_bias(b, mask)
    hidden = _embeddings(b, config, ids, types, length)
    for index in range(config.layers):
        with b.scope("encoder", f"layer.{index}"):
            hidden = _layer(b, config, hidden, bias, batch, length)
    with b.scope("pooler"):
        first = b.op("Gather", hidden, b.int64(0), axis=1)
        pooled = b.op("Tanh", layers.linear(b, "dense", first, config.hidden, config.hidden))
    element_type = precision.element_type
    b.output(hidden, "last_hidden_state", element_type, [batch, length, config.hidden])
    b.output(pooled, "pooler_output", element_type, [batch, config.hidden])
    return b.build()


def _embeddings(b: GraphBuilder, config: BertConfig, ids: str, types: str, length: Dim) -> str:
    with b.scope("embeddings"):
        words = b.op("Gather", b.matrix("word_embeddings.weight", config.vocab, config.hidden), ids)
        kinds = b.op("Gather", b.matrix("token_type_embeddings.weight", config.type_vocab, config.hidden), types)
        all_positions = b.const(np.arange(config.max_positions, dtype=np.int64)[None], TensorProto.INT64)
        end = layers.vector_dim(b, ids, 1, length)
        positions = b.op("Slice", all_positions, b.int64([0]), end, b.int64([1]))
        placed = b.op("Gather", b.matrix("position_embeddings.weight", config.max_positions, config.hidden), positions)
        total = b.op("Add", b.op("Add", words, kinds), placed)
        return layers.layer_norm(b, "LayerNorm", total, config.hidden, config.epsilon)


def _layer(b: GraphBuilder, config: BertConfig, hidden: str, bias: str, batch: Dim, length: Dim) -> str:
    size, head_size = config.hidden, config.hidden // config.heads
    with b.scope("attention"):
        heads = (batch, length, config.heads, head_size)
        query, key, value = layers.project_heads(b, ("query", "key", "value"), hidden, size, heads)
        scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = b.op("Add", b.op("Div", scores, b.real(math.sqrt(head_size))), bias)
        context = layers.merge_heads(b, layers.attend(b, scores, value), batch, length, size)
        with b.scope("output"):
            mixed = b.op("Add", layers.linear(b, "dense", context, size, size), hidden)
            hidden = layers.layer_norm(b, "LayerNorm", mixed, size, config.epsilon)
    with b.scope("intermediate"):
        wide = layers.gelu(b, layers.linear(b, "dense", hidden, size, config.ffn))
    with b.scope("output"):
        mixed = b.op("Add", layers.linear(b, "dense", wide, config.ffn, size), hidden)
        return layers.layer_norm(b, "LayerNorm", mixed, size, config.epsilon)
