"""Reductions of truth values, which TVM's have no least and greatest number for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm
from tvm import relax

from pipeline.importer.converters.base import Converter, ConverterInput, constant_value, dtype_of, int_attribute


def of_bool(reduction: Callable[..., tvm.ir.Expr]) -> Converter:
    """Return the converter of ReduceMax or ReduceMin on bool (opset 20), by integers; other dtypes are left to TVM."""

    def convert(node: ConverterInput) -> tvm.ir.Expr | None:
        if dtype_of(node.input(0)) != "bool":
            return None
        given = node.optional(1)
        axes = None if given is None else constant_value(given)
        if given is not None and axes is None:
            msg = "input 1 (axes): expected a constant"
            raise ValueError(msg)
        if axes is None and int_attribute(node, "noop_with_empty_axes", 0):
            return node.input(0)
        wide = node.builder.emit(relax.op.astype(node.input(0), "int8"))
        kept = bool(int_attribute(node, "keepdims", 1))
        reduced = reduction(wide, None if axes is None else [int(axis) for axis in axes], kept)
        return relax.op.astype(node.builder.emit(reduced), "bool")

    return convert


REDUCTION_CONVERTERS: Mapping[tuple[str, str], Converter] = {
    ("", "ReduceMax"): of_bool(relax.op.max),
    ("", "ReduceMin"): of_bool(relax.op.min),
}
