"""ViT: convolution over patches, a class token, learned positions, pre-norm encoder layers, classifier."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx

from relaxtune.models.zoo import layers
from relaxtune.models.zoo.graph import Dim, GraphBuilder, Precision


@dataclass(frozen=True)
class VitConfig:
    """Sizes of a ViT classifier; `patch` divides `image`."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    image: int
    patch: int
    classes: int
    channels: int = 3
    epsilon: float = 1e-12
    init_std: float = 0.02

    @property
    def tokens(self) -> int:
        """Patches and the class token."""
        return (self.image // self.patch) ** 2 + 1


def build_vit(name: str, config: VitConfig, dims: dict[str, Dim], precision: Precision, seed: int) -> onnx.ModelProto:
    """Return the graph: pixel_values (B, 3, H, W) -> logits, last_hidden_state."""
    b = GraphBuilder(name, precision, seed, config.init_std)
    batch, element_type = dims["batch"], precision.element_type
    pixels = b.input("pixel_values", element_type, [batch, config.channels, config.image, config.image])
    hidden = _embeddings(b, config, pixels, batch)
    for index in range(config.layers):
        with b.scope("encoder", f"layer.{index}"):
            hidden = _layer(b, config, hidden, batch)
    hidden = layers.layer_norm(b, "layernorm", hidden, config.hidden, config.epsilon)
    first = b.op("Gather", hidden, b.int64(0), axis=1)
    logits = layers.linear(b, "classifier", first, config.hidden, config.classes)
    b.output(logits, "logits", element_type, [batch, config.classes])
    b.output(hidden, "last_hidden_state", element_type, [batch, config.tokens, config.hidden])
    return b.build()


def _embeddings(b: GraphBuilder, config: VitConfig, pixels: str, batch: Dim) -> str:
    with b.scope("embeddings"):
        with b.scope("patch_embeddings", "projection"):
            kernel = b.matrix("weight", config.hidden, config.channels, config.patch, config.patch)
            step = [config.patch, config.patch]
            grid = b.op("Conv", pixels, kernel, b.bias("bias", config.hidden), kernel_shape=step, strides=step)
        flat = [batch if isinstance(batch, int) else 0, config.hidden, config.tokens - 1]
        patches = b.op("Transpose", b.op("Reshape", grid, b.int64(flat)), perm=[0, 2, 1])
        token = b.matrix("cls_token", 1, 1, config.hidden)
        if isinstance(batch, int):
            shape = b.int64([batch, 1, config.hidden])
        else:
            shape = b.op("Concat", layers.vector_dim(b, pixels, 0, batch), b.int64([1, config.hidden]), axis=0)
        tokens = b.op("Concat", b.op("Expand", token, shape), patches, axis=1)
        return b.op("Add", tokens, b.matrix("position_embeddings", 1, config.tokens, config.hidden))


def _layer(b: GraphBuilder, config: VitConfig, hidden: str, batch: Dim) -> str:
    size, head_size = config.hidden, config.hidden // config.heads
    normed = layers.layer_norm(b, "layernorm_before", hidden, size, config.epsilon)
    with b.scope("attention"):
        heads = (batch, config.tokens, config.heads, head_size)
        query, key, value = layers.project_heads(b, ("query", "key", "value"), normed, size, heads)
        scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = b.op("Div", scores, b.real(math.sqrt(head_size)))
        context = layers.merge_heads(b, layers.attend(b, scores, value), batch, config.tokens, size)
        with b.scope("output"):
            hidden = b.op("Add", layers.linear(b, "dense", context, size, size), hidden)
    normed = layers.layer_norm(b, "layernorm_after", hidden, size, config.epsilon)
    with b.scope("intermediate"):
        wide = layers.gelu(b, layers.linear(b, "dense", normed, size, config.ffn))
    with b.scope("output"):
        return b.op("Add", layers.linear(b, "dense", wide, config.ffn, size), hidden)
