"""Gather and its kin, with the index arithmetic done at import where the sizes are known.

TVM's frontend reads the size of the axis at run time (three kernels a Gather, even for a static axis) and takes
without a bounds check: an index out of range reads foreign memory. Here a constant index is made non-negative at
import, any other is corrected by a constant, and `Gather` clips; `passes.keep_lookups_inside` clamps the rest.
ONNX leaves an index out of range undefined; ONNX Runtime refuses it, and so does a call with arrays of the host.
"""

from __future__ import annotations

import numpy as np
import tvm
from onnx import TensorProto
from tvm import relax, tirx

from relaxtune.pipeline.importer.converter_input import ConverterInput, constant, constant_value, converts, static_size
from relaxtune.pipeline.importer.converters.matmuls import unpack_bits
from relaxtune.pipeline.importer.converters.quantised.quantise import dequantise, spread_blocks


@converts("Gather")
def convert_gather(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return rows of `data` along one axis; of the last one (-1) of a symbolic axis, a slice."""
    data, indices = node.input(0), node.input(1)
    if not has_sizes(data):
        return None
    axis = _axis(node.integer("axis", 0), data)
    size, index = data.ty.shape.values[axis], constant_value(indices)
    if not isinstance(size, tirx.IntImm) and index is not None and index.shape == () and index == -1:
        last = relax.op.strided_slice(data, [axis], [size - 1], [size], assume_inbound=True)
        return relax.op.squeeze(node.builder.emit(last), [axis])
    return relax.op.take(data, non_negative(node, indices, data, [axis]), axis, mode="clip")


@converts("GatherElements")
def convert_gather_elements(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return one element of `data` an index, everything but one axis taken from the index's own place."""
    data, indices = node.input(0), node.input(1)
    if not has_sizes(data):
        return None
    axis = _axis(node.integer("axis", 0), data)
    return relax.op.gather_elements(data, non_negative(node, indices, data, [axis]), axis)


@converts("GatherND")
def convert_gather_nd(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return slices of `data` at index tuples; the last axis of the indices runs over axes of `data`."""
    data, indices = node.input(0), node.input(1)
    if not (has_sizes(data) and has_sizes(indices)):
        return None
    batch_dims = node.integer("batch_dims", 0)
    depth = int(indices.ty.shape.values[-1])
    axes = list(range(batch_dims, batch_dims + depth))
    return relax.op.gather_nd(data, non_negative(node, indices, data, axes), batch_dims)


def has_sizes(tensor: tvm.ir.Expr) -> bool:
    """Return whether the sizes of a tensor are known, as numbers or symbols; TVM's converters read them at run time."""
    return isinstance(tensor.ty.shape, relax.ShapeExpr)


def _axis(axis: int, data: tvm.ir.Expr) -> int:
    return axis + int(data.ty.ndim) if axis < 0 else axis


def non_negative(node: ConverterInput, indices: tvm.ir.Expr, data: tvm.ir.Expr, axes: list[int]) -> tvm.ir.Expr:
    """Return `indices` with the size of the axis added to the negative ones."""
    dtype = str(indices.ty.dtype.dtype)
    if dtype.startswith("uint"):
        return indices
    value = constant_value(indices)
    if value is not None and not (value < 0).any():
        return indices
    sizes = [data.ty.shape.values[axis] for axis in axes]
    if all(isinstance(size, int | tirx.IntImm) for size in sizes):
        extent_value = np.array([int(size) for size in sizes], dtype)
        if len(sizes) == 1:
            extent_value = extent_value.reshape(())
        if value is not None:
            return constant(np.where(value < 0, value + extent_value, value).astype(dtype))
        extent = constant(extent_value)
    else:
        vector = relax.op.astype(node.builder.emit(relax.op.shape_to_tensor(relax.ShapeExpr(sizes))), dtype)
        extent = relax.op.reshape(vector, []) if len(sizes) == 1 else vector
    wrapped = relax.op.add(indices, extent)
    return relax.op.where(relax.op.less(indices, relax.const(0, dtype)), wrapped, indices)


@converts("com.microsoft.GatherBlockQuantized")
def convert_gather_block_quantized(node: ConverterInput) -> tvm.ir.Expr:
    """Return rows of a quantised table, dequantised after they are picked.

    Inputs: table (int4, uint4, or uint8 that holds `bits` bits an element in its last axis), indices, scales and zero
    points (optional; packed as the table), one a block of `quantize_axis`. Formula: ONNX Runtime,
    docs/ContribOperators.md.
    """
    scales = node.input(2)
    table, zeros = constant_value(node.input(0)), constant_value(node.optional(3))
    if table is None or (node.optional(3) is not None and zeros is None):
        raise ValueError("inputs 0 and 3 (table and zero points): expected constants")
    bits = 4
    if node.element_type(0) == TensorProto.UINT8:
        bits = node.integer("bits", 4)
        table = unpack_bits(table, bits)
        zeros = np.full((), 2 ** (bits - 1), "uint8") if zeros is None else unpack_bits(zeros, bits)
    rank = table.ndim
    picked, along = node.integer("gather_axis", 0) % rank, node.integer("quantize_axis", 1) % rank
    if picked == along:
        raise ValueError(f"attributes 'gather_axis' and 'quantize_axis': expected different axes, got {picked} twice")
    size, block = table.shape[along], node.integer("block_size", 128)
    if zeros is not None and zeros.ndim:
        zeros = np.take(zeros, range(static_size(scales, along)), along)
    indices = node.builder.normalize(non_negative(node, node.input(1), constant(table), [picked]))
    moved = along + int(indices.ty.ndim) - 1 if along > picked else along

    def rows(values: tvm.ir.Expr) -> tvm.ir.Expr:
        return node.builder.emit(relax.op.take(values, indices, picked, mode="clip"))

    def a_place(values: tvm.ir.Expr) -> tvm.ir.Expr:
        return spread_blocks(node, rows(values), moved, block, tirx.IntImm("int64", size))

    offsets = None if zeros is None else constant(zeros)
    if offsets is not None and offsets.ty.ndim:
        offsets = a_place(offsets)
    return dequantise(node, rows(constant(table)), a_place(scales), offsets)
