"""How far a kernel's result may be from the reference: by the dtypes it stores and its longest reduction.

Three sources of honest difference, each far below what a wrong index or a missing tile makes:

- the last rounding of a value: a few eps of the coarsest dtype stored, relative to the value;
- roundings of intermediates, which cancellation lets through: as much, relative to the largest value of the output;
- a sum of K terms in another order: about eps * sqrt(K) of the dtype it is summed in, relative to the largest value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
from tvm import tirx

from pipeline.tuning.arguments import numpy_dtype
from pipeline.tuning.kernel_ir import list_blocks

_ROUNDINGS = 4.0
_SUM_FACTOR = 2.0
# Vectorised exp, erf and rsqrt differ from the scalar ones by this much, whatever the dtype.
_RTOL_MIN = 2e-6


@dataclass(frozen=True)
class Tolerance:
    """Accepted difference: `rtol` of each value, plus `atol` of the largest magnitude in the output."""

    rtol: float
    atol: float


def kernel_tolerance(func: tirx.PrimFunc) -> Tolerance:
    """Return the tolerance for the outputs of an unscheduled PrimFunc; integers must be equal."""
    blocks = list_blocks(func)
    coarsest = max((_eps(str(store.buffer.dtype)) for block in blocks for store in block.stores), default=0.0)
    sums = [
        _eps(str(store.buffer.dtype)) * math.sqrt(math.prod(extent for _, extent in block.reduction))
        for block in blocks
        if block.reduction
        for store in block.stores
    ]
    return tolerance(coarsest, max(sums, default=0.0))


def tolerance(coarsest_eps: float, sum_error: float) -> Tolerance:
    """Return the tolerance from the eps of the coarsest dtype stored and the largest eps * sqrt(K) of a sum."""
    if coarsest_eps == 0.0:
        return Tolerance(0.0, 0.0)
    return Tolerance(
        rtol=max(_ROUNDINGS * coarsest_eps, _RTOL_MIN),
        atol=_ROUNDINGS * coarsest_eps + _SUM_FACTOR * sum_error,
    )


def _eps(dtype: str) -> float:
    kind = numpy_dtype(dtype)
    return 0.0 if kind.kind in "iub" else float(ml_dtypes.finfo(kind).eps)
