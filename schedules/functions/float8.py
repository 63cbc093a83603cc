"""Between float32 and float8 e4m3, in integer arithmetic: the same on every target.

::

    value = (-1)**sign * n * 2**(E - 3)      n = 8 .. 15, E = -6 .. 8; n = 0 .. 7 at E = -6 (subnormal)
    byte  = sign << 7 | (E + 6) * 8 + n      127 is NaN, 126 is 448, the largest number

Numbers round to nearest, ties to even, and saturate; NaN stays NaN. TVM's own casts on a CPU neither saturate nor know
subnormals. Source: P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433, section 3; ONNX,
"Float stored in 8 bits".
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from tvm import te, tirx

FLOAT8 = "float8_e4m3fn"
FLOAT8_MAX = 448.0
# Attribute of functions that `quantise_rows` and `quantise_columns` make.
QUANTISES_ROWS = "quantises_rows"
_NAN = 127
# A row's largest element, at least: its scale is then no subnormal.
_LEAST = 1e-30


def float8_of(value: tirx.Expr) -> tirx.Expr:
    """Return a float32 value as float8."""
    bits = tirx.reinterpret("uint32", value)
    size = tirx.min(tirx.abs(value), tirx.const(FLOAT8_MAX, "float32"))
    exponent = tirx.max(_word(tirx.reinterpret("uint32", size)) >> 23, tirx.const(127 - 6, "int32"))
    step = tirx.reinterpret("float32", (tirx.const(2 * 127 + 3, "int32") - exponent) << 23)
    code = (exponent - (127 - 6)) * 8 + tirx.nearbyint(size * step).astype("int32")
    code = tirx.Select(_is_nan(bits), tirx.const(_NAN, "int32"), code)
    return tirx.reinterpret(FLOAT8, (code | (_word(bits >> 31) << 7)).astype("uint8"))


def number_of(value: tirx.Expr) -> tirx.Expr:
    """Return a float8 value as float32."""
    code = tirx.reinterpret("uint8", value).astype("int32")
    exponent, mantissa = (code >> 3) & 15, code & 7
    whole = mantissa + tirx.min(exponent, 1) * 8
    scale = tirx.reinterpret("float32", (tirx.max(exponent, 1) + (127 - 10)) << 23)
    size = whole.astype("float32") * scale
    size = tirx.Select((code & _NAN).equal(_NAN), tirx.const(float("nan"), "float32"), size)
    return tirx.Select(code >= 128, tirx.const(0.0, "float32") - size, size)


def quantise_rows(x: te.Tensor) -> list[te.Tensor]:
    """Return x [..., K] in float8, each row divided by its scale, and the scales [..., 1], float32.

    The largest element of a row becomes 448; a row of zeros has a tiny scale. The cast is the target's own: of a GPU,
    which saturates and rounds as `float8_of`.
    """
    along = te.reduce_axis((0, x.shape[-1]), name="k")
    shape = [*x.shape[:-1], 1]
    largest = te.compute(
        shape, lambda *at: te.max(tirx.abs(x(*at[:-1], along).astype("float32")), axis=along), name="largest"
    )
    least = tirx.const(_LEAST, "float32")
    scales = te.compute(
        shape, lambda *at: tirx.max(largest(*at), least) * tirx.const(1 / FLOAT8_MAX, "float32"), name="scales"
    )
    data = te.compute(
        x.shape, lambda *at: (x(*at).astype("float32") / scales(*at[:-1], 0)).astype(FLOAT8), name="quantised"
    )
    return [data, scales]


def quantise_columns(x: te.Tensor, factors: te.Tensor) -> te.Tensor:
    """Return x [..., K] times a factor for each column, float32 [K], in float8; the cast saturates."""
    return te.compute(
        x.shape, lambda *at: (x(*at).astype("float32") * factors(at[-1])).astype(FLOAT8), name="quantised"
    )


def float8_array(array: np.ndarray) -> np.ndarray:
    """Return float values as float8, saturated."""
    result: np.ndarray = np.clip(array, -FLOAT8_MAX, FLOAT8_MAX).astype(ml_dtypes.float8_e4m3fn)
    return result


def _word(bits: tirx.Expr) -> tirx.Expr:
    return bits.astype("int32")


def _is_nan(bits: tirx.Expr) -> tirx.Expr:
    return (bits & tirx.const(0x7FFFFFFF, "uint32")) > tirx.const(0x7F800000, "uint32")
