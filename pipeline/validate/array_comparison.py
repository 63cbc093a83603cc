"""Compare an array with its reference: errors, what tolerance they would need, and how they are spread."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce

import ml_dtypes
import numpy as np

from relaxtune.models.spec import shape_text
from relaxtune.pipeline.arrays import map_chunks
from relaxtune.pipeline.validate.tolerances import Tolerance, output_scale

# Allowed error of an output of an ill-conditioned graph, in units of the change of the reference itself.
CONDITIONING_FACTOR = 4.0
# Upper edges of the error histogram, in units of what an element is allowed; the last bin has no upper edge.
HISTOGRAM_EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0)

# Elements that are compared at a time: they stay in a core's cache (3 times as fast as whole for logits of 51 million).
_BLOCK = 1 << 15
# Elements that one thread takes at a time.
_PART = 16 * _BLOCK


@dataclass(frozen=True)
class Movement:
    """How far an output of the reference moves when it rounds otherwise, the most of several answers."""

    # Absolute changes over the elements that are finite in both.
    largest: float = 0.0
    mean: float = 0.0
    apart: float = 0.0  # Share of the elements that move by more than the table of tolerances allows.
    ties: bool = False  # Whether the graph has quantisers: a value near a tie takes one step or the other.

    def joined(self, other: Movement) -> Movement:
        """Return the greater of both, measure by measure."""
        return Movement(
            max(self.largest, other.largest),
            max(self.mean, other.mean),
            max(self.apart, other.apart),
            self.ties or other.ties,
        )


STILL = Movement()


def movement(expected: np.ndarray, moved: np.ndarray, tolerance: Tolerance, *, ties: bool) -> Movement:
    """Return how far one answer of the reference is from its first."""
    found = compare_arrays(expected, moved, tolerance)
    return Movement(found.max_abs, found.mean_abs, found.apart, ties)


@dataclass(frozen=True)
class SampleComparison:
    """One output of one sample."""

    sample: int  # Its number.
    # Whether it is within tolerance; if not, why, in words.
    passed: bool
    reason: str
    # Errors over the elements that are finite in both.
    max_abs: float = 0.0
    mean_abs: float = 0.0
    max_rel: float = 0.0
    mean_rel: float = 0.0
    cosine: float | None = None  # Between the two outputs as vectors; None when one of them is all zero.
    required_atol: float = 0.0  # The smallest `atol` that would have passed with the `rtol` used.
    required_rtol: float = 0.0  # The smallest `rtol` that would have passed with the `atol` used.
    # Share of rows whose largest element is in the same place; None for outputs that are not floats or have no rows.
    argmax_agreement: float | None = None
    # The smallest factor of both tolerances that would have passed: above 1 the sample fails. None where elements are
    # NaN or infinite in one of the two only, or must be equal and are not: no factor would do.
    required_factor: float | None = None
    # How many elements have an error of at most each of `HISTOGRAM_EDGES` times what they are allowed, each counted
    # once, in the first bin it fits; a last bin has those above all edges and those that are not finite.
    histogram: tuple[int, ...] = ()
    apart: float = 0.0  # Share of the elements that are off by more than the table of tolerances allows.
    # How far the reference itself moves when it rounds otherwise, where the output was allowed 4 times that.
    movement: Movement = STILL


def compare_arrays(
    expected: np.ndarray, got: np.ndarray, tolerance: Tolerance, sample: int = 0, moves: Movement = STILL
) -> SampleComparison:
    """Return how one array compares with its reference; it fails in another shape, or with integers for floats.

    An element is allowed 4 times the largest of what the reference `moves` when it rounds otherwise, and the mean
    error 4 times the mean: ties of a quantiser move few values by much, a wrong kernel moves all of them.
    """
    if expected.shape != got.shape:
        shapes = [shape_text(array.shape) or "a scalar" for array in (expected, got)]
        return SampleComparison(sample, False, f"expected shape {shapes[0]}, got {shapes[1]}")
    if (expected.dtype.kind in "biu") != (got.dtype.kind in "biu"):
        return SampleComparison(sample, False, f"expected dtype {expected.dtype}, got {got.dtype}")
    if expected.dtype.kind in "biu":
        return _compare_exact(expected, got, sample)
    scale = output_scale(expected)
    # Numbers below the normal ones of the output's dtype lie on a grid: two steps are two roundings.
    grid = float(ml_dtypes.finfo(got.dtype).smallest_subnormal)
    forgiven = CONDITIONING_FACTOR * moves.largest + 2 * grid
    flat = expected.reshape(-1), got.reshape(-1)

    def look(begin: int, end: int) -> _Seen:
        seen = _Seen()
        for start in range(begin, end, _BLOCK):
            wanted, found = (one[start : min(start + _BLOCK, end)].astype(np.float64) for one in flat)
            seen.add(wanted, found, tolerance.rtol, tolerance.atol * scale, forgiven)
        return seen

    seen = reduce(_Seen.joined, map_chunks(look, expected.size, _PART), _Seen())
    required_atol = seen.beyond_rtol / scale
    not_finite = seen.broken + seen.lost
    mean = seen.error_sum / seen.count if seen.count else 0.0
    reason = _failure(seen, required_atol, tolerance)
    if moves.largest and not not_finite:
        largest, usual = seen.error_max / moves.largest, mean / (moves.mean or math.inf)
        if not reason and mean > CONDITIONING_FACTOR * moves.mean + tolerance.atol * scale:
            reason = f"mean error {mean:.3g}"
        if reason:
            reason += (
                f". ONNX Runtime moves by {moves.largest:.3g} at most and {moves.mean:.3g} in the mean when it rounds "
                f"otherwise: this is {largest:,.1f} and {usual:,.1f} times as far"
                + (", which ties of quantisers do not explain" if moves.ties else "")
            )
    length = math.sqrt(seen.squares[0]) * math.sqrt(seen.squares[1])
    agreement = None
    if expected.ndim and expected.shape[-1] > 1 and expected.size:
        agreement = float(np.mean(np.argmax(expected, axis=-1) == np.argmax(got, axis=-1)))
    return SampleComparison(
        sample=sample,
        passed=not reason,
        reason=reason,
        max_abs=seen.error_max,
        mean_abs=mean,
        max_rel=seen.relative_max,
        mean_rel=seen.relative_sum / seen.count if seen.count else 0.0,
        cosine=seen.product / length if length > 0 else None,
        required_atol=required_atol,
        required_rtol=seen.required_rtol,
        argmax_agreement=agreement,
        required_factor=None if not_finite or seen.forbidden else seen.share_max,
        histogram=(*map(int, np.diff(seen.within, prepend=0)), seen.count - int(seen.within[-1]) + not_finite),
        apart=seen.apart / seen.count if seen.count else 0.0,
        movement=moves,
    )


@dataclass
class _Seen:
    """Errors of an output so far, block by block; see `SampleComparison`."""

    # Elements that are not finite where the reference is, and that are not the reference's NaN or infinity.
    broken: int = 0
    lost: int = 0
    count: int = 0  # Elements that are finite in both; the sums and maxima are of them.
    error_max: float = 0.0
    error_sum: float = 0.0
    relative_max: float = 0.0
    relative_sum: float = 0.0
    beyond_rtol: float = 0.0  # The largest part of an error that the relative tolerance does not allow, at least 0.
    required_rtol: float = 0.0
    apart: int = 0  # How many have an error that would not be allowed if nothing was forgiven.
    # The largest error in units of what is allowed; whether one differs where nothing is.
    share_max: float = 0.0
    forbidden: bool = False
    squares: tuple[float, float] = (0.0, 0.0)
    product: float = 0.0
    # How many have an error of at most each of `HISTOGRAM_EDGES` times what they are allowed.
    within: np.ndarray = field(default_factory=lambda: np.zeros(len(HISTOGRAM_EDGES), np.int64))

    def add(self, wanted: np.ndarray, found: np.ndarray, rtol: float, atol: float, forgiven: float) -> None:
        """Take in a block, as float64; `atol` and `forgiven` are absolute."""
        finite = np.isfinite(wanted)
        both = finite & np.isfinite(found)
        if not both.all():
            self.broken += int(np.count_nonzero(finite & ~both))
            # Where the reference is not finite, the module must give the same: NaN for NaN, the same infinity.
            same = (wanted == found) | (np.isnan(wanted) & np.isnan(found))
            self.lost += int(np.count_nonzero(~finite & ~same))
            wanted, found = wanted[both], found[both]
        if not wanted.size:
            return
        error, size = np.abs(wanted - found), np.abs(wanted)
        # An element of error 0 needs no tolerance, even where the reference is 0.
        relative = error / np.maximum(size, np.finfo(np.float32).tiny)
        bound = rtol * size
        allowed = bound + (atol + forgiven)
        excess = error - (atol + forgiven)
        self.apart += int(np.count_nonzero(error > bound + atol))
        self.count += wanted.size
        self.error_max = max(self.error_max, float(np.max(error)))
        self.error_sum += float(np.sum(error))
        self.relative_max = max(self.relative_max, float(np.max(relative)))
        self.relative_sum += float(np.sum(relative))
        self.beyond_rtol = max(self.beyond_rtol, float(np.max(error - bound)) - forgiven)
        if float(np.max(excess)) > 0:
            needed = np.where(excess > 0, excess / np.maximum(size, 1e-30), 0.0)
            self.required_rtol = max(self.required_rtol, float(np.max(needed)))
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(error == 0, 0.0, error / allowed)
        largest = float(np.max(shares))
        self.forbidden |= math.isinf(largest)
        self.share_max = max(self.share_max, largest)
        self.within += [np.count_nonzero(shares <= edge) for edge in HISTOGRAM_EDGES]
        # Not by BLAS, whose threads take longer to wake than such a block takes.
        pairs = (wanted, wanted), (found, found), (wanted, found)
        own, others, product = (float(np.einsum("i,i->", *pair)) for pair in pairs)
        self.squares = self.squares[0] + own, self.squares[1] + others
        self.product += product

    def joined(self, other: _Seen) -> _Seen:
        """Return the errors of both parts together."""
        return _Seen(
            self.broken + other.broken,
            self.lost + other.lost,
            self.count + other.count,
            max(self.error_max, other.error_max),
            self.error_sum + other.error_sum,
            max(self.relative_max, other.relative_max),
            self.relative_sum + other.relative_sum,
            max(self.beyond_rtol, other.beyond_rtol),
            max(self.required_rtol, other.required_rtol),
            self.apart + other.apart,
            max(self.share_max, other.share_max),
            self.forbidden or other.forbidden,
            (self.squares[0] + other.squares[0], self.squares[1] + other.squares[1]),
            self.product + other.product,
            self.within + other.within,
        )


def differing_bits(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many elements of two arrays of one dtype and shape differ in any bit; NaN equals the same NaN."""
    if not a.size:
        return 0
    left, right = (np.ascontiguousarray(x).reshape(-1).view(f"u{x.itemsize}") for x in (a, b))
    return int(np.count_nonzero(left != right))


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


def _failure(seen: _Seen, required_atol: float, tolerance: Tolerance) -> str:
    if seen.broken:
        return f"{seen.broken} elements are NaN or infinite where the reference is finite"
    if seen.lost:
        return f"{seen.lost} elements differ where the reference is NaN or infinite"
    # The factor forgives the rounding of this very computation.
    if required_atol > tolerance.atol * (1 + 1e-9):
        return (
            f"largest error {seen.error_max:.3g}; it would pass with atol {required_atol:.3g} "
            f"(is {tolerance.atol:g}) or with rtol {seen.required_rtol:.3g} (is {tolerance.rtol:g})"
        )
    return ""
