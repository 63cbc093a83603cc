"""Parts that causal decoders share: their inputs, the mask of what a query may see, and the key and value caches.

A decode step has one new token, or `sequence`; its caches hold `past_sequence` tokens, (B, H, P, D) each, and come back
with the new ones behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onnx import TensorProto

from relaxtune.models.dims import Dim
from relaxtune.models.zoo import layers
from relaxtune.models.zoo.graph import GraphBuilder

TOTAL_AFTER_PAST, TOTAL_AFTER_NEW = "past_sequence + 1", "past_sequence + sequence"


@dataclass
class DecoderInputs:
    """Names and dimensions of a decoder's inputs; `query_positions` (S,) is each query's place among the keys."""

    batch: Dim
    length: Dim
    past: Dim | None
    total: Dim
    input_ids: str
    position_ids: str | None
    query_positions: str
    visible: str
    presents: list[tuple[str, str]] = field(default_factory=list)

    def declare_caches(self, b: GraphBuilder, heads: int, head_size: int) -> None:
        """Declare the grown caches as graph outputs, layer by layer."""
        for value, name in self.presents:
            b.output(value, name, b.precision.element_type, [self.batch, heads, self.total, head_size])


def decoder_inputs(b: GraphBuilder, dims: dict[str, Dim], *, decode: bool) -> DecoderInputs:
    """Declare a decoder's inputs and compute which keys each query may see."""
    batch = dims["batch"]
    past = dims["past_sequence"] if decode else None
    length = dims.get("sequence", 1)
    if past is None:
        total = length
    else:
        total = past + length if isinstance(past, int) and isinstance(length, int) else f"{past} + {length}"
    input_ids = b.input("input_ids", TensorProto.INT64, [batch, length])
    mask = b.input("attention_mask", TensorProto.INT64, [batch, total])
    position_ids = b.input("position_ids", TensorProto.INT64, [batch, length]) if decode else None
    key_length = layers.scalar_dim(b, mask, 1, total)
    if past is None:
        query_positions = layers.arange(b, key_length)
    # The new tokens are the last keys, whatever their position_ids say of padding before them.
    elif length == 1:
        query_positions = b.op("Unsqueeze", b.op("Sub", key_length, b.int64(1)), b.int64([0]))
    else:
        count = layers.scalar_dim(b, input_ids, 1, length)
        query_positions = b.op("Add", layers.arange(b, count), b.op("Sub", key_length, count))
    visible = layers.causal_and_padding(b, query_positions, mask, key_length)
    return DecoderInputs(batch, length, past, total, input_ids, position_ids, query_positions, visible)


def keys_and_values(
    b: GraphBuilder, inputs: DecoderInputs, index: int, key: str, value: str, heads: int, head_size: int
) -> tuple[str, str]:
    """Return keys and values (B, H, T, D): in a decode step, the cache with the new token behind it."""
    if inputs.past is None:
        return key, value
    grown = []
    for which, new in (("key", key), ("value", value)):
        shape = [inputs.batch, heads, inputs.past, head_size]
        past = b.input(f"past_key_values.{index}.{which}", b.precision.element_type, shape)
        grown.append(b.op("Concat", past, new, axis=2))
        # The graph's outputs are named when it is complete, so the name is kept here.
        inputs.presents.append((grown[-1], f"present.{index}.{which}"))
    return grown[0], grown[1]
