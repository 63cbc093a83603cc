"""`SlowPages`: a page that takes long to make is answered by one that waits for it.

A first look at a job of a large database reads its records from the disk. Whoever asks sees at once that it is being
read, and however often it is asked for meanwhile, it is made once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from relaxtune.pipeline.dashboard.markup import Page, sections

# Pages that are made at the same time.
_WORKERS = 4
# Pages that are made and wait to be asked for again, and how long: the browser asks after a second.
_KEPT, _KEPT_S = 64, 10.0


class _Making:
    """A page that is being made, and when it was ready."""

    def __init__(self, future: Future[Page]) -> None:
        self.future = future
        self.ready_at = math.inf
        future.add_done_callback(self._note)

    def _note(self, _: Future[Page]) -> None:
        self.ready_at = time.monotonic()

    @property
    def old(self) -> bool:
        """Whether it was ready long ago, so that its browser has left."""
        return time.monotonic() - self.ready_at > _KEPT_S


class SlowPages:
    """Makes pages in threads of its own. Any thread may ask."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._executor = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="pages")
        self._lock = threading.Lock()
        self._making: dict[str, _Making] = {}

    def get(self, address: str, make: Callable[[], Page]) -> Page:
        """Return a page, or one that waits for it.

        A page that was ready after an answer had gone out is the next answer, once; then it is made anew.

        Raises
        ------
        Exception
            What `make` raised.
        """
        with self._lock:
            making = self._making.get(address)
            if making is None or making.old:
                while len(self._making) >= _KEPT:
                    self._making.pop(next(iter(self._making)))
                making = self._making[address] = _Making(self._executor.submit(make))
        if making.future not in wait([making.future], self._patience_s).done:
            told = sections(
                "Being read", [], subtitle="This page reads many records. It appears as soon as it is ready."
            )
            return Page("being read", told, waits=True)
        with self._lock:
            if self._making.get(address) is making:
                del self._making[address]
        return making.future.result()
