"""Elementwise operators that TVM's frontend lacks parts of, and refusals of those it would convert wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tvm
from onnx import helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from relaxtune.pipeline.importer.converter_input import (
    Converter,
    ConverterInput,
    constant_value,
    converts,
    dtype_of,
    scalar_like,
)

# Up to here a product is cheaper than `pow`, and as exact.
_MAX_PRODUCT = 4
# Integer dtypes, and the integers that a processor makes of floating point numbers for them.
_WHOLE = {
    **dict.fromkeys(("int8", "uint8", "int16", "uint16", "int32"), "int32"),
    **dict.fromkeys(("uint32", "int64", "uint64"), "int64"),
}


@converts("Pow")
def convert_pow(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return a power with a small constant exponent as products, or a square root; None leaves the rest to TVM.

    `pow` is a library call an element, it keeps LLVM from vectorising the loop (GELU's x^3, RMSNorm's x^2), and TVM
    warns about it on stderr. TVM knows powers of floating point numbers by such numbers of the same dtype only. A root
    of -inf is infinite as a power and NaN as a square root: ONNX Runtime takes the root in float32 and float64, and the
    power in half precision.
    """
    base = node.input(0)
    exponent = constant_value(node.input(1))
    if exponent is not None and exponent.size == 1 and exponent.ndim <= base.ty.ndim:
        value = float(exponent.reshape(()))
        if value == 0.5 and dtype_of(base) in ("float32", "float64"):
            return relax.op.sqrt(base)
        if value in range(1, _MAX_PRODUCT + 1):
            product = base
            for _ in range(int(value) - 1):
                product = node.builder.emit(relax.op.multiply(product, base))
            return product
    stock = _is_float(base) and dtype_of(base) == dtype_of(node.input(1)) != "bfloat16"
    return None if stock else _pow_by_cast(node, base)


