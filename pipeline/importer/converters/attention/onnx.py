"""ONNX's own Attention (opset 23 on), with its masks, windows and caches, and TensorScatter, which writes a cache.

It becomes plain matmuls and a softmax; `passes.attention.recognise_attention` makes one kernel of them where it can.
Formulas: ONNX, Operators.md (Attention, opsets 23 to 25). Notation as in `attention`.
"""

from __future__ import annotations

import math

import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.importer.converter_input import ConverterInput, converts, dtype_of, sizes_of, static_size
from relaxtune.pipeline.importer.converters.attention.heads import (
    AttentionSteps,
    append,
    attend_by_steps,
    hidden_unless,
    hide_later_keys,
    hide_where_zero,
    merge_heads,
    repeat_heads,
    size_tensor,
    split_heads,
)

_MASK, _PAST_KEY, _PAST_VALUE, _LENGTHS = 3, 4, 5, 6


@converts("Attention")
def convert_attention(node: ConverterInput) -> tvm.ir.Expr:
    """Convert ONNX Attention.

    Inputs: query, key and value, each (B, S, N*H) with `q_num_heads` and `kv_num_heads`, or (B, N, S, H); mask
    (optional; bool, or added to the scores; a short last axis hides what is beyond it), past key and value (optional),
    counts of keys that are no padding (B) int64 (optional). Outputs: the result, present key and value, the scores.
    """
    flat = node.input(0).ty.ndim == 3
    query, key, value = (node.input(index) for index in range(3))
    if flat:
        heads, key_heads = node.integer("q_num_heads", 0), node.integer("kv_num_heads", 0)
        query = split_heads(node, query, heads)
        key, value = split_heads(node, key, key_heads), split_heads(node, value, key_heads)
    key, value = append(node, node.optional(_PAST_KEY), key), append(node, node.optional(_PAST_VALUE), value)
    group = static_size(query, 1) // static_size(key, 1)
    steps = attend_by_steps(
        node,
        query,
        repeat_heads(node, key, group),
        repeat_heads(node, value, group),
        scale=node.number("scale", 0.0) or 1.0 / math.sqrt(static_size(query, 3)),
        additions=[*_mask(node, key), *_positions(node, query, key), *_padding(node, key)],
        softcap=node.number("softcap", 0.0),
        guarded=node.optional(_MASK) is not None or node.optional(_LENGTHS) is not None,
    )
    result = node.builder.emit(merge_heads(node, steps.output)) if flat else steps.output
    scores = _scores(node, steps, dtype_of(query)) if node.wants(3) else relax.const(0.0, "float32")
    return relax.Tuple([result, key, value, scores]) if len(node.outputs) > 1 else result


def _scores(node: ConverterInput, steps: AttentionSteps, dtype: str) -> tvm.ir.Expr:
    """Return the fourth output as `qk_matmul_output_mode` says, in the dtype of the query."""
    mode = node.integer("qk_matmul_output_mode", 0)
    chosen = (steps.scores, steps.capped, steps.biased, steps.weights)[mode]
    return node.builder.emit(relax.op.astype(chosen, dtype))


def _mask(node: ConverterInput, key: tvm.ir.Expr) -> list[tvm.ir.Expr]:
    """Return what the mask adds to the scores, as long as there are keys."""
    mask = node.optional(_MASK)
    if mask is None:
        return []
    emit = node.builder.emit
    if dtype_of(mask) == "bool":
        added = hide_where_zero(node, mask, -math.inf)
    else:
        added = emit(relax.op.astype(mask, "float32"))
    *_, length = sizes_of(mask)
    missing = tvm.sym.Analyzer().simplify(sizes_of(key)[2] - length)
    if isinstance(missing, tirx.IntImm) and int(missing) > 0 and int(length) > 1:
        widths = [0] * (2 * int(mask.ty.ndim) - 1) + [int(missing)]
        added = emit(relax.op.nn.pad(added, widths, "constant", -math.inf))
    return [added]


