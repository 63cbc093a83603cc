"""Look-ups of one run, answered once.

A run asks the same questions again and again, and only its own writes change the answers that it acts on. `LookupCache`
keeps an answer until this process writes through the same database object. It sees what others write after `forget`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import Status, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase


class LookupCache:
    """The answers of `list_top` and `list_failed` of one database; safe to share between threads."""

    def __init__(self, database: TuningDatabase) -> None:
        """Hold a database, and no answers."""
        self._database = database
        self._answers: dict[tuple[object, ...], tuple[TuningRecord, ...]] = {}
        self._written = database.writes
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Ask the database again from now on."""
        with self._lock:
            self._answers = {}

    def list_top(self, question: Question, *, k: int = 10) -> tuple[TuningRecord, ...]:
        """Return what `TuningDatabase.list_top` returned since this process wrote last."""
        return self._known((question, k), lambda: self._database.list_top(question, k=k))

    def list_failed(self, question: Question, *, status: Status | None = None) -> tuple[TuningRecord, ...]:
        """Return what `TuningDatabase.list_failed` returned since this process wrote last."""
        return self._known((question, status), lambda: self._database.list_failed(question, status=status))

    def _known(self, key: tuple[object, ...], ask: Callable[[], Sequence[TuningRecord]]) -> tuple[TuningRecord, ...]:
        with self._lock:
            # Read before the question is asked: a write meanwhile makes the answer old, not the other way round.
            written = self._database.writes
            if written != self._written:
                self._answers, self._written = {}, written
            answers = self._answers
            known = answers.get(key)
        if known is None:
            # Into the answers of that moment: after a write they are no longer those asked.
            known = answers[key] = tuple(ask())
        return known
