"""Whether an output is what is expected of it."""

from __future__ import annotations

import numpy as np

from pipeline.tolerances import KernelTolerance


def find_mismatch(output: np.ndarray, expected: np.ndarray, accepted: KernelTolerance) -> str | None:
    """Return how an output differs from what is expected, or None when it is within tolerance; integers are equal."""
    if expected.dtype.kind in "iub":
        wrong = output != expected
        if not wrong.any():
            return None
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        return (
            f"{int(wrong.sum())} of {wrong.size} integers differ, first at {where}: {output[where]}, {expected[where]}"
        )
    got, want = output.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(want)
    absolute = accepted.atol * float(np.abs(want[finite]).max(initial=0.0)) + accepted.accumulated
    with np.errstate(invalid="ignore"):
        near = finite & (np.abs(got - want) <= accepted.rtol * np.abs(want) + absolute)
    # Where an infinity or NaN is expected, nothing else is right: the bound above would be infinite there.
    wrong = ~(near | (got == want) | (np.isnan(got) & np.isnan(want)))
    if not wrong.any():
        return None
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.size} elements are off by more than {accepted.rtol:.2g} relative + "
        f"{absolute:.2g} absolute, first at {where}: got {got[where]:.6g}, expected {want[where]:.6g}"
    )
