"""TopK: sorted where no order is asked for (mixtures of experts), and along a symbolic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.importer.converter_input import ConverterInput, constant_value, converts, dtype_of, sizes_of
from relaxtune.pipeline.importer.ordered_keys import keys_of, numbers_of
from relaxtune.pipeline.importer.shape_values import size_list
from relaxtune.schedules.sizes import simplify

# Integers that TVM's sort lacks, and those that hold them.
_WIDER: Mapping[str, str] = {"int16": "int32", "uint16": "int32", "uint32": "int64"}


@converts("TopK")
def convert_top_k(node: ConverterInput) -> tvm.ir.Expr:
    """Return the k greatest or least elements along an axis, sorted, and their places; NaN is above all, as in NumPy.

    TVM's kernel compares, and orders nothing beside a NaN: it sorts keys that stand for the elements. It writes as
    many as there are. Along a symbolic axis, the data gets k elements that lose to all others, so that none of the k is
    left unwritten; ONNX leaves an axis shorter than k undefined.
    """
    data = node.input(0)
    axis, largest = node.integer("axis", -1) % int(data.ty.ndim), bool(node.integer("largest", 1))
    sizes = sizes_of(data)
    number = _count(node, sizes[axis])
    if number == 0:  # TVM would take it for all.
        shape = [*sizes[:axis], 0, *sizes[axis + 1 :]]
        return relax.Tuple([node.builder.emit(relax.op.zeros(shape, kind)) for kind in (dtype_of(data), "int64")])
    if number is not None and not isinstance(sizes[axis], tirx.IntImm):
        shape = [*sizes[:axis], number, *sizes[axis + 1 :]]
        losing = relax.const(_least(dtype_of(data)) if largest else _greatest(dtype_of(data)), dtype_of(data))
        losers = node.builder.emit(relax.op.broadcast_to(losing, shape))
        data = node.builder.emit(relax.op.concat([data, losers], axis))
    dtype, emit = dtype_of(data), node.builder.emit
    by_keys = dtype.startswith(("float", "bfloat")) or dtype == "uint64"
    keys = node.builder.emit_te(keys_of, data, primfunc_name_hint="keys") if by_keys else _sortable(node, data)
    # To TVM, -1 is all.
    found = relax.op.topk(keys, -1 if number is None else number, axis, ret_type="both", largest=largest, dtype="int64")
    if keys is data:
        return found
    both = emit(found)
    if not by_keys:
        return emit(relax.Tuple([emit(relax.op.astype(emit(both[0]), dtype)), emit(both[1])]))
    values = node.builder.emit_te(lambda one: numbers_of(one, dtype), emit(both[0]), primfunc_name_hint="numbers")
    return emit(relax.Tuple([values, emit(both[1])]))


def _sortable(node: ConverterInput, data: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return integers as TVM sorts them."""
    wide = _WIDER.get(dtype_of(data))
    return data if wide is None else node.builder.emit(relax.op.astype(data, wide))


def _count(node: ConverterInput, size: tirx.Expr) -> int | None:
    """Return k, None for as many as the axis has."""
    if node.opset < 10:
        return node.integer("k", 1)
    count, listed = constant_value(node.input(1)), size_list(node.input(1))
    if count is not None:
        return int(count.reshape(()))
    if listed is not None and len(listed) == 1 and simplify(listed[0] - size) == 0:
        return None
    raise ValueError("input 1 (k): expected a constant, or the size of the axis")


def _least(dtype: str) -> float | int:
    return int(tirx.min_value(dtype)) if "int" in dtype else -math.inf


def _greatest(dtype: str) -> float | int:
    return int(tirx.max_value(dtype)) if "int" in dtype else math.inf
