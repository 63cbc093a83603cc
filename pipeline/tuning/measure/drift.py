"""How much slower a device has become while a run went on."""

from __future__ import annotations

from collections.abc import Iterable

# One kernel measured again may have been lucky before; what several have in common is the device's.
_DRIFTED_MIN = 2


def drift(again: Iterable[tuple[float, float]]) -> float:
    """Return how many times slower a device has become, at least 1, by latencies before and after.

    The first candidates of a run meet a cool device. When those near the best are measured again, a card at its power
    limit takes up to a tenth longer. A candidate that was measured only before the change was 8 % slower than the best
    then, and seemed 4 % faster (attention of Llama-1B 1x2048 on an H200: 47.6 us beside 44.2, which took 49.6 again).

    Parameters
    ----------
    again : iterable of (float, float)
        Latencies of several kernels, each before and after. The least change is what all of them share.
    """
    changes = [after / before for before, after in again]
    return max(1.0, min(changes)) if len(changes) >= _DRIFTED_MIN else 1.0
