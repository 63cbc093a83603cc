"""`Unpadding`: how the padding of a batch is left out; what lowering, artifact and validation share of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# The two inputs of `main` that say where the tokens are, the axis of the first, and the function that makes both.
ROWS, SLOTS, TOKENS, ENTRY = "token_rows", "token_slots", "tokens", "list_tokens"
EXTRA_INPUTS = 2


@dataclass(frozen=True)
class Unpadding:
    """How the padding of a batch is left out.

    Attributes
    ----------
    mask
        The input [rows, places] that is 0 at padding.
    kept
        Places of each row that are computed even where the mask hides them; from the end where negative.
    multiple
        What the number of tokens is rounded up to, so that few numbers come; what fills it up is computed and not read.
    zeros
        The outputs [rows, places, ...] that are 0 at padding, whatever the model has there.
    """

    mask: str
    kept: tuple[int, ...]
    multiple: int
    zeros: tuple[str, ...]

    def lists(self, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the two inputs of `main` for a mask, as the artifact makes them on its device.

        The first is [tokens]: the place of each token in the flat mask, and of the last place for what fills up. The
        second is [rows, places]: the token that a place is, and at padding the first of its row, or the next row's.
        """
        kept = np.asarray(mask) != 0
        kept[:, list(self.kept)] = True
        rows = np.flatnonzero(kept)
        size = self.size(len(rows), kept.size)
        filled = np.concatenate([rows, np.full(size - len(rows), kept.size - 1)])
        starts = np.cumsum(kept.sum(axis=1)) - kept.sum(axis=1)
        slots = np.where(kept, kept.cumsum().reshape(kept.shape) - 1, np.minimum(starts, len(rows) - 1)[:, None])
        return filled.astype("int32"), np.maximum(slots, 0).astype("int32")

    def size(self, tokens: int, places: int) -> int:
        """Return what a number of tokens is rounded up to."""
        return min(-(-max(tokens, 1) // self.multiple) * self.multiple, places)

    def without_padding(
        self, outputs: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return outputs of the model with zeros at padding, as the artifact gives them."""
        hidden = np.asarray(inputs[self.mask]) == 0
        result = dict(outputs)
        for name in self.zeros:
            if name in result:
                array = result[name]
                rows = array.reshape(*hidden.shape, -1) if array.shape[:2] != hidden.shape else array
                seen = ~hidden.reshape(*hidden.shape, *[1] * (rows.ndim - 2))
                result[name] = np.where(seen, rows, np.zeros((), array.dtype)).reshape(array.shape)
        return result
