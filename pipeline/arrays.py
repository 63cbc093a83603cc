"""NumPy arrays: the dtypes of TVM's names, and work on large arrays in chunks on several threads.

NumPy releases Python's lock while it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import ml_dtypes
import numpy as np

from relaxtune.schedules.targets.host import physical_cores

T = TypeVar("T")

# Elements of a chunk: its temporaries stay in a core's cache.
CHUNK = 1 << 16
_THREADS_MAX = 8


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype of a TVM dtype name, those of `ml_dtypes` included.

    Build and measuring processes use it: `models.spec.numpy_dtype` would import ONNX there, which takes half a second.

    Raises `TypeError`: NumPy has no such dtype, for example a vector such as `float16x2`.
    """
    return np.dtype(getattr(ml_dtypes, name, name))


def map_chunks(work: Callable[[int, int], T], size: int, chunk: int = CHUNK) -> list[T]:
    """Return what `work(begin, end)` returns for each chunk of `size` elements, in order."""
    bounds = [(begin, min(begin + chunk, size)) for begin in range(0, size, chunk)]
    if len(bounds) < 2:
        return [work(begin, end) for begin, end in bounds]
    return list(_threads().map(lambda bound: work(*bound), bounds))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_THREADS_MAX, physical_cores()), thread_name_prefix="relaxtune-chunks")
