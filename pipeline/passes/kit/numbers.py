"""What elementwise operations make of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tvm

from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant

# A score this low leaves its key out: the weight is exp(-10000) of a visible key's, 0 in float32.
MASKED = -1e4
# Operators that TVM folds where an operand is a number.
FOLDED = ("divide", "floor_mod", "maximum", "minimum", "mod", "multiply")
# Elementwise operation -> what it makes of numbers.
COMPUTED: Mapping[str, Callable[..., np.generic]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "equal": np.equal,
    "not_equal": np.not_equal, "greater": np.greater, "greater_equal": np.greater_equal, "less": np.less,
    "less_equal": np.less_equal, "logical_not": np.logical_not, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "negative": np.negative, "maximum": np.maximum, "minimum": np.minimum,
    "astype": np.positive, "isnan": np.isnan, "isinf": np.isinf,
    "where": lambda condition, chosen, other: chosen if condition else other,
}  # fmt: skip


def number_at(name: str, numbers: Sequence[float]) -> float | None:
    """Return what an elementwise operation makes of numbers, None where it is not known."""
    if name not in COMPUTED:
        return None
    with np.errstate(all="ignore"):
        return float(COMPUTED[name](*numbers))


def is_special_number(expr: tvm.ir.Expr) -> bool:
    """Return whether TVM must not see a constant as a number: 0, an infinity or NaN.

    It makes 0 of `x * 0`, `x` of `min(x, NaN)`, and an error of `x / 0`. As tensors of one element they are what they
    are.
    """
    if not is_constant(expr) or expr.ty.ndim or not dtype_of(expr).startswith(("float", "bfloat")):
        return False
    value = float(array_of(expr))
    return value == 0 or not math.isfinite(value)
