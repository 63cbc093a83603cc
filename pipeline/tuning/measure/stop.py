"""When a tuning run has to end: its deadline, or Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

logger = logging.getLogger(__name__)


class StopSignal:
    """Tells whether a tuning run has to end: the user asked for it, or the deadline has passed.

    Parameters
    ----------
    deadline : float or None
        On the clock of `time.monotonic`.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self._asked = threading.Event()

    def request(self) -> None:
        """Ask for the end; safe in a signal handler."""
        self._asked.set()

    @property
    def asked(self) -> bool:
        """Whether the user asked for the end."""
        return self._asked.is_set()

    @property
    def due(self) -> bool:
        """Whether the run has to end."""
        return self.asked or (self.deadline is not None and time.monotonic() >= self.deadline)


@contextlib.contextmanager
def ctrl_c_requests(stop: StopSignal) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM ask for the end and the second raise; only the main thread may change that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        logger.warning("stopping: what is finished is kept; press Ctrl-C again to stop at once")
        stop.request()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
