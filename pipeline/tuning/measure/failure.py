"""How a failed candidate is told through MetaSchedule's interfaces, which have one text for it, and how a run ends."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from relaxtune.tuning_db.records import Status

logger = logging.getLogger(__name__)

CANCELLED = "cancelled"


def failure_text(status: Status, error: str) -> str:
    """Return the error text of a builder or runner result: the status, then the reason."""
    return f"{status.value}: {error}"


def read_failure(text: str, default: Status) -> tuple[Status, str]:
    """Return status and reason of an error text; one that names no status, from another builder, has the default."""
    head, separator, reason = text.partition(": ")
    if separator and head in {status.value for status in Status}:
        return Status(head), reason
    return default, text


class StopSignal:
    """Says when a tuning run has to end: somebody asked, or the deadline has passed.

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
        """Whether somebody asked for the end."""
        return self._asked.is_set()

    @property
    def due(self) -> bool:
        """Whether the run has to end."""
        return self.asked or (self.deadline is not None and time.monotonic() >= self.deadline)


@contextlib.contextmanager
def ctrl_c_requests(stop: StopSignal) -> Iterator[None]:
    """Let the first Ctrl-C ask for the end and the second raise; only the main thread may change that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        logger.warning("stopping: what is finished is kept; press Ctrl-C again to stop at once")
        stop.request()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
