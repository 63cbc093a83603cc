"""Norms that ONNX Runtime's optimiser writes: with the residual addition, or the embeddings, inside.

Formulas: ONNX Runtime, docs/ContribOperators.md. Statistics are computed in float32 whatever the input's dtype is.
SimplifiedLayerNormalization is an RMS norm; ONNX Runtime registers it in the main domain.
"""

from __future__ import annotations

import math

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from relaxtune.pipeline.importer.converter_input import (
    ConverterInput,
    constant,
    converts,
    dtype_of,
    scalar_like,
    sizes_of,
    static_size,
)

_EPSILON = 1e-12
_SIMPLIFIED_EPSILON = 1e-5


@converts("com.microsoft.SkipLayerNormalization")
def convert_skip_layer_norm(node: ConverterInput) -> tvm.ir.Expr:
    """Return layer_norm(x + skip + bias), and the sum as fourth output.

    Inputs: x, skip, gamma, beta (optional), bias (optional).
    """
    total = _sum(node, node.optional(4))
    normed = _layer_norm(total, node.input(2), node.optional(3), node.number("epsilon", _EPSILON))
    return relax.Tuple([normed, node.unused(1, "mean"), node.unused(2, "inverse deviation"), total])


@converts("com.microsoft.SkipSimplifiedLayerNormalization")
def convert_skip_simplified_layer_norm(node: ConverterInput) -> tvm.ir.Expr:
    """Return rms_norm(x + skip + bias), and the sum as fourth output. Inputs: x, skip, gamma, bias (optional)."""
    total = _sum(node, node.optional(3))
    normed = relax.op.nn.rms_norm(total, node.input(2), axes=[-1], epsilon=node.number("epsilon", _SIMPLIFIED_EPSILON))
    return relax.Tuple([normed, node.unused(1, "mean"), node.unused(2, "inverse deviation"), total])


@converts("SimplifiedLayerNormalization")
def convert_simplified_layer_norm(node: ConverterInput) -> tvm.ir.Expr:
    """Return rms_norm(x) over the axes from `axis` on."""
    data = node.input(0)
    axis = node.integer("axis", -1)
    if axis not in (-1, data.ty.ndim - 1):
        raise ValueError(f"attribute 'axis': expected the last axis of {data.ty.ndim}, got {axis}")
    epsilon = node.number("epsilon", _SIMPLIFIED_EPSILON)
    normed = relax.op.nn.rms_norm(data, node.input(1), axes=[-1], epsilon=epsilon)
    return relax.Tuple([normed, node.unused(1, "inverse deviation")])


@converts("com.microsoft.EmbedLayerNormalization")
def convert_embed_layer_norm(node: ConverterInput) -> tvm.ir.Expr:
    """Return layer_norm(word + position + segment embeddings); outputs: it, the count of unmasked tokens, the sum.

    Inputs: ids (B, S), segment ids (optional), the tables of words, positions and segments (optional), gamma, beta,
    mask (B, S) (optional), position ids (optional; else 0 to S - 1).
    """
    ids, segments = node.input(0), node.optional(1)
    words, positions, kinds = node.input(2), node.input(3), node.optional(4)
    mask, places = node.optional(7), node.optional(8)
    if places is None:
        places = node.builder.emit(relax.op.arange(0, ids.ty.shape.values[1], 1, "int64"))
    total = relax.op.take(words, ids, axis=0, mode="clip")
    total = node.builder.emit(relax.op.add(total, relax.op.take(positions, places, axis=0, mode="clip")))
    if segments is not None and kinds is not None:
        total = node.builder.emit(relax.op.add(total, relax.op.take(kinds, segments, axis=0, mode="clip")))
    normed = _layer_norm(total, node.input(5), node.input(6), node.number("epsilon", _EPSILON))
    if mask is None:
        count = relax.op.zeros([sizes_of(ids)[0]], "int32")
    else:
        count = relax.op.sum(relax.op.astype(mask, "int32"), axis=[1])
    return relax.Tuple([normed, count, total])


