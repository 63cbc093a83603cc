"""`DeviceTurn`: one process at a time uses a device for something whose speed is looked at."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self


class DeviceTurn:
    """A lock between processes, by two files; the holder may enter it again. A killed holder gives it back.

    Who waits holds the gate, which everybody passes before the lock itself: a process that asks again and again, as a
    tuning run does, cannot starve one that asks once.
    """

    def __init__(self, path: Path) -> None:
        """Open the lock's files, which are made if missing."""
        self._lock, self._gate = (
            os.open(one, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644) for one in (path, path.with_suffix(".gate"))
        )
        self._depth = 0

    def __enter__(self) -> Self:
        """Wait for the turn."""
        if self._depth == 0:
            with _held(self._gate):
                fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the turn back."""
        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files."""
        os.close(self._lock)
        os.close(self._gate)


@contextmanager
def _held(descriptor: int) -> Iterator[None]:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def turn_of(folder: Path, device: str) -> DeviceTurn:
    """Return the turn of a device, such as `cuda:1`, among the processes that share a folder."""
    return DeviceTurn(folder / f"{device.replace(':', '-')}.lock")
