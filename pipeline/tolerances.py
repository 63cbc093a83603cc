"""How much a result may differ from its reference: one table, with the reasons.

A test element passes when ``|got - expected| <= atol * scale + rtol * |expected|``, where `scale` is the root mean
square of the expected output, or 1 when that is smaller. Rounding errors follow the size of the values that were
summed, not of the sum: a logit near 0 among logits of size 30 carries the error of its neighbours.

Where the numbers come from. Rounding to a format with unit roundoff u perturbs each intermediate tensor by about u of
its size. A dot product of K terms adds about sqrt(K) * u of the accumulator (errors of random sign). A transformer of
depth L applies some 10 L such steps, whose errors add like sqrt(10 L) as residual additions and normalisations keep the
size of the stream constant; L = 32 gives 18. A factor 4 to 8 above the expected maximum separates rounding from bugs: a
wrong mask, axis or epilogue shows as 0.1 and more.

- float32, accumulated in float32: u = 6e-8, sqrt(8192) * u = 5e-6, times 18 is 1e-4. Measured on bert-base, two
  schedules: 8e-6.
- float16 storage, float32 accumulators: u = 5e-4 dominates the accumulator; times 18 is 9e-3. The reference is
  the float32 original (or the float16 graph computed in float32), so this bounds the drift against the exact value.
- float16 storage, float16 accumulators: sqrt(4096) * 5e-4 = 3e-2 for one dot product alone.
- bfloat16 storage, float32 accumulators: u = 4e-3, times 18 is 7e-2.
- integers and booleans: equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """Relative and absolute tolerance; `atol` is in units of the output's root mean square where that is above 1."""

    rtol: float
    atol: float


EXACT = Tolerance(0.0, 0.0)

# (storage dtype, accumulator dtype) -> tolerance of a whole model.
MODEL_TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("float64", "float64"): Tolerance(1e-9, 1e-9),
    ("float32", "float32"): Tolerance(1e-4, 1e-4),
    ("float16", "float32"): Tolerance(2e-2, 2e-2),
    ("float16", "float16"): Tolerance(1e-1, 1e-1),
    ("bfloat16", "float32"): Tolerance(1e-1, 1e-1),
}

# Unit roundoff: half the distance from 1 to the next number.
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

# Compute precision of the pipeline -> what it stores and accumulates in.
_PRECISIONS = {"fp16": ("float16", "float32"), "bf16": ("bfloat16", "float32")}


def model_tolerance(compute_dtype: str, precision: str | None = None) -> Tolerance:
    """Return the default tolerance of a model's outputs.

    Parameters
    ----------
    compute_dtype : str
        The dtype in which the graph as given computes (its widest common float: "float32", "float16", ...).
    precision : str or None
        The precision asked for by name, which overrides the graph's own.
    """
    if precision is not None:
        return MODEL_TOLERANCES[_PRECISIONS[precision]]
    accumulator = "float64" if compute_dtype == "float64" else "float32"
    return MODEL_TOLERANCES.get((compute_dtype, accumulator), EXACT)


def kernel_tolerance(storage: str, accumulator: str, k: int) -> Tolerance:
    """Return the tolerance of one kernel against a reference computed more precisely.

    Parameters
    ----------
    storage, accumulator : str
        Dtype of the output and of the sums.
    k : int
        How many terms each output element sums.
    """
    if storage not in UNIT_ROUNDOFF:
        return EXACT
    # 8: the largest of a million normal errors is five standard deviations, plus elementwise work after the sum.
    bound = 8.0 * (UNIT_ROUNDOFF[storage] + math.sqrt(max(k, 1)) * UNIT_ROUNDOFF[accumulator])
    return Tolerance(bound, bound)


def output_scale(expected: np.ndarray) -> float:
    """Return what `atol` is in units of: the root mean square of the finite expected values, at least 1."""
    values = expected[np.isfinite(expected)].astype(np.float64) if expected.dtype.kind in "fV" else np.zeros(0)
    return max(1.0, float(np.sqrt(np.mean(values**2)))) if values.size else 1.0
