"""ReduceMax and ReduceMin of truth values, which have no least number in TVM, and over no axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm
from tvm import relax

from relaxtune.pipeline.importer.converter_input import (
    Converter,
    ConverterInput,
    constant_value,
    dtype_of,
    int_attribute,
)


def extreme(operator: Callable[..., tvm.ir.Expr]) -> Converter:
    """Return the converter of ReduceMax or ReduceMin."""

    def convert(node: ConverterInput) -> tvm.ir.Expr:
        data, axes, kept = node.input(0), _axes(node), bool(int_attribute(node, "keepdims", 1))
        if not axes:
            return data
        if dtype_of(data) != "bool":
            return operator(data, axes, kept)
        wide = node.builder.emit(relax.op.astype(data, "int8"))
        return relax.op.astype(node.builder.emit(operator(wide, axes, kept)), "bool")

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


REDUCTION_CONVERTERS: Mapping[tuple[str, str], Converter] = {
    ("", "ReduceMax"): extreme(relax.op.max),
    ("", "ReduceMin"): extreme(relax.op.min),
}