def _positions(node: ConverterInput, query: tvm.ir.Expr, key: tvm.ir.Expr) -> list[tvm.ir.Expr]:
    """Return what `is_causal` and the window add: query i stands at i plus the keys before it."""
    left, right = node.integer("left_window_size", -1), node.integer("right_window_size", -1)
    causal = bool(node.integer("is_causal", 0))
    right = 0 if causal else right
    if left < 0 and right < 0:
        return []
    emit, lengths, past = node.builder.emit, node.optional(_LENGTHS), node.optional(_PAST_KEY)
    queries, keys = sizes_of(query)[2], sizes_of(key)[2]
    all_new = past is not None and tvm.sym.Analyzer().can_prove_equal(keys - queries, sizes_of(past)[2])
    if lengths is None and left < 0 and causal and all_new:
        return [hide_later_keys(node, queries, keys, hidden=-math.inf)]
    at = emit(relax.op.expand_dims(emit(relax.op.arange(0, queries, 1, "int64")), 1))
    if lengths is not None:
        before = emit(relax.op.subtract(lengths, emit(size_tensor(queries))))
        at = emit(relax.op.add(at, emit(relax.op.expand_dims(before, [1, 2, 3]))))
    elif past is not None:
        at = emit(relax.op.add(at, emit(size_tensor(sizes_of(past)[2]))))
    places = emit(relax.op.expand_dims(emit(relax.op.arange(0, keys, 1, "int64")), 0))
    seen = None
    if right >= 0:
        last = at if right == 0 else emit(relax.op.add(at, relax.const(right, "int64")))
        seen = emit(relax.op.less_equal(places, last))
    if left >= 0:
        first = emit(relax.op.subtract(at, relax.const(left, "int64")))
        within = emit(relax.op.greater_equal(places, first))
        seen = within if seen is None else emit(relax.op.logical_and(seen, within))
    return [hidden_unless(node, seen, -math.inf)]


def _padding(node: ConverterInput, key: tvm.ir.Expr) -> list[tvm.ir.Expr]:
    """Return what hides each row's keys from its count on."""
    lengths = node.optional(_LENGTHS)
    if lengths is None:
        return []
    emit = node.builder.emit
    places = emit(relax.op.arange(0, sizes_of(key)[2], 1, "int64"))
    seen = emit(relax.op.less(places, emit(relax.op.expand_dims(lengths, [1, 2, 3]))))
    return [hidden_unless(node, seen, -math.inf)]


@converts("TensorScatter")
def convert_tensor_scatter(node: ConverterInput) -> tvm.ir.Expr:
    """Return the cache with the update in it. Inputs: cache, update, first place of each row (B) (optional; 0).

    Both are (B, ...) and differ in `axis` only. Mode circular wraps around the end of the cache, linear does not.
    """
    mode = node.attributes.get("mode", "linear")
    if mode not in ("linear", "circular"):
        raise ValueError(f"attribute 'mode': expected 'linear' or 'circular', got {mode!r}")
    cache, update, starts = node.input(0), node.input(1), node.optional(2)
    rank = int(cache.ty.ndim)
    axis = node.integer("axis", -2) % rank
    length, count = (tirx.Cast("int64", sizes_of(tensor)[axis]) for tensor in (cache, update))

    def compute(old: te.Tensor, new: te.Tensor, *first: te.Tensor) -> te.Tensor:
        def at(*places: tirx.Var) -> tvm.ir.Expr:
            start = first[0](places[0]).astype("int64") if first else tirx.const(0, "int64")
            offset = tirx.Cast("int64", places[axis]) - start
            if mode == "circular":
                offset = tirx.floormod(offset, length)
            written = tirx.all(offset >= 0, offset < count)
            source = [*places[:axis], offset, *places[axis + 1 :]]
            return tirx.if_then_else(written, new(*source), old(*places))

        return te.compute(old.shape, at, name="tensor_scatter")

    given = [] if starts is None else [starts]
    return node.builder.emit_te(compute, cache, update, *given, primfunc_name_hint="tensor_scatter")
