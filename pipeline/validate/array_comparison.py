"""Compare an array with its reference: errors, what tolerance they would need, and how they are spread."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from relaxtune.pipeline.validate.tolerances import Tolerance, output_scale

# What an output of an ill-conditioned graph may be off by, in units of how far the reference itself moves.
CONDITIONING_FACTOR = 4.0
# Upper edges of the error histogram, in units of what an element is allowed; the last bin has no upper edge.
HISTOGRAM_EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class SampleComparison:
    """One output of one sample.

    Attributes
    ----------
    sample
        Its number.
    passed, reason
        Whether it is within tolerance; if not, why, in words.
    max_abs, mean_abs, max_rel, mean_rel
        Errors over the elements that are finite in both.
    cosine
        Between the two outputs as vectors; None when one of them is all zero.
    required_atol
        The smallest `atol` that would have passed with the `rtol` used.
    required_rtol
        The smallest `rtol` that would have passed with the `atol` used.
    required_factor
        The smallest factor of both tolerances that would have passed: above 1 the sample fails. None where elements are
        NaN or infinite in one of the two only, or must be equal and are not: no factor would do.
    conditioning
        How far the reference itself moves when it rounds otherwise, where the output was allowed 4 times that; else 0.
    histogram
        How many elements have an error of at most each of `HISTOGRAM_EDGES` times what they are allowed, each counted
        once, in the first bin it fits; a last bin has those above all edges and those that are not finite.
    argmax_agreement
        Share of rows whose largest element is in the same place; None for outputs that are not floats or have no rows.
    """

    sample: int
    passed: bool
    reason: str
    max_abs: float = 0.0
    mean_abs: float = 0.0
    max_rel: float = 0.0
    mean_rel: float = 0.0
    cosine: float | None = None
    required_atol: float = 0.0
    required_rtol: float = 0.0
    argmax_agreement: float | None = None
    required_factor: float | None = None
    histogram: tuple[int, ...] = ()
    conditioning: float = 0.0


def compare_arrays(
    expected: np.ndarray, got: np.ndarray, tolerance: Tolerance, sample: int = 0, conditioning: float = 0.0
) -> SampleComparison:
    """Return how one array compares with its reference, of the same shape.

    `conditioning` is how far the reference moves when it rounds otherwise, as an absolute value.
    """
    if expected.dtype.kind in "biu":
        return _compare_exact(expected, got, sample)
    wanted, found = expected.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    finite = np.isfinite(wanted)
    broken = int(np.count_nonzero(finite & ~np.isfinite(found)))
    # Where the reference is not finite, the module must give the same: NaN for NaN, the same infinity.
    lost = int(np.count_nonzero(~finite & ~((wanted == found) | (np.isnan(wanted) & np.isnan(found)))))
    both = finite & np.isfinite(found)
    error = np.abs(wanted[both] - found[both])
    size = np.abs(wanted[both])
    scale = output_scale(expected)
    relative = error / np.maximum(size, np.finfo(np.float32).tiny)
    # An element of error 0 needs no tolerance, even where the reference is 0.
    relative[error == 0] = 0.0
    # Numbers below the normal ones of the output's dtype lie on a grid: two steps are two roundings.
    grid = float(ml_dtypes.finfo(got.dtype).smallest_subnormal)
    forgiven = CONDITIONING_FACTOR * conditioning + 2 * grid
    required_atol = float(np.max(error - tolerance.rtol * size - forgiven, initial=0.0)) / scale
    allowed = tolerance.atol * scale + tolerance.rtol * size + forgiven
    excess = error - tolerance.atol * scale - forgiven
    required_rtol = float(np.max(np.where(excess > 0, excess / np.maximum(size, 1e-30), 0.0), initial=0.0))
    reason = _failure(broken, lost, required_atol, required_rtol, tolerance, error)
    if reason and conditioning and not (broken or lost):
        times = np.max(error) / conditioning
        reason += f". It is {times:,.0f} times as far as ONNX Runtime moves when it rounds otherwise"
    return SampleComparison(
        sample=sample,
        passed=not reason,
        reason=reason,
        max_abs=float(np.max(error, initial=0.0)),
        mean_abs=float(np.mean(error)) if error.size else 0.0,
        max_rel=float(np.max(relative, initial=0.0)),
        mean_rel=float(np.mean(relative)) if error.size else 0.0,
        cosine=_cosine(wanted[both], found[both]),
        required_atol=required_atol,
        required_rtol=required_rtol,
        argmax_agreement=_argmax_agreement(expected, got),
        required_factor=None if broken or lost else _largest_share(error, allowed),
        histogram=_histogram(error, allowed, broken + lost),
        conditioning=conditioning,
    )


def differing_bits(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many elements of two arrays of one dtype and shape differ in any bit; NaN equals the same NaN."""
    if not a.size:
        return 0
    left, right = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, -1) for x in (a, b))
    return int(np.count_nonzero((left != right).any(axis=1)))


def _compare_exact(expected: np.ndarray, got: np.ndarray, sample: int) -> SampleComparison:
    error = np.abs(expected.astype(np.float64) - got.astype(np.float64))
    wrong = int(np.count_nonzero(expected != got))
    reason = f"{wrong} of {expected.size} elements differ; {expected.dtype} must be equal" if wrong else ""
    largest = float(np.max(error, initial=0.0))
    return SampleComparison(
        sample,
        not wrong,
        reason,
        largest,
        float(np.mean(error)) if error.size else 0.0,
        required_atol=largest,
        required_factor=None if wrong else 0.0,
        histogram=(expected.size - wrong, *[0] * (len(HISTOGRAM_EDGES) - 1), wrong),
    )


def _failure(
    broken: int, lost: int, required_atol: float, required_rtol: float, tolerance: Tolerance, error: np.ndarray
) -> str:
    if broken:
        return f"{broken} elements are NaN or infinite where the reference is finite"
    if lost:
        return f"{lost} elements differ where the reference is NaN or infinite"
    # The factor forgives the rounding of this very computation.
    if required_atol > tolerance.atol * (1 + 1e-9):
        return (
            f"largest error {np.max(error):.3g}; it would pass with atol {required_atol:.3g} "
            f"(is {tolerance.atol:g}) or with rtol {required_rtol:.3g} (is {tolerance.rtol:g})"
        )
    return ""


def _largest_share(error: np.ndarray, allowed: np.ndarray) -> float | None:
    """Return the largest error in units of what its element is allowed; None where nothing is and something differs."""
    wrong = error > 0
    if not wrong.any():
        return 0.0
    if (allowed[wrong] == 0).any():
        return None
    return float(np.max(error[wrong] / allowed[wrong]))


def _histogram(error: np.ndarray, allowed: np.ndarray, not_finite: int) -> tuple[int, ...]:
    """Return the bins of `SampleComparison.histogram`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(error == 0, 0.0, error / allowed)
    counts = np.bincount(np.searchsorted(HISTOGRAM_EDGES, shares), minlength=len(HISTOGRAM_EDGES) + 1)
    counts[-1] += not_finite
    return tuple(int(count) for count in counts)


def _cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    length = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return float(a @ b) / length if length > 0 else None


def _argmax_agreement(expected: np.ndarray, got: np.ndarray) -> float | None:
    if expected.ndim < 1 or expected.shape[-1] < 2 or expected.size == 0:
        return None
    return float(np.mean(np.argmax(expected, axis=-1) == np.argmax(got, axis=-1)))
