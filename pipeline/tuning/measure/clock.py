"""The seconds in which at least one of several stages that overlap had work."""

from __future__ import annotations

import threading
import time


class BusyClock:
    """Wall seconds during which at least one of something was going on; safe between threads.

    Two builds at the same time for one second are one second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0
        self._seconds = 0.0

    def enter(self) -> None:
        """Note that one more is going on."""
        with self._lock:
            if self._running == 0:
                self._since = time.monotonic()
            self._running += 1

    def leave(self) -> None:
        """Note that one of those that entered is over."""
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._seconds += time.monotonic() - self._since

    def run_while(self, busy: bool) -> None:
        """Run from the first call with True to the next with False."""
        if busy and not self._running:
            self.enter()
        elif self._running and not busy:
            self.leave()

    @property
    def seconds(self) -> float:
        """Busy seconds so far."""
        with self._lock:
            return self._seconds + (time.monotonic() - self._since if self._running else 0.0)
