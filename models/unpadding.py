"""`Unpadding`: how the padding of a batch is left out; what lowering, artifact and validation share of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# The inputs of `main` that say where the tokens are, the axis of the first, and the function that makes them.
ROWS, SPANS, SLOTS, TOKENS, ENTRY = "token_rows", "token_spans", "token_slots", "tokens", "list_tokens"
EXTRA_INPUTS = 3


@dataclass(frozen=True)
class Unpadding:
    """How the padding of a batch is left out.

    The last inputs of `main`, which the artifact makes of a mask on its device, list the tokens row by row, those that
    are kept behind the mask last. The first input is [tokens]: the place of each in the flat mask; what fills up is the
    last place. The second is [tokens, 2]: the first token that the mask shows of the same row, and the one after the
    last. The third is [rows, places]: the token that a place is, and at padding the first of its row, or the next
    row's.
    """

    mask: str  # The input [rows, places] that is 0 at padding.
    # Places of each row that are computed even where the mask hides them; from the end where negative.
    kept: tuple[int, ...]
    # The number of tokens is rounded up to a multiple of this, so that few numbers occur; added places are not read.
    multiple: int
    zeros: tuple[str, ...]  # The outputs [rows, places, ...] that are 0 at padding, whatever the model has there.

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
