"""Look-ups of a tuning run, answered once.

A run asks the same questions again and again, and nobody but itself changes the answers that it acts on. `LookupCache`
keeps them by the hash of the question until this process writes through the same database object; what others write
meanwhile is seen after `forget`.
"""

from __future__ import annotations

import threading

from relaxtune.tuning_db.records import Environment, Route, TargetKey, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase

_Question = tuple[str | None, str | None, TargetKey, Environment, Route | None, int]


class LookupCache:
    """The answers of `list_top` and `find_best` of one database; safe to share between threads."""

    def __init__(self, database: TuningDatabase) -> None:
        """Hold a database, and no answers."""
        self._database = database
        self._answers: dict[_Question, tuple[TuningRecord, ...]] = {}
        self._written = database.writes
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Ask the database again from now on."""
        with self._lock:
            self._answers = {}

    def list_top(
        self,
        *,
        workload_hash: str | None,
        signature_key: str | None,
        target: TargetKey,
        environment: Environment,
        route: Route | None = None,
        k: int = 10,
    ) -> tuple[TuningRecord, ...]:
        """Return what `TuningDatabase.list_top` said since this process wrote last."""
        question = (workload_hash, signature_key, target, environment, route, k)
        with self._lock:
            # Read before the question is asked: a write meanwhile makes the answer old, not the other way round.
            written = self._database.writes
            if written != self._written:
                self._answers, self._written = {}, written
            answers = self._answers
            known = answers.get(question)
        if known is not None:
            return known
        answer = tuple(
            self._database.list_top(
                workload_hash=workload_hash,
                signature_key=signature_key,
                target=target,
                environment=environment,
                route=route,
                k=k,
            )
        )
        # Into the answers of that moment: if there was a write since, they are no longer those asked.
        answers[question] = answer
        return answer

    def find_best(
        self,
        *,
        workload_hash: str | None,
        signature_key: str | None,
        target: TargetKey,
        environment: Environment,
        route: Route | None = None,
    ) -> TuningRecord | None:
        """Return what `TuningDatabase.find_best` said since this process wrote last."""
        found = self.list_top(
            workload_hash=workload_hash,
            signature_key=signature_key,
            target=target,
            environment=environment,
            route=route,
            k=1,
        )
        return found[0] if found else None
