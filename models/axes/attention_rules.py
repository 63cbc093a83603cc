"""Rules of attention and its embeddings: sizes of caches, masks and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from relaxtune.models.axes.facts import ONE, AxisFacts, Known, Rule, sizes_of
from relaxtune.models.onnx_model import attribute_of
from relaxtune.polynomials import Polynomial

# ONNX Runtime's decoders: the cache, the new keys, and how many they are together.
CACHED_ATTENTION = "GroupQueryAttention"


def _embeddings(facts: AxisFacts, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    """EmbedLayerNormalization: without position ids, as many rows of the table of positions as there are tokens."""
    ids = sizes_of(inputs[0])
    if len(node.input) < 9 or not node.input[8]:
        facts.require(node, 3, sizes_of(inputs[3])[0], ids[1])
    hidden = (*ids, sizes_of(inputs[2])[1])
    return [Known(hidden), Known(ids[:1]), Known(hidden)][: len(node.output)]


def _rotary(facts: AxisFacts, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    """RotaryEmbedding: ONNX Runtime takes no longer sequences than its tables have rows."""
    table = 2 if node.domain else 1
    rows, data = sizes_of(inputs[table]), sizes_of(inputs[0])
    if len(rows) == 2:
        facts.require(node, table, rows[0], data[2] if len(data) == 4 else data[1])
    return [Known(data)]


def _cached(facts: AxisFacts, inputs: Sequence[Known], past: int, new: Polynomial) -> Polynomial:
    """Return the number of keys: those of a cache (B, N, P, H) and the new ones."""
    return sizes_of(inputs[past])[2] + new if len(inputs) > past and inputs[past].shape is not None else new


def _onnx_attention(facts: AxisFacts, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    """Attention of ONNX: query, key, value, mask (..., S, P + K), past key, past value."""
    total = _cached(facts, inputs, 4, sizes_of(inputs[1])[-2])
    if node.domain == "" and len(inputs) > 3 and inputs[3].shape:
        facts.broadcast([inputs[3].shape[-1:], (total,)])
    return None


def _group_query_attention(facts: AxisFacts, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    """GroupQueryAttention of ONNX Runtime: keys of the cache and new ones are as many as the call says.

    Its inputs are query (B, S, ...), key, value, past key, past value (B, K, P, H), counts of keys less one, their
    largest number, and tables of as many rows.
    """
    query = sizes_of(inputs[0])
    total = _cached(facts, inputs, 3, query[1])
    for known, expected in ((inputs[6], total), (inputs[5], total - ONE)):
        said = known.data if known.data is not None and len(known.data) == 1 else known.top
        if said is not None and len(said) == 1:
            facts.equate(said[0], expected)
    if attribute_of(node, "do_rotary", 0) and len(inputs) > 7:
        facts.require(node, 7, sizes_of(inputs[7])[0], total)
    heads, key_heads = (Polynomial.number(attribute_of(node, name, 0)) for name in ("num_heads", "kv_num_heads"))
    packed = not node.input[1]
    width = query[2].divided(heads + 2 * key_heads if packed else heads)
    present = None if width is None else (query[0], key_heads, facts.resolve(total), width)
    return [Known(None if width is None else (*query[:2], heads * width)), *[Known(present)] * 2]


ATTENTION_RULES: Mapping[str, Rule] = {
    "Attention": _onnx_attention,
    "EmbedLayerNormalization": _embeddings,
    CACHED_ATTENTION: _group_query_attention,
    "RotaryEmbedding": _rotary,
}
