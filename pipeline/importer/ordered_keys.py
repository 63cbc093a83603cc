"""Integers in the order of floating point numbers, so that what compares integers orders numbers with NaN among them.

The bits of a float, read as an integer, are in its order where the sign is clear, and in the reverse order where it is
set. A reduction or a sort of keys is TVM's own, on every target; compared as numbers, a NaN is lost by its place.
"""

from __future__ import annotations

import tvm
from tvm import te, tirx

# Floats of 16 bits are ordered as float32, which holds them all.
_INTEGERS = {"float32": "int32", "float64": "int64"}
# A NaN with its sign clear is above infinity, with the sign set below -infinity. This one stays a NaN when it is
# rounded; of the one whose bits are all set, bfloat16 makes a 0.
_NAN = {"float32": 0x7FC00000, "float64": 0x7FF8000000000000}


def wide_dtype(dtype: str) -> str:
    """Return the float whose bits are taken for numbers of a dtype."""
    return dtype if dtype in _INTEGERS else "float32"


def keys_of(x: te.Tensor, *, nan_last: bool = True) -> te.Tensor:
    """Return the key of every element; a NaN has the greatest, or the least; -0 and 0 have the same.

    Parameters
    ----------
    x : te.Tensor
        Of floating point, or of uint64, which TVM does not sort.
    """
    if str(x.dtype) == "uint64":
        return te.compute(x.shape, lambda *place: _signed(x(*place)), name="keys", tag="elemwise")
    dtype = wide_dtype(str(x.dtype))
    integer = _INTEGERS[dtype]
    nan = tirx.const(_NAN[dtype] if nan_last else -1 - _NAN[dtype], integer)

    def key(*place: tirx.Var) -> tvm.ir.Expr:
        value = x(*place).astype(dtype)
        bits = tirx.Select(value == 0, tirx.const(0, integer), tirx.reinterpret(integer, value))
        return tirx.Select(tirx.isnan(value), nan, _turned(bits, integer))

    return te.compute(x.shape, key, name="keys", tag="elemwise")


def numbers_of(keys: te.Tensor, dtype: str) -> te.Tensor:
    """Return the numbers that keys stand for."""
    if dtype == "uint64":
        return te.compute(keys.shape, lambda *place: _unsigned(keys(*place)), name="numbers", tag="elemwise")
    wide = wide_dtype(dtype)
    integer = _INTEGERS[wide]

    def number(*place: tirx.Var) -> tvm.ir.Expr:
        return tirx.reinterpret(wide, _turned(keys(*place), integer)).astype(dtype)

    return te.compute(keys.shape, number, name="numbers", tag="elemwise")


def _turned(bits: tvm.ir.Expr, integer: str) -> tvm.ir.Expr:
    """Return bits with the order of negative numbers turned round; twice is once back."""
    return tirx.Select(bits < 0, bits ^ tirx.max_value(integer), bits)


def _signed(value: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return the integer with a sign that has the same place among its kind."""
    return tirx.reinterpret("int64", value) ^ tirx.min_value("int64")


def _unsigned(key: tvm.ir.Expr) -> tvm.ir.Expr:
    return tirx.reinterpret("uint64", key ^ tirx.min_value("int64"))
