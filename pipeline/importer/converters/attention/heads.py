"""Parts that attention operators share: heads split and merged, masks as additions, caches, softmax in float32.

Notation: B batch, S queries, T keys, P cached keys, N heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from relaxtune.pipeline.importer.converter_input import ConverterInput, dtype_of, sizes_of

# Of float32; ONNX Runtime hides keys with the lowest number, not with infinity, so a row without keys stays finite.
LOWEST = -3.4028234663852886e38


def split_heads(node: ConverterInput, data: tvm.ir.Expr, heads: int) -> tvm.ir.Expr:
    """Return (B, S, N*H) as (B, N, S, H)."""
    batch, length, hidden = sizes_of(data)
    apart = node.builder.emit(relax.op.reshape(data, (batch, length, heads, hidden // heads)))
    return node.builder.emit(relax.op.permute_dims(apart, [0, 2, 1, 3]))


def merge_heads(node: ConverterInput, data: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return (B, N, S, H) as (B, S, N*H)."""
    batch, heads, length, size = sizes_of(data)
    turned = node.builder.emit(relax.op.permute_dims(data, [0, 2, 1, 3]))
    return relax.op.reshape(turned, (batch, length, heads * size))


def repeat_heads(node: ConverterInput, data: tvm.ir.Expr, times: int) -> tvm.ir.Expr:
    """Return (B, K, T, H) as (B, K * times, T, H), each head repeated for its group of query heads."""
    if times == 1:
        return data
    batch, heads, length, size = sizes_of(data)
    wide = node.builder.emit(relax.op.expand_dims(data, 2))
    spread = node.builder.emit(relax.op.broadcast_to(wide, (batch, heads, times, length, size)))
    return node.builder.emit(relax.op.reshape(spread, (batch, heads * times, length, size)))


@dataclass(frozen=True, eq=False)
class AttentionSteps:
    """The steps of attention, each (B, N, S, T) float32 but the last."""

    scores: tvm.ir.Expr  # query key^T * scale
    capped: tvm.ir.Expr  # The scores, bent by the softcap.
    biased: tvm.ir.Expr  # With the additions.
    weights: tvm.ir.Expr  # Their softmax.
    output: tvm.ir.Expr  # weights value, (B, N, S, H) in the dtype of the query.


def attend(
    node: ConverterInput,
    query: tvm.ir.Expr,
    key: tvm.ir.Expr,
    value: tvm.ir.Expr,
    *,
    scale: float,
    additions: list[tvm.ir.Expr],
    softcap: float = 0.0,
    sink: tvm.ir.Expr | None = None,
) -> tvm.ir.Expr:
    """Return softmax(query key^T * scale + additions) value; see `attend_by_steps`."""
    steps = attend_by_steps(node, query, key, value, scale=scale, additions=additions, softcap=softcap, sink=sink)
    return steps.output


def attend_by_steps(
    node: ConverterInput,
    query: tvm.ir.Expr,
    key: tvm.ir.Expr,
    value: tvm.ir.Expr,
    *,
    scale: float,
    additions: list[tvm.ir.Expr],
    softcap: float = 0.0,
    guarded: bool = False,
    sink: tvm.ir.Expr | None = None,
) -> AttentionSteps:
    """Return softmax(query key^T * scale + additions) value, and what is computed before.

    Parameters
    ----------
    query, key, value : Expr
        (B, N, S, H), (B, N, T, H), (B, N, T, H).
    scale : float
        Factor of the scores.
    additions : list of Expr
        float32, broadcast to (B, N, S, T).
    softcap : float
        Scores become `softcap * tanh(scores / softcap)` before the additions, unless it is 0.
    guarded : bool
        Whether a row gets weights of 0 when infinity hides all its keys; else they are NaN.
    sink : Expr or None
        (N, 1, 1) float32: the score of one more key of every head, which has no value.
    """
    emit, dtype = node.builder.emit, dtype_of(query)
    turned = emit(relax.op.permute_dims(key, [0, 1, 3, 2]))
    scores = emit(relax.op.astype(relax.op.matmul(query, turned), "float32"))
    scores = capped = emit(relax.op.multiply(scores, relax.const(scale, "float32")))
    if softcap:
        bent = emit(relax.op.tanh(relax.op.divide(scores, relax.const(softcap, "float32"))))
        capped = emit(relax.op.multiply(bent, relax.const(softcap, "float32")))
    biased = capped
    for addition in additions:
        biased = emit(relax.op.add(biased, addition))
    weights = emit(relax.op.nn.softmax(biased if sink is None else _with_sink(node, biased, sink), axis=-1))
    if sink is not None:
        weights = emit(relax.op.strided_slice(weights, [3], [0], [sizes_of(biased)[3]]))
    if guarded:
        nothing = emit(relax.op.isnan(weights))
        weights = emit(relax.op.where(nothing, relax.const(0.0, "float32"), weights))
    output = emit(relax.op.matmul(emit(relax.op.astype(weights, dtype)), value))
    return AttentionSteps(scores, capped, biased, weights, output)


def _with_sink(node: ConverterInput, scores: tvm.ir.Expr, sink: tvm.ir.Expr) -> tvm.ir.Expr:
    batch, heads, queries, _ = sizes_of(scores)
    column = node.builder.emit(relax.op.broadcast_to(sink, (batch, heads, queries, 1)))
    return node.builder.emit(relax.op.concat([scores, column], axis=-1))


def hide_where_zero(node: ConverterInput, mask: tvm.ir.Expr, hidden: float) -> tvm.ir.Expr:
    """Return a mask (1 or true: attend) as what is added to the scores: 0, or `hidden` where it is 0."""
    return hidden_unless(node, node.builder.emit(relax.op.astype(mask, "bool")), hidden)


def hidden_unless(node: ConverterInput, seen: tvm.ir.Expr, hidden: float) -> tvm.ir.Expr:
    """Return what is added to the scores: 0 where a condition holds, else `hidden`."""
    return node.builder.emit(relax.op.where(seen, relax.const(0.0, "float32"), relax.const(hidden, "float32")))


def hide_later_keys(
    node: ConverterInput, queries: tvm.tirx.Expr, keys: tvm.tirx.Expr, hidden: float = LOWEST
) -> tvm.ir.Expr:
    """Return (S, T): 0 where query i sees key j, else `hidden`.

    The queries are the last S of T positions.
    """
    emit = node.builder.emit
    at = emit(relax.op.expand_dims(emit(relax.op.arange(keys - queries, keys, 1, "int64")), 1))
    key = emit(relax.op.expand_dims(emit(relax.op.arange(0, keys, 1, "int64")), 0))
    seen = emit(relax.op.less_equal(key, at))
    return hidden_unless(node, seen, hidden)


def append(node: ConverterInput, past: tvm.ir.Expr | None, new: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return (B, N, P, H) and (B, N, S, H) one after the other."""
    return new if past is None else node.builder.emit(relax.op.concat([past, new], axis=2))


def size_tensor(size: tvm.tirx.Expr) -> tvm.ir.Expr:
    """Return a size, symbolic or not, as an int64 tensor of one element."""
    return relax.op.arange(size, size + 1, 1, "int64")
