"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import platform
from types import SimpleNamespace

import pytest

from relaxtune.pipeline.tuning.search import evolution as heap
from relaxtune.pipeline.workers.child import resident_bytes

_SIZE, _COUNT = 4096, 20_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what was freed, and is asked here")
def test_what_lies_freed_between_used_memory_goes_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(_SIZE) for _ in range(_COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, _SIZE)
    for index, block in enumerate(blocks):
        # The last block of every 64 stays: no heap's end is free.
        if index % 64 != 63:
            libc.free(block)
    before = resident_bytes()
    assert heap.return_freed_memory()
    assert before - resident_bytes() > 0.5 * _SIZE * _COUNT
    for block in blocks[63::64]:
        libc.free(block)


def test_a_library_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert not heap.return_freed_memory()
