"""Between numbers and integers: ONNX's QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear.

::

    quantise      q = saturate(round_half_to_even(x / scale) + zero point)
    dequantise    x = (q - zero point) * scale

To the bit as ONNX Runtime's CPU computes it (core/mlas/lib/quantize.cpp): a true division (TVM turns one by a number
into a product with the inverse, so scales stay tensors), bounds before rounding, NaN to the lower bound. Integers of 2
and 4 bits live in tensors of 8. Float8 e4m3 has no zero point: a tensor keeps its dtype between quantise and
dequantise, and both are exact. Formulas: ONNX, Operators.md; ONNX Runtime, docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from onnx import TensorProto
from tvm import relax, te, tirx

from relaxtune.pipeline.importer.converter_input import (
    ConverterInput,
    constant,
    constant_value,
    converts,
    dtype_of,
    sizes_of,
)
from relaxtune.pipeline.importer.sizes import size_text
from relaxtune.schedules.functions.float8 import FLOAT8, float8_array, float8_of, number_of


@dataclass(frozen=True)
class IntegerType:
    """A quantised type: its bounds, and the dtype of the tensors that hold it."""

    low: int
    high: int
    dtype: str


_INTEGERS: Mapping[int, IntegerType] = {
    TensorProto.INT2: IntegerType(-2, 1, "int8"),
    TensorProto.UINT2: IntegerType(0, 3, "uint8"),
    TensorProto.INT4: IntegerType(-8, 7, "int8"),
    TensorProto.UINT4: IntegerType(0, 15, "uint8"),
    TensorProto.INT8: IntegerType(-128, 127, "int8"),
    TensorProto.UINT8: IntegerType(0, 255, "uint8"),
    TensorProto.INT16: IntegerType(-(2**15), 2**15 - 1, "int16"),
    TensorProto.UINT16: IntegerType(0, 2**16 - 1, "uint16"),
}
_ELEMENT_TYPES: Mapping[str, int] = {
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16,
}
# Names of the kernels from and to float32.
FLOAT8_OF, NUMBER_OF = "float8_of_numbers", "numbers_of_float8"
_FLOAT8 = IntegerType(-448, 448, FLOAT8)
_FLOATS: Mapping[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}


@converts("QuantizeLinear", "com.microsoft.QuantizeLinear")
def convert_quantize_linear(node: ConverterInput) -> tvm.ir.Expr:
    """Return x quantised; scale and zero point (optional) are one number, one a place of `axis`, or one a block."""
    data, scale, zero = node.input(0), node.input(1), node.optional(2)
    wanted = node.integer("output_dtype", 0)
    if TensorProto.FLOAT8E4M3FN in (wanted, node.element_type(2)):
        kind = _FLOAT8
    else:
        kind = _known_type(wanted) if wanted else integer_type(node, 2)
    return quantise(node, data, along_axis(node, scale, data), _maybe_along(node, zero, data), kind)


@converts("DequantizeLinear", "com.microsoft.DequantizeLinear")
def convert_dequantize_linear(node: ConverterInput) -> tvm.ir.Expr:
    """Return integers as numbers of the scale's dtype; scale and zero point as of QuantizeLinear."""
    data, scale, zero = node.input(0), node.input(1), node.optional(2)
    wanted = node.integer("output_dtype", 0)
    if wanted and wanted not in _FLOATS:
        raise ValueError(f"attribute 'output_dtype': expected float, float16 or bfloat16, got {_type_name(wanted)}")
    if dtype_of(data) not in ("int32", FLOAT8):
        integer_type(node, 0)
    dtype = _FLOATS[wanted] if wanted else dtype_of(scale)
    result = dequantise(node, data, along_axis(node, scale, data), _maybe_along(node, zero, data))
    return result if dtype_of(result) == dtype else relax.op.astype(result, dtype)


@converts("DynamicQuantizeLinear")
def convert_dynamic_quantize_linear(node: ConverterInput) -> tvm.ir.Expr:
    """Return x in uint8 with the scale and zero point that fit its range; outputs: it, scale, zero point."""
    return relax.Tuple(list(quantise_dynamically(node, node.input(0))))


def integer_type(node: ConverterInput, place: int) -> IntegerType:
    """Return the quantised type of a result: its zero point's, an input; uint8 without one.

    Raises
    ------
    ValueError
        It is none that is converted: a float8 or float4 type, or int32.
    """
    given = node.optional(place)
    if given is None:
        return _INTEGERS[TensorProto.UINT8]
    # The results of contrib operators have no known element type, but the dtype of the tensor that holds them.
    return _known_type(node.element_type(place) or _ELEMENT_TYPES.get(dtype_of(given), 0))


