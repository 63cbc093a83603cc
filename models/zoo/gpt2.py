"""GPT-2: learned positions, pre-norm layers with one combined QKV projection, tied output head.

torch.onnx writes GPT-2's projection as one matmul and a Split, unlike the three of BERT and Llama; so does this graph.
The prefill graph maps input_ids and attention_mask to logits. The decode step also takes position_ids and every layer's
cache, and returns the caches with one token more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx

from relaxtune.models.zoo import layers
from relaxtune.models.zoo.decoding import DecoderInputs, decoder_inputs, keys_and_values
from relaxtune.models.zoo.graph import Dim, GraphBuilder, Precision


@dataclass(frozen=True)
class Gpt2Config:
    """Sizes of a GPT-2 decoder."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    max_positions: int = 1024
    epsilon: float = 1e-5
    init_std: float = 0.02

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.hidden // self.heads


def build_gpt2(
    name: str, config: Gpt2Config, dims: dict[str, Dim], precision: Precision, seed: int, *, decode: bool = False
) -> onnx.ModelProto:
    """Return the prefill graph, or the decode-step graph."""
    b = GraphBuilder(name, precision, seed, config.init_std)
    inputs = decoder_inputs(b, dims, decode=decode)
    with b.scope("transformer"):
        table = b.matrix("wte.weight", config.vocab, config.hidden)
        positions = inputs.position_ids or b.op("Unsqueeze", inputs.query_positions, b.int64([0]))
        placed = b.op("Gather", b.matrix("wpe.weight", config.max_positions, config.hidden), positions)
        hidden = b.op("Add", b.op("Gather", table, inputs.input_ids), placed)
        for index in range(config.layers):
            with b.scope(f"h.{index}"):
                hidden = _layer(b, config, hidden, inputs, index)
        hidden = layers.layer_norm(b, "ln_f", hidden, config.hidden, config.epsilon)
    with b.scope("lm_head"):
        logits = b.op("MatMul", hidden, b.op("Transpose", table, perm=[1, 0]))
    b.output(logits, "logits", precision.element_type, [inputs.batch, inputs.length, config.vocab])
    inputs.declare_caches(b, config.heads, config.head_size)
    return b.build()


def _layer(b: GraphBuilder, config: Gpt2Config, hidden: str, inputs: DecoderInputs, index: int) -> str:
    size = config.hidden
    normed = layers.layer_norm(b, "ln_1", hidden, size, config.epsilon)
    with b.scope("attn"):
        mixed = layers.linear(b, "c_attn", normed, size, 3 * size)
        parts = b.op_multi("Split", 3, mixed, b.int64([size] * 3), axis=2)
        query, key, value = (
            layers.split_heads(b, part, inputs.batch, inputs.length, config.heads, config.head_size) for part in parts
        )
        key, value = keys_and_values(b, inputs, index, key, value, config.heads, config.head_size)
        scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = b.op("Div", scores, b.real(math.sqrt(config.head_size)))
        scores = b.op("Where", inputs.visible, scores, b.real(b.precision.mask_fill))
        context = layers.merge_heads(b, layers.attend(b, scores, value), inputs.batch, inputs.length, size)
        hidden = b.op("Add", layers.linear(b, "c_proj", context, size, size), hidden)
    normed = layers.layer_norm(b, "ln_2", hidden, size, config.epsilon)
    with b.scope("mlp"):
        wide = layers.gelu_tanh(b, layers.linear(b, "c_fc", normed, size, 4 * size))
        return b.op("Add", hidden, layers.linear(b, "c_proj", wide, 4 * size, size))
