"""Work on large arrays, cut into chunks that threads take: NumPy leaves Python's lock to others meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from relaxtune.schedules.targets.host import physical_cores

T = TypeVar("T")

# Elements of a chunk: its temporaries stay in a core's cache.
CHUNK = 1 << 16
_THREADS_MAX = 8


def map_chunks(work: Callable[[int, int], T], size: int, chunk: int = CHUNK) -> list[T]:
    """Return what `work(begin, end)` returns for each chunk of `size` elements, in order."""
    bounds = [(begin, min(begin + chunk, size)) for begin in range(0, size, chunk)]
    if len(bounds) < 2:
        return [work(begin, end) for begin, end in bounds]
    return list(_threads().map(lambda bound: work(*bound), bounds))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_THREADS_MAX, physical_cores()), thread_name_prefix="relaxtune-chunks")
