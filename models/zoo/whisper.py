"""Whisper: a mel spectrogram through two convolutions and an encoder; a causal decoder that attends to it.

One graph is both, for tokens that are known (teacher forcing, or the prompt of a transcription). Layers are pre-norm;
keys have no bias. Positions of sound are a table of weights, as exports have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from relaxtune.models.zoo import layers
from relaxtune.models.zoo.graph import Dim, GraphBuilder, Precision


@dataclass(frozen=True)
class WhisperConfig:
    """Sizes of a Whisper: as many layers in the encoder as in the decoder, a position for two `frames` of sound."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    frames: int = 3000
    mels: int = 80
    max_positions: int = 448
    epsilon: float = 1e-5
    init_std: float = 0.02

    @property
    def positions(self) -> int:
        """Positions of the encoder."""
        return self.frames // 2


def build_whisper(
    name: str, config: WhisperConfig, dims: dict[str, Dim], precision: Precision, seed: int
) -> onnx.ModelProto:
    """Return the graph: input_features (B, mels, frames), decoder_input_ids (B, S) -> logits, encoder's last state."""
    b = GraphBuilder(name, precision, seed, config.init_std)
    batch, length, element_type = dims["batch"], dims["sequence"], precision.element_type
    sound = b.input("input_features", element_type, [batch, config.mels, config.frames])
    ids = b.input("decoder_input_ids", TensorProto.INT64, [batch, length])
    with b.scope("encoder"):
        heard = _convolution(b, "conv1", sound, config.mels, config.hidden, 1)
        heard = _convolution(b, "conv2", heard, config.hidden, config.hidden, 2)
        heard = b.op("Transpose", heard, perm=[0, 2, 1])
        heard = b.op("Add", heard, b.matrix("embed_positions.weight", config.positions, config.hidden))
        for index in range(config.layers):
            with b.scope(f"layers.{index}"):
                heard = _attend(b, config, "self_attn", heard, None, batch, config.positions, config.positions, None)
                heard = _feed_forward(b, config, heard)
        heard = layers.layer_norm(b, "layer_norm", heard, config.hidden, config.epsilon)
    with b.scope("decoder"):
        table = b.matrix("embed_tokens.weight", config.vocab, config.hidden)
        places = layers.arange(b, layers.scalar_dim(b, ids, 1, length))
        known = b.op("Gather", b.matrix("embed_positions.weight", config.max_positions, config.hidden), places)
        hidden = b.op("Add", b.op("Gather", table, ids), known)
        visible = b.op("LessOrEqual", b.op("Unsqueeze", places, b.int64([0])), b.op("Unsqueeze", places, b.int64([1])))
        for index in range(config.layers):
            with b.scope(f"layers.{index}"):
                hidden = _attend(b, config, "self_attn", hidden, None, batch, length, length, visible)
                hidden = _attend(b, config, "encoder_attn", hidden, heard, batch, length, config.positions, None)
                hidden = _feed_forward(b, config, hidden)
        hidden = layers.layer_norm(b, "layer_norm", hidden, config.hidden, config.epsilon)
    with b.scope("proj_out"):
        logits = b.op("MatMul", hidden, b.op("Transpose", table, perm=[1, 0]))
    b.output(logits, "logits", element_type, [batch, length, config.vocab])
    b.output(heard, "encoder_last_hidden_state", element_type, [batch, config.positions, config.hidden])
    return b.build()


def _convolution(b: GraphBuilder, name: str, x: str, n_in: int, n_out: int, stride: int) -> str:
    with b.scope(name):
        weights = (b.matrix("weight", n_out, n_in, 3), b.bias("bias", n_out))
        return layers.gelu(b, b.op("Conv", x, *weights, kernel_shape=[3], strides=[stride], pads=[1, 1]))


def _attend(
    b: GraphBuilder,
    config: WhisperConfig,
    which: str,
    x: str,
    others: str | None,
    batch: Dim,
    queries: Dim,
    keys: Dim,
    visible: str | None,
) -> str:
    """Return x + attention of its norm to itself, or to `others`."""
    size, head_size = config.hidden, config.hidden // config.heads
    normed = layers.layer_norm(b, f"{which}_layer_norm", x, size, config.epsilon)
    source = normed if others is None else others
    with b.scope(which):
        query = b.op("Mul", layers.linear(b, "q_proj", normed, size, size), b.real(1.0 / math.sqrt(head_size)))
        query = layers.split_heads(b, query, batch, queries, config.heads, head_size)
        heads = (batch, keys, config.heads, head_size)
        (key,) = layers.project_heads(b, ["k_proj"], source, size, heads, bias=False)
        (value,) = layers.project_heads(b, ["v_proj"], source, size, heads)
        scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
        if visible is not None:
            scores = b.op("Where", visible, scores, b.real(b.precision.mask_fill))
        context = layers.merge_heads(b, layers.attend(b, scores, value), batch, queries, size)
        return b.op("Add", x, layers.linear(b, "out_proj", context, size, size))


def _feed_forward(b: GraphBuilder, config: WhisperConfig, x: str) -> str:
    normed = layers.layer_norm(b, "final_layer_norm", x, config.hidden, config.epsilon)
    wide = layers.gelu(b, layers.linear(b, "fc1", normed, config.hidden, config.ffn))
    return b.op("Add", x, layers.linear(b, "fc2", wide, config.ffn, config.hidden))
