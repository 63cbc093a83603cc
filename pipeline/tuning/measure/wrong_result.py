"""Whether a candidate computed a wrong result: its output against the reference, within the tolerance."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from relaxtune.pipeline.arrays import map_chunks
from relaxtune.pipeline.validate.tolerances import KernelTolerance


def find_mismatch(output: np.ndarray, expected: np.ndarray, accepted: KernelTolerance) -> str | None:
    """Return how an output differs from what is expected, or None when it is within tolerance.

    Integers are equal; of those of 8 bits, a part may be one off (`KernelTolerance.steps`), at least one element.
    """
    if accepted.quantities > 1:
        alone = replace(accepted, quantities=1)
        found = [find_mismatch(output[..., i], expected[..., i], alone) for i in range(accepted.quantities)]
        return next((f"[..., {i}]: {one}" for i, one in enumerate(found) if one is not None), None)
    if expected.dtype.kind in "iub":
        wrong = output != expected
        few = accepted.steps > 0 and wrong.sum() <= max(1.0, accepted.steps * wrong.size)
        steps = (
            output[wrong].astype(np.int16) - expected[wrong] if few and output.dtype in (np.int8, np.uint8) else None
        )
        if not wrong.any() or (steps is not None and (np.abs(steps) == 1).all()):
            return None
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        return (
            f"{int(wrong.sum())} of {wrong.size} integers differ, first at {where}: {output[where]}, {expected[where]}"
        )
    got, want = output.reshape(-1), expected.reshape(-1)
    absolute = absolute_bound(expected, accepted)

    def wrong_within(begin: int, end: int) -> np.ndarray:
        found = _wrong(got[begin:end], want[begin:end], accepted.rtol, absolute)
        return np.flatnonzero(found) + begin

    wrong = np.concatenate([np.zeros(0, np.intp), *map_chunks(wrong_within, want.size)])
    if not wrong.size:
        return None
    first = int(wrong[0])
    where = tuple(int(i) for i in np.unravel_index(first, expected.shape))
    return (
        f"{wrong.size} of {want.size} elements are off by more than {accepted.rtol:.2g} relative + "
        f"{absolute:.2g} absolute, first at {where}: got {float(got[first]):.6g}, expected {float(want[first]):.6g}"
    )


def absolute_bound(expected: np.ndarray, accepted: KernelTolerance) -> float:
    """Return the absolute part of the tolerance of every element; 0 for integers."""
    if expected.dtype.kind in "iub":
        return 0.0
    want = expected.reshape(-1)
    largest = max(map_chunks(lambda *at: _largest(want[slice(*at)]), want.size), default=0.0)
    return accepted.atol * largest + accepted.accumulated


def _largest(values: np.ndarray) -> float:
    largest = float(np.abs(_wide(values)).max(initial=0.0))
    if math.isfinite(largest):
        return largest
    wide = values.astype(np.float64)
    return float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64 if values.dtype.itemsize > 4 else np.float32)


def _wrong(output: np.ndarray, expected: np.ndarray, rtol: float, absolute: float) -> np.ndarray:
    """Return which elements differ too much; none, as nearly always, is an empty array."""
    got, want = _wide(output), _wide(expected)
    with np.errstate(invalid="ignore", over="ignore"):
        got -= want
        np.abs(got, out=got)
        np.abs(want, out=want)
        want *= rtol
        want += absolute
        # An infinity or NaN on either side makes this false.
        if (got <= want).all() and np.isfinite(want).all():
            return np.zeros(0, np.bool_)
        got, want = output.astype(np.float64), expected.astype(np.float64)
        near = np.isfinite(want) & (np.abs(got - want) <= rtol * np.abs(want) + absolute)
    # Where an infinity or NaN is expected, nothing else is right: the bound above would be infinite there.
    return np.asarray(~(near | (got == want) | (np.isnan(got) & np.isnan(want))))
