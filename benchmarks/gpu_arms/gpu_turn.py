"""`GpuTurn`: one process at a time uses the GPU for something whose speed is looked at."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


class GpuTurn:
    """A lock between processes, by a file; the holder may enter it again."""

    def __init__(self, path: Path) -> None:
        """Open the lock's file, which is made if missing."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._depth = 0

    def __enter__(self) -> Self:
        """Wait for the turn."""
        if self._depth == 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the turn back."""
        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
