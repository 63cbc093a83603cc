"""`StatusCounts`: how many records there are, counted beside the pages.

SQLite counts a million records in 0.1 s, and in two seconds when their index is on the disk yet. A page does not wait
for that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from relaxtune.tuning_db.questions.progress import count_by_status
from relaxtune.tuning_db.records import Status
from relaxtune.tuning_db.store import TuningDatabase

# A page that waits so long for a new count is painted within the 0.3 s in which it seems immediate.
_WAIT_S = 0.1


class StatusCounts:
    """Records of a database by status. One thread counts; any thread may ask."""

    def __init__(self, database: TuningDatabase, *, wait_s: float = _WAIT_S) -> None:
        self._database, self._wait_s = database, wait_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="counts")
        self._lock = threading.Lock()
        self._counting: Future[Mapping[Status, int]] | None = None
        self._known: Mapping[Status, int] | None = None

    def newest(self) -> Mapping[Status, int] | None:
        """Return a count begun now where it takes no longer than `wait_s`, else the last one; None before the first.

        Raises
        ------
        TuningDatabaseError
            The database cannot be read.
        """
        with self._lock:
            if self._counting is None:
                self._counting = self._executor.submit(count_by_status, self._database)
            counting = self._counting
        if counting not in wait([counting], self._wait_s).done:
            return self._known
        with self._lock:
            if counting is self._counting:
                self._counting = None
                self._known = self._known if counting.exception() else counting.result()
        return counting.result()
