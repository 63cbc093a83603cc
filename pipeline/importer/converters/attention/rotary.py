"""Rotary position embeddings: ONNX Runtime's RotaryEmbedding (domain com.microsoft) and ONNX's (opset 23).

::

    halves        y[:d] = x[:d] * cos - x[d:] * sin        y[d:] = x[d:] * cos + x[:d] * sin
    interleaved   the same for x[0::2] and x[1::2]

cos and sin are rows of tables, picked by position; d is half of the rotated part of a head, the rest stays.
"""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.importer.converter_input import ConverterInput, converts, sizes_of, static_size
from relaxtune.pipeline.importer.converters.attention.heads import merge_heads, split_heads


@converts("com.microsoft.RotaryEmbedding")
def convert_contrib_rotary(node: ConverterInput) -> tvm.ir.Expr:
    """Convert com.microsoft RotaryEmbedding: x (B, S, N*H) or (B, N, S, H), positions, cos and sin tables.

    Positions are (B, S), or (1): the position of the first token of every row.
    """
    emit, data, positions = node.builder.emit, node.input(0), node.input(1)
    cos, sin = node.input(2), node.input(3)
    flat = data.ty.ndim == 3
    if flat:
        heads = node.integer("num_heads", 0) or static_size(data, 2) // (2 * static_size(cos, 1))
        data = split_heads(node, data, heads)
    if positions.ty.ndim == 1:
        count = emit(relax.op.arange(0, sizes_of(data)[2], 1, "int64"))
        positions = emit(relax.op.expand_dims(emit(relax.op.add(positions, count)), 0))
    interleaved = bool(node.integer("interleaved", 0))
    turned = rotate_heads(node, data, cos, sin, positions, interleaved=interleaved)
    return merge_heads(node, turned) if flat else turned


@converts("RotaryEmbedding")
def convert_rotary(node: ConverterInput) -> tvm.ir.Expr:
    """Convert ONNX RotaryEmbedding: x, cos and sin (tables, or (B, S, d) without positions), positions (optional)."""
    data, cos, sin = node.input(0), node.input(1), node.input(2)
    flat = data.ty.ndim == 3
    if flat:
        data = split_heads(node, data, node.integer("num_heads", 0))
    interleaved = bool(node.integer("interleaved", 0))
    turned = rotate_heads(node, data, cos, sin, node.optional(3), interleaved=interleaved)
    return merge_heads(node, turned) if flat else turned


def rotate_heads(
    node: ConverterInput,
    data: tvm.ir.Expr,
    cos: tvm.ir.Expr,
    sin: tvm.ir.Expr,
    positions: tvm.ir.Expr | None,
    *,
    interleaved: bool,
) -> tvm.ir.Expr:
    """Return heads (B, N, S, H) rotated.

    Parameters
    ----------
    cos, sin : Expr
        Tables (positions, d) if there are positions, else (B, S, d).
    positions : Expr or None
        (B or 1, S).
    interleaved : bool
        Whether neighbours are a pair, instead of the elements half a head apart.
    """
    emit = node.builder.emit
    if positions is not None:
        cos, sin = (emit(relax.op.take(table, positions, axis=0, mode="clip")) for table in (cos, sin))
    cos, sin = (emit(relax.op.expand_dims(table, 1)) for table in (cos, sin))
    half, size = static_size(cos, 3), static_size(data, 3)
    rotated, rest = data, None
    if 2 * half < size:
        rotated, rest = node.parts(data, [2 * half], -1)
    batch, heads, length, _ = sizes_of(data)
    if interleaved:
        rotated = emit(relax.op.reshape(rotated, (batch, heads, length, half, 2)))
    pair = node.parts(rotated, 2, -1)
    low, high = (emit(relax.op.squeeze(part, [-1])) for part in pair) if interleaved else pair
    first = emit(relax.op.subtract(relax.op.multiply(low, cos), relax.op.multiply(high, sin)))
    second = emit(relax.op.add(relax.op.multiply(high, cos), relax.op.multiply(low, sin)))
    if interleaved:
        wide = [emit(relax.op.expand_dims(part, -1)) for part in (first, second)]
        turned = emit(relax.op.reshape(emit(relax.op.concat(wide, axis=-1)), (batch, heads, length, 2 * half)))
    else:
        turned = emit(relax.op.concat([first, second], axis=-1))
    return turned if rest is None else emit(relax.op.concat([turned, rest], axis=-1))
