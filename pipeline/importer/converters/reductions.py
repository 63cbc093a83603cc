"""ReduceMax and ReduceMin of truth values, which have no least number in TVM, and over no axes; roots and logarithms.

Sums of integers whose root or logarithm is taken are computed in float64, and the result is cut to an integer.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from relaxtune.pipeline.importer.converter_input import Converter, ConverterInput, constant_value, converts, dtype_of


def extreme(operator: Callable[..., tvm.ir.Expr]) -> Converter:
    """Return the converter of ReduceMax or ReduceMin."""

    def convert(node: ConverterInput) -> tvm.ir.Expr:
        data, axes, kept = node.input(0), _axes(node), bool(node.integer("keepdims", 1))
        if not axes:
            return data
        if dtype_of(data) != "bool":
            return operator(data, axes, kept)
        wide = node.builder.emit(relax.op.astype(data, "int8"))
        # No truth value is below 0: of none, the largest is false and the least is true.
        return relax.op.greater(node.builder.emit(operator(wide, axes, kept)), relax.const(0, "int8"))

    return convert


def of_terms(
    term: Callable[[tvm.ir.Expr], tvm.ir.Expr] | None = None,
    whole: Callable[[tvm.ir.Expr], tvm.ir.Expr] | None = None,
    *,
    in_floats: bool = False,
) -> Converter:
    """Return the converter of a function of a sum of terms; over no axes it is one of each element's own term.

    TVM leaves the tensor as it is where there are no axes, and has no roots and logarithms of integers.

    Parameters
    ----------
    term, whole : callable or None
        Functions of each element, and of their sum; None changes nothing.
    in_floats : bool
        Whether integers are computed in float64.
    """

    def convert(node: ConverterInput) -> tvm.ir.Expr | None:
        data, emit = node.input(0), node.builder.emit
        dtype, axes = dtype_of(data), _axes(node)
        cut = in_floats and "int" in dtype
        if axes and not cut:
            return None
        value = emit(relax.op.astype(data, "float64")) if cut else data
        if term is not None:
            value = emit(term(value))
        if axes:
            value = emit(relax.op.sum(value, axes, bool(node.integer("keepdims", 1))))
        if whole is not None:
            value = emit(whole(value))
        return relax.op.astype(value, dtype) if cut else value

    return convert


@converts("ReduceLogSumExp")
def log_sum_exp(node: ConverterInput) -> tvm.ir.Expr:
    """Convert ReduceLogSumExp. A largest element that is infinite is not taken off: infinity less itself is NaN."""
    data, axes, emit = node.input(0), _axes(node), node.builder.emit
    if not axes:
        return data
    dtype, kept = dtype_of(data), bool(node.integer("keepdims", 1))
    wide = "float64" if "int" in dtype else dtype
    value = emit(relax.op.astype(data, wide)) if wide != dtype else data
    largest = emit(relax.op.max(value, axes, True))
    finite = emit(relax.op.less(emit(relax.op.abs(largest)), relax.const(float("inf"), wide)))
    taken = emit(relax.op.where(finite, largest, relax.const(0.0, wide)))
    terms = emit(relax.op.exp(emit(relax.op.subtract(value, taken))))
    result = emit(relax.op.add(emit(relax.op.log(emit(relax.op.sum(terms, axes, True)))), taken))
    result = result if kept else emit(relax.op.squeeze(result, axes))
    return relax.op.astype(result, dtype) if wide != dtype else result


def _axes(node: ConverterInput) -> list[int]:
    """Return the axes to reduce, from the input (opset 18) or the attribute; none leave the tensor as it is."""
    rank, given = int(node.input(0).ty.ndim), node.optional(1)
    listed = node.attributes.get("axes")
    if given is not None:
        value = constant_value(given)
        if value is None:
            raise ValueError("input 1 (axes): expected a constant")
        listed = [int(axis) for axis in value]
    if not isinstance(listed, list) or not listed:
        return [] if node.integer("noop_with_empty_axes", 0) else list(range(rank))
    return sorted({int(axis) % rank for axis in listed})


def _squared(value: tvm.ir.Expr) -> tvm.ir.Expr:
    return relax.op.multiply(value, value)


converts("ReduceL1")(of_terms(relax.op.abs))
converts("ReduceL2")(of_terms(_squared, relax.op.sqrt, in_floats=True))
converts("ReduceLogSum")(of_terms(whole=relax.op.log, in_floats=True))
converts("ReduceMax")(extreme(relax.op.max))
converts("ReduceMin")(extreme(relax.op.min))
converts("ReduceSumSquare")(of_terms(_squared))
