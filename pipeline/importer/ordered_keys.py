"""Integers in the order of floating point numbers, so that what compares integers orders numbers with NaN among them.

The bits of a float, read as an integer, are in its order where the sign is clear, and in the reverse order where it is
set. A reduction or a sort of keys is TVM's own, on every target; compared as numbers, a NaN is lost by its place.
"""

from __future__ import annotations

import tvm
from tvm import te, tirx

# Floats of 16 bits are ordered as float32, which holds them all.
_INTEGERS = {"float32": "int32", "float64": "int64"}


def wide_dtype(dtype: str) -> str:
    """Return the float whose bits are taken for numbers of a dtype."""
    return dtype if dtype in _INTEGERS else "float32"


def keys_of(x: te.Tensor, *, nan_last: bool = True) -> te.Tensor:
    """Return the key of every element; a NaN has the greatest, or the least; -0 and 0 have the same."""
    dtype = wide_dtype(str(x.dtype))
    integer = _INTEGERS[dtype]
    nan = tirx.max_value(integer) if nan_last else tirx.min_value(integer)

    def key(*place: tirx.Var) -> tvm.ir.Expr:
        value = x(*place).astype(dtype)
        bits = tirx.Select(value == 0, tirx.const(0, integer), tirx.reinterpret(integer, value))
        return tirx.Select(tirx.isnan(value), nan, _turned(bits, integer))

    return te.compute(x.shape, key, name="keys", tag="elemwise")


def numbers_of(keys: te.Tensor, dtype: str, *, nan_last: bool = True) -> te.Tensor:
    """Return the numbers that keys stand for."""
    wide = wide_dtype(dtype)
    integer = _INTEGERS[wide]
    nan = tirx.max_value(integer) if nan_last else tirx.min_value(integer)

    def number(*place: tirx.Var) -> tvm.ir.Expr:
        key = keys(*place)
        value = tirx.reinterpret(wide, _turned(key, integer))
        return tirx.Select(key == nan, tirx.const(float("nan"), wide), value).astype(dtype)

    return te.compute(keys.shape, number, name="numbers", tag="elemwise")


def _turned(bits: tvm.ir.Expr, integer: str) -> tvm.ir.Expr:
    """Return bits with the order of negative numbers turned round; twice is once back."""
    return tirx.Select(bits < 0, bits ^ tirx.max_value(integer), bits)