def _known_type(element_type: int) -> IntegerType:
    found = _INTEGERS.get(element_type)
    if found is None:
        known = ", ".join(_type_name(known) for known in _INTEGERS)
        raise ValueError(f"quantised type: expected one of {known}, got {_type_name(element_type)}")
    return found


def quantise(
    node: ConverterInput, data: tvm.ir.Expr, scale: tvm.ir.Expr, zero: tvm.ir.Expr | None, kind: IntegerType
) -> tvm.ir.Expr:
    """Return numbers quantised, computed in float32.

    Parameters
    ----------
    scale, zero : Expr
        Broadcast against the data from the right, as NumPy does; None for a zero point of 0.
    """
    values, steps = _as(node, data, "float32"), tensor_of(_as(node, scale, "float32"))
    if kind is _FLOAT8:
        if zero is not None:
            raise ValueError("zero point of float8: expected a constant of 0")
        known, by = constant_value(values), constant_value(steps)
        if known is not None and by is not None:
            return constant(float8_array(known / by))
        return emit_elementwise(node, lambda x, s: float8_of(x / s), FLOAT8_OF, values, steps)
    if zero is None or _is_zero(zero):
        return emit_elementwise(node, lambda x, s: _rounded(x / s, None, kind), "quantise", values, steps)
    offsets = tensor_of(_as(node, zero, "int32"))
    return emit_elementwise(node, lambda x, s, z: _rounded(x / s, z, kind), "quantise", values, steps, offsets)


def requantise(
    node: ConverterInput, sums: tvm.ir.Expr, factor: tvm.ir.Expr, zero: tvm.ir.Expr | None, kind: IntegerType
) -> tvm.ir.Expr:
    """Return int32 sums of products quantised: saturate(round(sum * factor) + zero point), as MlasRequantizeOutput."""
    factors = tensor_of(factor)
    if zero is None or _is_zero(zero):
        return emit_elementwise(
            node, lambda x, f: _rounded(x.astype("float32") * f, None, kind), "requantise", sums, factors
        )
    offsets = tensor_of(_as(node, zero, "int32"))
    return emit_elementwise(
        node, lambda x, f, z: _rounded(x.astype("float32") * f, z, kind), "requantise", sums, factors, offsets
    )


def dequantise(node: ConverterInput, data: tvm.ir.Expr, scale: tvm.ir.Expr, zero: tvm.ir.Expr | None) -> tvm.ir.Expr:
    """Return integers as numbers of the scale's dtype; scale and zero point (None for 0) broadcast as NumPy does."""
    emit = node.builder.emit
    dtype = dtype_of(scale)
    if dtype_of(data) == FLOAT8:
        if zero is not None:
            raise ValueError("zero point of float8: expected a constant of 0")
        centred: tvm.ir.Expr = emit_elementwise(node, number_of, NUMBER_OF, data)
    else:
        centred = centre(node, data, zero)
    product = emit(relax.op.multiply(emit(relax.op.astype(centred, "float32")), _as(node, scale, "float32")))
    return product if dtype == "float32" else emit(relax.op.astype(product, dtype))


def centre(node: ConverterInput, data: tvm.ir.Expr, zero: tvm.ir.Expr | None) -> tvm.ir.Expr:
    """Return integers less their zero point, in int32."""
    emit = node.builder.emit
    wide = data if dtype_of(data) == "int32" else emit(relax.op.astype(data, "int32"))
    return wide if zero is None or _is_zero(zero) else emit(relax.op.subtract(wide, _as(node, zero, "int32")))


def quantise_dynamically(node: ConverterInput, data: tvm.ir.Expr) -> tuple[tvm.ir.Expr, tvm.ir.Expr, tvm.ir.Expr]:
    """Return a tensor in uint8, its scale (float32 scalar) and its zero point (uint8 scalar).

    The range holds 0, so that 0 is exact: scale = (max - min) / 255, zero point = round(-min / scale).
    """
    emit = node.builder.emit
    kind = _INTEGERS[TensorProto.UINT8]
    nothing = relax.const(0.0, "float32")
    low = emit(relax.op.minimum(emit(relax.op.min(data)), nothing))
    high = emit(relax.op.maximum(emit(relax.op.max(data)), nothing))
    span = emit_elementwise(
        node,
        lambda a, b, steps: tirx.Select(a == b, tirx.const(1.0, "float32"), (a - b) / steps),
        "scale",
        high,
        low,
        constant(np.array([255.0], "float32")),
    )
    start = emit_elementwise(
        node, lambda a, s: _rounded((tirx.const(0.0, "float32") - a) / s, None, kind), "zero", low, span
    )
    return quantise(node, data, span, start, kind), span, start