@converts("LayerNormalization")
def convert_layer_norm(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return layer_norm(x) with its mean and inverse deviation, in single steps.

    Where neither is read, and scale and bias have the shape of what is normalised, TVM converts it (None).
    """
    emit, data, gamma, beta = node.builder.emit, node.input(0), node.input(1), node.optional(2)
    axes = list(range(node.integer("axis", -1) % int(data.ty.ndim), int(data.ty.ndim)))
    normalised = relax.ShapeExpr(sizes_of(data)[axes[0] :])
    given = [relax.ShapeExpr(sizes_of(part)) for part in (gamma, beta) if part is not None]
    broadcasts = not all(tvm_ffi.structural_equal(shape, normalised) for shape in given)
    if not node.wants(1) and not node.wants(2) and not broadcasts:
        return None
    centred, mean, inverse = _statistics(node, emit(relax.op.astype(data, "float32")), axes)
    normed = emit(relax.op.astype(emit(relax.op.multiply(centred, inverse)), dtype_of(data)))
    normed = emit(relax.op.multiply(normed, gamma))
    return relax.Tuple([normed if beta is None else emit(relax.op.add(normed, beta)), mean, inverse])


@converts("BatchNormalization")
def convert_batch_norm(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return x of (N, C, ...), normed over all axes but C, * scale + bias; not in training mode, None: TVM converts it.

    BiT standardises weights in this way. The mean and the variance are those of x, not those given.
    """
    if not node.integer("training_mode", 0):
        return None
    emit, data = node.builder.emit, node.input(0)
    axes = [axis for axis in range(int(data.ty.ndim)) if axis != 1]
    centred, _, inverse = _statistics(node, emit(relax.op.astype(data, "float32")), axes)
    normed = emit(relax.op.astype(emit(relax.op.multiply(centred, inverse)), dtype_of(data)))
    shape = [-1, *[1] * (len(axes) - 1)]
    scale, bias = (emit(relax.op.reshape(node.input(index), shape)) for index in (1, 2))
    normed = emit(relax.op.add(emit(relax.op.multiply(normed, scale)), bias))
    return relax.Tuple([normed, node.unused(1, "running mean"), node.unused(2, "running variance")])


@converts("GroupNormalization")
def convert_group_norm(node: ConverterInput) -> tvm.ir.Expr:
    """Return x of (N, C, ...), normed over each group of channels, * scale + bias: GroupNormalization of opset 21."""
    return _by_groups(node, node.integer("num_groups", 1))


@converts("InstanceNormalization")
def convert_instance_norm(node: ConverterInput) -> tvm.ir.Expr:
    """Return x of (N, C, ...), normed over each channel, * scale + bias."""
    return _by_groups(node, None)


def _by_groups(node: ConverterInput, groups: int | None) -> tvm.ir.Expr:
    """Return x normed over groups of channels (None: each is one), * scale + bias.

    In steps over the last axis, of which `recognise_norms` makes one kernel: TVM's takes the variance for the mean of
    squares without the square of the mean, which is NaN where a group's numbers lie far from 0 and close together.
    """
    emit, data, sizes = node.builder.emit, node.input(0), sizes_of(node.input(0))
    channels, places = sizes[1], math.prod(sizes[2:], start=tirx.IntImm("int64", 1))
    split = [channels, places] if groups is None else [groups, tirx.floordiv(channels, groups) * places]
    wide = data if dtype_of(data) == "float64" else emit(relax.op.astype(data, "float32"))
    flat = emit(relax.op.reshape(wide, [sizes[0], *split]))
    centred, _, inverse = _statistics(node, flat, [2])
    normed = emit(relax.op.reshape(emit(relax.op.multiply(centred, inverse)), sizes))
    by_channel = [channels, *[1] * (len(sizes) - 2)]
    scale, bias = (emit(relax.op.reshape(node.input(place), by_channel)) for place in (1, 2))
    return relax.op.add(emit(relax.op.multiply(emit(relax.op.astype(normed, dtype_of(data))), scale)), bias)


def _statistics(
    node: ConverterInput, data: tvm.ir.Expr, axes: list[int]
) -> tuple[tvm.ir.Expr, tvm.ir.Expr, tvm.ir.Expr]:
    """Return what of x is beside its mean over some axes, the mean, and the inverse deviation."""
    emit = node.builder.emit
    mean = emit(relax.op.mean(data, axes, keepdims=True))
    centred = emit(relax.op.subtract(data, mean))
    variance = emit(relax.op.mean(emit(relax.op.multiply(centred, centred)), axes, keepdims=True))
    epsilon = relax.const(node.number("epsilon", _SIMPLIFIED_EPSILON), dtype_of(data))
    return centred, mean, emit(relax.op.rsqrt(emit(relax.op.add(variance, epsilon))))


@converts("RMSNormalization")
def convert_rms_norm(node: ConverterInput) -> tvm.ir.Expr:
    """Return rms_norm(x) over the axes from `axis` on, as over one axis: TVM's kernel of several is wrong."""
    emit, data, gamma = node.builder.emit, node.input(0), node.input(1)
    rank = int(data.ty.ndim)
    axis, epsilon = node.integer("axis", -1) % rank, node.number("epsilon", _SIMPLIFIED_EPSILON)
    if axis == rank - 1 and gamma.ty.ndim == 1:
        return relax.op.nn.rms_norm(data, gamma, axes=[-1], epsilon=epsilon)
    # At least one axis in front: TVM's kernel of a whole tensor has no axis left to write to.
    lead, rest = sizes_of(data)[:axis] or [1], sizes_of(data)[axis:]
    spread = emit(relax.op.reshape(emit(relax.op.broadcast_to(gamma, rest)), [-1]))
    flat = emit(relax.op.reshape(data, [*lead, -1]))
    normed = emit(relax.op.nn.rms_norm(flat, spread, axes=[-1], epsilon=epsilon))
    return relax.op.reshape(normed, sizes_of(data))


@converts("LpNormalization")
def convert_lp_norm(node: ConverterInput) -> tvm.ir.Expr:
    """Return x / |x| along an axis, |x| the sum of absolute values (p 1) or the Euclidean norm (p 2); 0 stays 0."""
    emit, data = node.builder.emit, node.input(0)
    axis, power = node.integer("axis", -1), node.integer("p", 2)
    size = relax.op.abs(data) if power == 1 else relax.op.multiply(data, data)
    length = emit(relax.op.sum(emit(size), [axis], keepdims=True))
    if power == 2:
        length = emit(relax.op.sqrt(length))
    nothing = emit(relax.op.equal(length, scalar_like(0.0, data)))
    return relax.op.divide(data, emit(relax.op.where(nothing, scalar_like(1.0, data), length)))


def _sum(node: ConverterInput, bias: tvm.ir.Expr | None) -> tvm.ir.Expr:
    total = node.builder.emit(relax.op.add(node.input(0), node.input(1)))
    return total if bias is None else node.builder.emit(relax.op.add(total, bias))


def _layer_norm(data: tvm.ir.Expr, gamma: tvm.ir.Expr, beta: tvm.ir.Expr | None, epsilon: float) -> tvm.ir.Expr:
    if beta is None:
        beta = constant(np.zeros(static_size(gamma, 0), dtype_of(gamma)))
    return relax.op.nn.layer_norm(data, gamma, beta, axes=[-1], epsilon=epsilon)
