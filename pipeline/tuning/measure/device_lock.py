"""`DeviceLock`: one process at a time times something on a device."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


class DeviceLock:
    """A lock between processes, by two files; its holder may enter it again. It is free again when the holder dies.

    A waiting process holds the gate, which every process passes first: a tuning run, which locks again and again,
    cannot starve a process that locks once.
    """

    def __init__(self, path: Path) -> None:
        """Open the lock's files, which are made if missing."""
        self._lock, self._gate = (
            os.open(one, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644) for one in (path, path.with_suffix(".gate"))
        )
        self._depth = 0

    def __enter__(self) -> Self:
        """Wait for the lock."""
        if self._depth == 0:
            fcntl.flock(self._gate, fcntl.LOCK_EX)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            finally:
                fcntl.flock(self._gate, fcntl.LOCK_UN)
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files."""
        os.close(self._lock)
        os.close(self._gate)


def lock_of(folder: Path, device: str) -> DeviceLock:
    """Return the lock of a device, such as `cuda:1`, among the processes that share a folder."""
    return DeviceLock(folder / f"{device.replace(':', '-')}.lock")