def along_axis(node: ConverterInput, values: tvm.ir.Expr, data: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return scales or zero points as they broadcast against the data: a number, a vector along `axis`, or blocks.

    Raises
    ------
    ValueError
        Blocks of an axis of unknown size.
    """
    rank, axis = int(data.ty.ndim), node.integer("axis", 1)
    if values.ty.ndim == 0 or (values.ty.ndim == 1 and _is_one(sizes_of(values)[0])):
        return _reshaped(node, values, [1] * rank)
    axis = axis + rank if axis < 0 else axis
    if values.ty.ndim == 1:
        return _reshaped(node, values, [1] * axis + [-1] + [1] * (rank - axis - 1))
    block = node.integer("block_size", 0)
    if not block:
        msg = f"scale of rank {int(values.ty.ndim)} for data of rank {rank}: expected rank 0 or 1, or a block_size"
        raise ValueError(msg)
    return spread_blocks(node, values, axis, block, sizes_of(data)[axis])


def spread_blocks(node: ConverterInput, values: tvm.ir.Expr, axis: int, block: int, size: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return one value a block as one an element: `size` elements along an axis, the last block cut off.

    Raises
    ------
    ValueError
        The size is not a number.
    """
    if not isinstance(size, tirx.IntImm):
        raise ValueError(f"blocks along axis {axis}: expected an axis of fixed size, got {size_text(size)}")  # noqa: TRY004
    value = constant_value(values)
    if value is not None:
        return constant(np.take(np.repeat(value, block, axis), range(int(size)), axis))
    repeated = node.builder.emit(relax.op.repeat(values, block, axis))
    return node.builder.emit(relax.op.strided_slice(repeated, [axis], [0], [int(size)]))


def tensor_of(values: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return parameters as a tensor that no simplification sees through: a scalar constant gets an axis of one.

    A scalar constant becomes a number in the kernel, and TVM rewrites x / number as x * (1 / number).
    """
    value = constant_value(values)
    if value is not None:
        return constant(value.reshape(1)) if value.ndim == 0 else values
    return values


def emit_elementwise(
    node: ConverterInput, function: object, name: str, data: tvm.ir.Expr, *parameters: tvm.ir.Expr
) -> tvm.ir.Expr:
    """Emit one kernel that computes `function` of each element of the data and of the parameters at its place.

    A parameter broadcasts against the data; it may have one axis of one element where the data has none.
    """

    def compute(x: te.Tensor, *others: te.Tensor) -> te.Tensor:
        def at(*places: tirx.Var) -> tvm.ir.Expr:
            return function(x(*places), *(_element(other, places) for other in others))  # type: ignore[operator]

        return te.compute(x.shape, at, name=name)

    return node.builder.emit_te(compute, data, *parameters, primfunc_name_hint=name)


def _element(tensor: te.Tensor, places: tuple[tirx.Var, ...]) -> tvm.ir.Expr:
    if len(tensor.shape) > len(places):
        return tensor(*[0] * len(tensor.shape))
    own = places[len(places) - len(tensor.shape) :]
    return tensor(*[0 if _is_one(size) else place for size, place in zip(tensor.shape, own, strict=True)])


def _rounded(value: tvm.ir.Expr, zero: tvm.ir.Expr | None, kind: IntegerType) -> tvm.ir.Expr:
    """Return saturate(round_half_to_even(value) + zero); max(NaN, bound) is the bound, as generated code compares."""
    low, high = tirx.const(kind.low, "int32"), tirx.const(kind.high, "int32")
    if zero is not None:
        low, high = low - zero, high - zero
    least, most = low.astype("float32"), high.astype("float32")
    # Each operand once: fused kernels put whole chains of such steps in place of `value`.
    whole = tirx.nearbyint(tirx.min(tirx.max(value, least), most)).astype("int32")
    return (whole if zero is None else whole + zero).astype(kind.dtype)


def _maybe_along(node: ConverterInput, values: tvm.ir.Expr | None, data: tvm.ir.Expr) -> tvm.ir.Expr | None:
    return None if values is None or _is_zero(values) else along_axis(node, values, data)


def _is_zero(values: tvm.ir.Expr) -> bool:
    value = constant_value(values)
    return value is not None and not value.astype("int32").any()


def _as(node: ConverterInput, values: tvm.ir.Expr, dtype: str) -> tvm.ir.Expr:
    if dtype_of(values) == dtype:
        return values
    value = constant_value(values)
    return constant(value.astype(dtype)) if value is not None else node.builder.emit(relax.op.astype(values, dtype))


def _reshaped(node: ConverterInput, values: tvm.ir.Expr, shape: list[int]) -> tvm.ir.Expr:
    value = constant_value(values)
    return constant(value.reshape(shape)) if value is not None else node.builder.emit(relax.op.reshape(values, shape))


def _is_one(size: tvm.ir.Expr | int) -> bool:
    return isinstance(size, int | tirx.IntImm) and int(size) == 1


def _type_name(element_type: int) -> str:
    return str(TensorProto.DataType.Name(element_type)).lower()
