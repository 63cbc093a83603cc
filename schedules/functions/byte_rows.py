"""Rows of float32 as bytes, each row with a scale and a zero point of its own, found in each call.

::

    byte[m, k] = round(x[m, k] / scale[m]) + zero[m]            0 .. 255, of numbers from low[m] to high[m]
    scale = (high - low) / 255    zero = round(-low / scale)    low = min(0, x[m]), high = max(0, x[m])

Formulas: ONNX, Operators.md, DynamicQuantizeLinear, by row in place of by tensor. 0 is exact. NaN becomes 0.
"""

from __future__ import annotations

from tvm import te, tirx

BYTE_MAX = 255
# A row's range, at least: the inverse of its scale is then finite.
LEAST_RANGE = 1e-30


def quantise_rows_to_bytes(x: te.Tensor) -> list[te.Tensor]:
    """Return x [..., K] in uint8, and of each row the scale, float32 [..., 1], and the zero point, int32 [..., 1]."""
    low_axis, high_axis = (te.reduce_axis((0, x.shape[-1]), name=name) for name in ("low_k", "high_k"))
    shape = [*x.shape[:-1], 1]
    low = te.compute(shape, lambda *at: te.min(x(*at[:-1], low_axis), axis=low_axis), name="low")
    high = te.compute(shape, lambda *at: te.max(x(*at[:-1], high_axis), axis=high_axis), name="high")
    nothing, one, most = (tirx.const(number, "float32") for number in (0.0, 1.0, float(BYTE_MAX)))

    def scale_of(*at: tirx.Var) -> tirx.Expr:
        span = tirx.max(high(*at), nothing) - tirx.min(low(*at), nothing)
        return tirx.max(span, tirx.const(LEAST_RANGE, "float32")) * tirx.const(1 / BYTE_MAX, "float32")

    scales = te.compute(shape, scale_of, name="scales")
    # Read by the bytes, as the scales are: a row is one loop over all its parts.
    zeros = te.compute(
        shape,
        lambda *at: tirx.min(
            tirx.nearbyint((nothing - tirx.min(low(*at), nothing)) * (one / scales(*at))), most
        ).astype("int32"),
        name="zeros",
    )

    def byte(*at: tirx.Var) -> tirx.Expr:
        row = (*at[:-1], 0)
        value = tirx.nearbyint(x(*at) * (one / scales(*row))) + zeros(*row).astype("float32")
        return tirx.min(tirx.max(value, nothing), most).astype("int32").astype("uint8")

    return [te.compute(x.shape, byte, name="bytes"), scales, zeros]
