"""ReduceMax and ReduceMin of what TVM's own reductions get wrong: rows of nothing but infinities, and truth values.

TVM starts at the least finite number: the maximum of a row of -inf, such as a mask that hides every key, would be
-3.4e38. Its bool has no least number at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.importer.converter_input import (
    Converter,
    ConverterInput,
    constant_value,
    dtype_of,
    int_attribute,
)

_MAXIMUM = te.comm_reducer(lambda a, b: tirx.max(a, b), lambda dtype: tirx.const(-math.inf, dtype), name="maximum")
_MINIMUM = te.comm_reducer(lambda a, b: tirx.min(a, b), lambda dtype: tirx.const(math.inf, dtype), name="minimum")


def extreme(reducer: Callable[..., tvm.ir.Expr], of_integers: Callable[..., tvm.ir.Expr]) -> Converter:
    """Return the converter of ReduceMax or ReduceMin; integers other than truth values are left to TVM."""

    def convert(node: ConverterInput) -> tvm.ir.Expr | None:
        data = node.input(0)
        dtype = dtype_of(data)
        if dtype != "bool" and not dtype.startswith(("float", "bfloat")):
            return None
        axes, kept = _axes(node), bool(int_attribute(node, "keepdims", 1))
        if not axes:
            return data
        if dtype == "bool":
            wide = node.builder.emit(relax.op.astype(data, "int8"))
            return relax.op.astype(node.builder.emit(of_integers(wide, axes, kept)), "bool")
        return _reduce(node, data, axes, reducer, kept=kept)

    return convert


def _axes(node: ConverterInput) -> list[int]:
    """Return the axes to reduce, from the input (opset 18) or the attribute; none leave the tensor as it is.

    Raises
    ------
    ValueError
        They are known at run time only.
    """
    rank, given = int(node.input(0).ty.ndim), node.optional(1)
    listed = node.attributes.get("axes")
    if given is not None:
        value = constant_value(given)
        if value is None:
            msg = "input 1 (axes): expected a constant"
            raise ValueError(msg)
        listed = [int(axis) for axis in value]
    if not isinstance(listed, list) or not listed:
        return [] if int_attribute(node, "noop_with_empty_axes", 0) else list(range(rank))
    return sorted({int(axis) % rank for axis in listed})


def _reduce(
    node: ConverterInput, data: tvm.ir.Expr, axes: Sequence[int], reducer: Callable[..., tvm.ir.Expr], *, kept: bool
) -> tvm.ir.Expr:
    def compute(x: te.Tensor) -> te.Tensor:
        inner = {axis: te.reduce_axis((0, x.shape[axis]), name=f"k{axis}") for axis in axes}
        outer = [axis for axis in range(len(x.shape)) if kept or axis not in inner]
        shape = [1 if axis in inner else x.shape[axis] for axis in outer]

        def at(*places: tirx.Var) -> tvm.ir.Expr:
            by_axis = dict(zip(outer, places, strict=True)) | {axis: one.var for axis, one in inner.items()}
            return reducer(x(*(by_axis[axis] for axis in range(len(x.shape)))), list(inner.values()))

        return te.compute(shape, at, name="reduce")

    return node.builder.emit_te(compute, data, primfunc_name_hint="reduce")


REDUCTION_CONVERTERS: Mapping[tuple[str, str], Converter] = {
    ("", "ReduceMax"): extreme(_MAXIMUM, relax.op.max),
    ("", "ReduceMin"): extreme(_MINIMUM, relax.op.min),
}
