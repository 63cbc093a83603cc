"""Numbers that TVM computes with as if they were real: 0, infinities and NaN beside a tensor.

It makes 0 of `x * 0`, `x` of `min(x, NaN)`, and an error of `x / 0`. As tensors of one element they are what they are.
"""

from __future__ import annotations

import math

import tvm

from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant

# Operators that TVM folds where an operand is a number.
FOLDED = ("divide", "floor_mod", "maximum", "minimum", "mod", "multiply")


def is_special_number(expr: tvm.ir.Expr) -> bool:
    """Return whether TVM must not see a constant as a number."""
    if not is_constant(expr) or expr.ty.ndim or not dtype_of(expr).startswith(("float", "bfloat")):
        return False
    value = float(array_of(expr))
    return value == 0 or not math.isfinite(value)
