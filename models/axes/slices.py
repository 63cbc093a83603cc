"""The ends that exporters give a Slice which takes the rest of an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable

#: torch writes "to the end" as the largest int64 or int32.
TO_THE_END = 2**31 - 1
# Bytes of memory that no machine has (64 TiB).
_MEMORY_BYTES = 2**46


def reaches_the_end(end: int, others: Iterable[int]) -> bool:
    """Return whether a Slice's end lies behind every place that an axis of unknown size can have.

    jax2tf writes 10^9. No axis is as long where the tensor would then fit no machine.

    Parameters
    ----------
    end : int
        From 0 on.
    others : iterable of int
        The known sizes of the tensor's other axes; an element has at least a byte.
    """
    return end >= TO_THE_END or end * math.prod(others) > _MEMORY_BYTES