def _pow_by_cast(node: ConverterInput, base: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return a power in the dtype of the base, computed in float64 for integers and in float32 for bfloat16."""
    emit, dtype = node.builder.emit, dtype_of(base)
    wide = {"bfloat16": "float32"}.get(dtype, dtype) if _is_float(base) else "float64"
    factors = (
        tensor if dtype_of(tensor) == wide else emit(relax.op.astype(tensor, wide)) for tensor in (base, node.input(1))
    )
    power = emit(relax.op.power(*factors))
    return power if wide == dtype else relax.op.astype(power, dtype)


@converts("Clip")
def convert_clip(node: ConverterInput) -> tvm.ir.Expr:
    """Return min(max(x, low), high): bounds are attributes below opset 11, then scalars; NaN leaves a bound out."""
    result = node.input(0)
    for place, (name, operator) in enumerate((("min", relax.op.maximum), ("max", relax.op.minimum)), start=1):
        bound = node.optional(place)
        if bound is None and name in node.attributes:
            bound = scalar_like(node.number(name, 0.0), result)
        if bound is None:
            continue
        if _is_float(bound):
            free = scalar_like(-math.inf if name == "min" else math.inf, bound)
            value = constant_value(bound)
            if value is None:
                bound = node.builder.emit(relax.op.where(relax.op.isnan(bound), free, bound))
            elif np.isnan(value).all():
                bound = free
        if bound.ty.ndim:
            bound = node.builder.emit(relax.op.reshape(bound, []))
        result = node.builder.emit(operator(result, bound))
    return result


def chained(operator: Callable[[tvm.ir.Expr, tvm.ir.Expr], tvm.ir.Expr]) -> Converter:
    """Return the converter of Max or Min of one or more tensors; TVM's own writes kernels that lose a NaN."""

    def convert(node: ConverterInput) -> tvm.ir.Expr:
        result = node.input(0)
        for place in range(1, len(node.inputs)):
            result = node.builder.emit(operator(result, node.input(place)))
        return result

    return convert


@converts("Equal")
def convert_equal(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return where truth values are equal, compared as bytes: LLVM compares no vectors of bits. TVM has the rest."""
    if any(dtype_of(node.input(place)) != "bool" for place in range(2)):
        return None
    return relax.op.equal(*(node.builder.emit(relax.op.astype(node.input(place), "int8")) for place in range(2)))


def in_float32(operator: str) -> Converter:
    """Return the converter of an operator that TVM has no bfloat16 code for: TVM's own, in float32."""

    def convert(node: ConverterInput) -> tvm.ir.Expr | None:
        if all(dtype_of(given) != "bfloat16" for given in node.inputs if given is not None):
            return None
        wide = [node.builder.emit(relax.op.astype(given, "float32")) for given in node.inputs if given is not None]
        stock = onnx_frontend._get_convert_map()[operator].get_converter(node.opset)
        result = node.builder.emit(stock(node.builder, wide, dict(node.attributes), [{}, {}]))
        return result if "to" in node.attributes or dtype_of(result) == "bool" else relax.op.astype(result, "bfloat16")

    return convert


@converts("IsInf")
def convert_is_inf(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return where a number is infinite, of one sign only where an attribute says so, which TVM's converter ignores."""
    positive, negative = node.integer("detect_positive", 1), node.integer("detect_negative", 1)
    data = node.input(0)
    if positive and negative:
        return in_float32("IsInf")(node)
    if not positive and not negative:
        return relax.op.zeros_like(data, "bool")
    return relax.op.equal(data, relax.const(np.inf if positive else -np.inf, dtype_of(data)))


@converts("Cast")
def convert_cast(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return a cast to integers of what an integer holds that is wide enough, and its least one for all else.

    ONNX leaves infinities, NaN and numbers that are too large open. So ONNX Runtime does on x86 processors, and so does
    TVM with constants, but not at run time. The integer has 32 bits, or 64 for the three widest types. Narrower ones
    are its low bits; uint64 has the numbers from 2^63 to 2^64 too, and 0 above. ONNX Runtime's uint32 of what has no
    place in 32 bits depends on where in a tensor it stands: this is that of a tensor of one.
    """
    data, to = node.input(0), str(helper.tensor_dtype_to_np_dtype(node.integer("to", 0)))
    if to not in _WHOLE or constant_value(data) is not None or not _is_float(data):
        return in_float32("Cast")(node)
    emit, whole = node.builder.emit, _WHOLE[to]
    if dtype_of(data) in ("float16", "bfloat16"):
        data = emit(relax.op.astype(data, "float32"))
    half = relax.const(2.0**63, dtype_of(data))
    high = emit(relax.op.greater_equal(data, half)) if to == "uint64" else None
    if high is not None:
        data = emit(relax.op.where(high, emit(relax.op.subtract(data, half)), data))
    least = relax.const(float(np.iinfo(whole).min), dtype_of(data))
    fits = emit(relax.op.less(emit(relax.op.abs(data)), relax.const(-float(np.iinfo(whole).min), dtype_of(data))))
    held = emit(relax.op.astype(emit(relax.op.where(fits, data, least)), whole))
    result = held if to == whole else emit(relax.op.astype(held, to))
    if high is None:
        return result
    return relax.op.where(high, emit(relax.op.add(result, relax.const(2**63, "uint64"))), result)


@converts("EyeLike")
def convert_eye_like(node: ConverterInput) -> tvm.ir.Expr:
    """Return the unit matrix in the shape of the input, its ones on the k-th diagonal, in `dtype` or the input's."""
    wanted = node.integer("dtype", 0)
    dtype = str(helper.tensor_dtype_to_np_dtype(wanted)) if wanted else dtype_of(node.input(0))
    rows, columns = node.input(0).ty.shape.values
    return relax.op.eye(rows, columns, node.integer("k", 0), dtype)


@converts("SpaceToDepth")
def check_blocks(node: ConverterInput) -> None:
    """Refuse a SpaceToDepth with an order of its elements, which TVM ignores; it has all others."""
    if node.attributes.get("mode", "DCR") != "DCR":
        raise ValueError(f"attribute 'mode': expected 'DCR', got {node.attributes['mode']!r}")


@converts("Dropout")
def convert_dropout(node: ConverterInput) -> None:
    """Refuse a node in training mode and leave any other to TVM, which ignores the mode."""
    given = node.optional(2)
    value = constant_value(given)
    if given is not None and (value is None or bool(value)):
        raise ValueError("Dropout in training mode: expected a model exported for inference (model.eval() in torch)")


def _is_float(expr: tvm.ir.Expr) -> bool:
    return dtype_of(expr).startswith(("float", "bfloat"))


converts("IsNaN")(in_float32("IsNaN"))
converts("Max")(chained(relax.op.maximum))
converts("Min")(chained(relax.op.minimum))
converts("Mod")(in_float32("Mod"))
