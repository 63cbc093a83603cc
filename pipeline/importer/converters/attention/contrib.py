"""Attention as one operator of ONNX Runtime: Attention, MultiHeadAttention and GroupQueryAttention.

Each becomes plain matmuls and a softmax; `passes.attention.recognise_attention` makes one kernel of them where it can.
Formulas and layouts: ONNX Runtime, docs/ContribOperators.md.

Notation: B batch, S queries, T keys, P cached keys, N heads, K key heads, H head size.
"""

from __future__ import annotations

import math

import tvm
import tvm_ffi
from tvm import relax

from relaxtune.pipeline.importer.converter_input import ConverterInput, converts, scalar_like, sizes_of, static_size
from relaxtune.pipeline.importer.converters.attention.heads import (
    LOWEST,
    append,
    attend,
    hidden_unless,
    hide_later_keys,
    hide_where_zero,
    merge_heads,
    repeat_heads,
    size_tensor,
    split_heads,
)
from relaxtune.pipeline.importer.converters.attention.rotary import rotate_heads

_MASK_FILTER = -10000.0


@converts("com.microsoft.Attention")
def convert_packed_attention(node: ConverterInput) -> tvm.ir.Expr:
    """Convert com.microsoft Attention: the projections are part of it.

    Inputs: x (B, S, C), weights (C, 3*N*H or as `qkv_hidden_sizes` says), bias (optional), mask (optional: (B, T),
    (B, S, T), or (B) counts of leading keys), past (2, B, N, P, H) (optional), attention bias (optional).
    """
    emit = node.builder.emit
    _refuse(node, "do_rotary", "past_present_share_buffer")
    data, heads = node.input(0), node.integer("num_heads", 0)
    projected = emit(relax.op.matmul(data, node.input(1)))
    bias = node.optional(2)
    if bias is not None:
        projected = emit(relax.op.add(projected, bias))
    widths = node.integers("qkv_hidden_sizes", [static_size(node.input(1), 1) // 3] * 3)
    query, key, value = (split_heads(node, part, heads) for part in _split(node, projected, widths))
    past = node.optional(4)
    cached = [None, None] if past is None else [emit(relax.op.squeeze(half, [0])) for half in node.parts(past, 2, 0)]
    key, value = append(node, cached[0], key), append(node, cached[1], value)
    hidden = node.number("mask_filter_value", _MASK_FILTER)
    additions = [*_key_mask(node, node.optional(3), key, hidden), *_bias(node, node.optional(5))]
    if node.integer("unidirectional", 0):
        additions.append(hide_later_keys(node, sizes_of(query)[2], sizes_of(key)[2]))
    scale = _scale(node, query)
    output = merge_heads(node, attend(node, query, key, value, scale=scale, additions=additions))
    if not node.wants(1):
        return output
    both = [emit(relax.op.expand_dims(half, 0)) for half in (key, value)]
    return relax.Tuple([output, relax.op.concat(both, axis=0)])


@converts("com.microsoft.MultiHeadAttention")
def convert_multi_head_attention(node: ConverterInput) -> tvm.ir.Expr:
    """Convert com.microsoft MultiHeadAttention: projected queries, keys and values.

    Inputs: query (B, S, N*H) or packed (B, S, N, 3, H), key (B, T, N*H), packed with the value (B, T, N, 2, H) or
    cached (B, N, T, H), value, bias (optional), key padding mask ((B, T) or (B, S, T), or (B) counts; optional),
    attention bias (optional), past key and past value (B, N, P, H) (optional).
    """
    emit, heads = node.builder.emit, node.integer("num_heads", 0)
    query, key, value = _apart(node, heads)
    bias = node.optional(3)
    if bias is not None:
        query, key, value = _with_bias(node, bias, query, key, value)
    if any(part.ty.ndim == 3 for part in (query, key, value)):
        query, key, value = (
            split_heads(node, part, heads) if part.ty.ndim == 3 else part for part in (query, key, value)
        )
    key, value = append(node, node.optional(6), key), append(node, node.optional(7), value)
    hidden = node.number("mask_filter_value", _MASK_FILTER)
    additions = [*_key_mask(node, node.optional(4), key, hidden), *_bias(node, node.optional(5))]
    if node.integer("unidirectional", 0):
        additions.append(hide_later_keys(node, sizes_of(query)[2], sizes_of(key)[2]))
    scale = _scale(node, query)
    output = emit(merge_heads(node, attend(node, query, key, value, scale=scale, additions=additions)))
    return relax.Tuple([output, key, value]) if node.wants(1) else output


@converts("com.microsoft.GroupQueryAttention")
def convert_group_query_attention(node: ConverterInput) -> tvm.ir.Expr:
    """Convert com.microsoft GroupQueryAttention: causal, with fewer key heads, rotary embedding and a cache inside.

    Inputs: query (B, S, N*H) or packed (B, S, (N + 2K)*H), key and value (B, S, K*H), past key and value (B, K, P, H)
    (optional), counts of keys less one (B) int32, total length, cos and sin tables, rows of these tables (B, S), a bias
    (B or 1, N or 1, S, T), a sink of each head (N) (all optional).

    A batch of unequal lengths keeps its new keys after its own past ones, as ONNX Runtime does: new key i of a row
    with p past keys is key p + i, so keys are gathered row by row.
    """
    _refuse(node, "qk_output", "k_quant_type", "v_quant_type")
    emit = node.builder.emit
    heads, key_heads = node.integer("num_heads", 0), node.integer("kv_num_heads", 0)
    query, key, value = _grouped(node, heads, key_heads)
    length = sizes_of(query)[2]
    past_key, past_value = node.optional(3), node.optional(4)
    # Past keys of each row: (B, 1) int64. A first prompt has none, whatever its row's length.
    counts = emit(relax.op.astype(node.input(5), "int64"))
    counts = emit(relax.op.reshape(counts, (sizes_of(query)[0], 1)))
    padding: list[tvm.ir.Expr] = []
    if past_key is None or _is_zero(sizes_of(past_key)[2]):
        # The rows of padding see no more keys than the row's length.
        valid = emit(relax.op.add(emit(relax.op.reshape(counts, (sizes_of(query)[0],))), relax.const(1, "int64")))
        padding = _key_mask(node, valid, key, LOWEST)
        past = emit(relax.op.multiply(counts, relax.const(0, "int64")))
        past_key = past_value = None
    else:
        past = emit(relax.op.add(counts, relax.const(1, "int64")))
        past = emit(relax.op.subtract(past, emit(size_tensor(length))))
    if node.integer("do_rotary", 0):
        places = node.optional(9)
        if places is None:
            places = emit(relax.op.add(past, emit(relax.op.expand_dims(relax.op.arange(0, length, 1, "int64"), 0))))
        interleaved = bool(node.integer("rotary_interleaved", 0))
        query, key = (
            rotate_heads(node, part, node.input(7), node.input(8), places, interleaved=interleaved)
            for part in (query, key)
        )
    if past_key is not None and past_value is not None:
        key, value = _placed(node, past_key, key, past), _placed(node, past_value, value, past)
    seen = _seen(node, past, length, sizes_of(key)[2], node.integer("local_window_size", -1))
    group = heads // key_heads
    output = attend(
        node,
        query,
        repeat_heads(node, key, group),
        repeat_heads(node, value, group),
        scale=_scale(node, query),
        additions=[seen, *padding, *_bias(node, node.optional(10))],
        softcap=node.number("softcap", 0.0),
        sink=_sink(node, heads),
    )
    return relax.Tuple([emit(merge_heads(node, output)), key, value])


def _sink(node: ConverterInput, heads: int) -> tvm.ir.Expr | None:
    """Return GroupQueryAttention's sink of each head (N, 1, 1) float32: the one given, else 0 for a smooth softmax."""
    given = node.optional(11)
    if given is not None:
        return relax.op.reshape(node.builder.emit(relax.op.astype(given, "float32")), (heads, 1, 1))
    return relax.op.zeros((heads, 1, 1), "float32") if node.integer("smooth_softmax", 0) > 0 else None


def _refuse(node: ConverterInput, *names: str) -> None:
    for name in names:
        if node.attributes.get(name, 0) not in (0, "NONE"):
            raise ValueError(f"attribute {name!r}: expected 0, got {node.attributes[name]!r}")


def _scale(node: ConverterInput, query: tvm.ir.Expr) -> float:
    given = node.number("scale", 0.0)
    return given or 1.0 / math.sqrt(static_size(query, 3))


def _split(node: ConverterInput, data: tvm.ir.Expr, widths: list[int]) -> list[tvm.ir.Expr]:
    """Return the parts of the last axis."""
    ends = [sum(widths[: index + 1]) for index in range(len(widths) - 1)]
    return list(node.parts(data, ends, -1))


def _bias(node: ConverterInput, bias: tvm.ir.Expr | None) -> list[tvm.ir.Expr]:
    return [] if bias is None else [node.builder.emit(relax.op.astype(bias, "float32"))]


def _key_mask(node: ConverterInput, mask: tvm.ir.Expr | None, key: tvm.ir.Expr, hidden: float) -> list[tvm.ir.Expr]:
    """Return what a mask of keys adds to the scores (B, N, S, T)."""
    if mask is None:
        return []
    emit = node.builder.emit
    shape = sizes_of(mask)
    if len(shape) == 1:
        keys = sizes_of(key)[2]
        if not tvm_ffi.structural_equal(shape[0], sizes_of(key)[0]):
            raise ValueError(f"mask of {len(shape)} axes: expected (batch), (batch, keys) or (batch, queries, keys)")
        at = emit(relax.op.expand_dims(emit(relax.op.arange(0, keys, 1, "int32")), 0))
        counts = emit(relax.op.expand_dims(emit(relax.op.astype(mask, "int32")), 1))
        mask, shape = emit(relax.op.less(at, counts)), [shape[0], keys]
    if len(shape) not in (2, 3):
        raise ValueError(f"mask of {len(shape)} axes: expected (batch), (batch, keys) or (batch, queries, keys)")
    axes = [1, 2] if len(shape) == 2 else [1]
    return [emit(relax.op.expand_dims(hide_where_zero(node, mask, hidden), axes))]


def _apart(node: ConverterInput, heads: int) -> tuple[tvm.ir.Expr, tvm.ir.Expr, tvm.ir.Expr]:
    """Return MultiHeadAttention's query, key and value, each (B, L, N*H) or (B, N, L, H)."""
    emit = node.builder.emit
    query, key, value = node.input(0), node.optional(1), node.optional(2)

    def unpack(packed: tvm.ir.Expr, count: int) -> list[tvm.ir.Expr]:
        batch, length, _, _, size = sizes_of(packed)
        shape = (batch, length, heads * size)
        return [emit(relax.op.reshape(part, shape)) for part in node.parts(packed, count, 3)]

    if key is None:
        query, key, value = unpack(query, 3)
    elif value is None:
        key, value = unpack(key, 2)
    return query, key, value


def _with_bias(
    node: ConverterInput, bias: tvm.ir.Expr, query: tvm.ir.Expr, key: tvm.ir.Expr, value: tvm.ir.Expr
) -> list[tvm.ir.Expr]:
    """Add the parts of the bias; keys and values that are cached already have theirs."""
    width = static_size(query, 2)
    rest = (static_size(bias, 0) - width) // 2
    total = static_size(bias, 0)
    widths = [width, rest, total - width - rest]
    if value.ty.ndim == 3:
        widths = [width, static_size(key, 2), static_size(value, 2)]
    parts = _split(node, bias, widths)
    return [
        node.builder.emit(relax.op.add(data, part)) if data.ty.ndim == 3 else data
        for data, part in zip((query, key, value), parts, strict=True)
    ]


def _grouped(node: ConverterInput, heads: int, key_heads: int) -> tuple[tvm.ir.Expr, tvm.ir.Expr, tvm.ir.Expr]:
    """Return GroupQueryAttention's query (B, N, S, H), key and value (B, K, S, H)."""
    query, key, value = node.input(0), node.optional(1), node.optional(2)
    if key is None or value is None:
        size = static_size(query, 2) // (heads + 2 * key_heads)
        query, key, value = _split(node, query, [heads * size, key_heads * size, key_heads * size])
    return (split_heads(node, query, heads), split_heads(node, key, key_heads), split_heads(node, value, key_heads))


def _placed(node: ConverterInput, past: tvm.ir.Expr, new: tvm.ir.Expr, counts: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return a cache (B, K, P + S, H) in which row b has `counts[b]` past keys, then the new ones, then zeros."""
    emit = node.builder.emit
    batch, heads, length, size = sizes_of(past)
    added = sizes_of(new)[2]
    total = length + added
    both = append(node, past, new)
    at = emit(relax.op.expand_dims(emit(relax.op.arange(0, total, 1, "int64")), 0))
    behind = emit(relax.op.subtract(at, counts))
    # Key j is past key j, or new key j - counts, which `both` has at P + j - counts.
    moved = emit(relax.op.add(behind, emit(size_tensor(length))))
    moved = emit(relax.op.minimum(moved, emit(size_tensor(total - 1))))
    index = emit(relax.op.where(emit(relax.op.less(behind, relax.const(0, "int64"))), at, moved))
    index = emit(relax.op.expand_dims(index, [1, 3]))
    index = emit(relax.op.broadcast_to(index, (batch, heads, total, size)))
    kept = emit(relax.op.expand_dims(emit(relax.op.less(behind, emit(size_tensor(added)))), [1, 3]))
    gathered = emit(relax.op.gather_elements(both, index, axis=2))
    return emit(relax.op.where(kept, gathered, scalar_like(0.0, both)))


def _seen(
    node: ConverterInput, past: tvm.ir.Expr, queries: tvm.tirx.Expr, keys: tvm.tirx.Expr, window: int
) -> tvm.ir.Expr:
    """Return (B, 1, S, T): 0 where query i of a row sees key j <= past + i, within the window if there is one."""
    emit = node.builder.emit
    at = emit(relax.op.expand_dims(emit(relax.op.arange(0, queries, 1, "int64")), 0))
    at = emit(relax.op.expand_dims(emit(relax.op.add(past, at)), [1, 3]))
    key = emit(relax.op.expand_dims(emit(relax.op.arange(0, keys, 1, "int64")), [0, 1, 2]))
    seen = emit(relax.op.less_equal(key, at))
    if window > 0:
        first = emit(relax.op.subtract(at, relax.const(window, "int64")))
        seen = emit(relax.op.logical_and(seen, emit(relax.op.greater(key, first))))
    return hidden_unless(node, seen, LOWEST)


def _is_zero(size: tvm.tirx.Expr) -> bool:
    return isinstance(size, tvm.tirx.IntImm) and int(size) == 0
