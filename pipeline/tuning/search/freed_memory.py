"""Gives memory that was freed back to the system.

TVM's schedules are small objects made and freed by many threads. glibc keeps what a thread freed for that thread, in
heaps of their own, so that a process that searches for long takes more than it uses (`malloc_trim(3)`, `mallopt(3)`).
"""

from __future__ import annotations

import ctypes
from functools import cache


def return_freed_memory() -> bool:
    """Give freed memory back; return whether the C library here offers that (glibc does) and there was any."""
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
