"""What elementwise operations make of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A score this low leaves its key out: the weight is exp(-10000) of a visible key's, 0 in float32.
MASKED = -1e4
# Operation -> the second operand that leaves the first one as it is.
NEUTRAL = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "divide": 1.0}

_NUMBERS = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "equal": np.equal,
    "not_equal": np.not_equal, "greater": np.greater, "greater_equal": np.greater_equal, "less": np.less,
    "less_equal": np.less_equal, "logical_not": np.logical_not, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "negative": np.negative, "maximum": np.maximum, "minimum": np.minimum,
    "astype": np.positive, "isnan": np.isnan, "isinf": np.isinf,
}  # fmt: skip


def number_at(name: str, numbers: Sequence[float]) -> float | None:
    """Return what an elementwise operation makes of numbers, None where it is not known."""
    if name == "where":
        return numbers[1] if numbers[0] else numbers[2]
    if name not in _NUMBERS:
        return None
    with np.errstate(all="ignore"):
        return float(_NUMBERS[name](*numbers))
