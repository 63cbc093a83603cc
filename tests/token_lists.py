"""The lists of tokens that an artifact without padding makes on its device, by NumPy."""

from __future__ import annotations

import numpy as np

from relaxtune.models.unpadding import Unpadding


def token_lists(unpadding: Unpadding, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the last inputs of `main` for a mask; `Unpadding` says what they are."""
    seen = np.asarray(mask) != 0
    kept = np.zeros_like(seen)
    kept[:, list(unpadding.kept)] = True
    kept &= ~seen
    counts, shown = (seen | kept).sum(axis=1), seen.sum(axis=1)
    total = int(counts.sum())
    starts = np.cumsum(counts) - counts
    behind = starts + shown
    hidden = np.clip(starts, 0, max(total - 1, 0))[:, None]
    slots = np.where(
        seen,
        starts[:, None] + seen.cumsum(axis=1) - 1,
        np.where(kept, behind[:, None] + kept.cumsum(axis=1) - 1, hidden),
    )
    rows = np.full(unpadding.size(total, seen.size), seen.size - 1)
    places = np.flatnonzero(seen | kept)
    rows[slots.reshape(-1)[places]] = places
    row = rows // seen.shape[1]
    spans = np.stack([starts[row], starts[row] + np.maximum(shown[row], 1)], axis=1)
    return rows.astype("int32"), spans.astype("int32"), slots.astype("int32")
