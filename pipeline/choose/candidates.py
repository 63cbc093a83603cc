"""The one look-up of a task's candidates: which records of it count here, the best first, and which are refuted.

Records come from every layer of the database, by workload or by signature as their route asks (`tuning_db.lookup`). A
decision whose newest measurement here was a wrong result does not count, whichever layer or twin of the task it was
measured in (`tuning_db.standing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relaxtune.pipeline.choose.plausible_latency import believable_records
from relaxtune.pipeline.choose.replay import without_stale_fallbacks
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.lookup import WORKLOAD_ROUTES, Question, device_of, why_not_true
from relaxtune.tuning_db.lookup_cache import LookupCache
from relaxtune.tuning_db.records import (
    Environment,
    RecordFilter,
    Route,
    Status,
    TuningRecord,
    signature_key,
)
from relaxtune.tuning_db.standing import standing_records
from relaxtune.tuning_db.store import TuningDatabase

# Told of each record of a task why it is not taken, or that it is (`TAKEN`).
Told = Callable[[TuningTask, TuningRecord, str], None]
TAKEN = "taken"

# Records tried for one kernel, the best first, before the fallback is taken.
RECORDS_TRIED = 8
# Records looked at, the best first: enough to find the fallback's among them, and those of the routes asked for.
_LISTED = 1000


class CandidateLookup:
    """Looks up the records of tasks for one place. Each question is asked once until this process writes.

    Parameters
    ----------
    database
        Where records are.
    target, environment
        What is compiled for, and where it is to run.
    told
        Told of each record, those that are not true here among them, what became of it. That reads all records of a
        task, which a look-up without it does not.
    """

    def __init__(
        self, database: TuningDatabase, target: ResolvedTarget, environment: Environment, told: Told | None = None
    ) -> None:
        """Hold a database; nothing is read."""
        self._database = database
        self._answers = LookupCache(database)
        self._told = told
        self.target = target
        self.environment = environment
        self._key = target_key(target)

    def list_standing(self, task: TuningTask) -> list[TuningRecord]:
        """Return the valid records of a task that count, the best first."""
        listed = self._answers.list_top(self._question(task), k=_LISTED)
        believed = believable_records(task, listed)
        held = without_stale_fallbacks(task, believed, self.target)
        refuted = self.list_refuted(task) if held else ()
        standing = standing_records(held, self.environment, refuted) if held else []
        if self._told is not None:
            self._tell_foreign(task, listed)
            self.tell(task, left_out(listed, believed), "its latency is less than any device takes")
            stale = "the default schedules make another kernel by now than the one that was measured"
            self.tell(task, left_out(believed, held), stale)
            wrong = {(device_of(record.environment), record.route, record.decision) for record in refuted}
            for record in left_out(held, standing):
                # A refutation on this device counts for measurements of all.
                places = (record.environment, self.environment)
                was = any((device_of(place), record.route, record.decision) in wrong for place in places)
                again = "a later measurement of the same decision counts"
                self.tell(task, [record], "its decision gave a wrong result since: it is refuted" if was else again)
        return standing

    def tell(self, task: TuningTask, records: Sequence[TuningRecord], reason: str) -> None:
        """Tell what became of records, where someone wants to know."""
        if self._told is not None:
            for record in records:
                self._told(task, record, reason)

    def list_refuted(self, task: TuningTask) -> tuple[TuningRecord, ...]:
        """Return the records of a task whose results were wrong, the oldest first."""
        return self._answers.list_failed(self._question(task), status=Status.WRONG_RESULT)

    def failed_templates(self, task: TuningTask) -> frozenset[str]:
        """Return the decisions of templates that failed for a task on a device of this architecture."""
        failed = self._answers.list_failed(self._question(task, Route.TEMPLATE))
        return frozenset(record.decision for record in failed if record.target.arch == self._key.arch)

    def _tell_foreign(self, task: TuningTask, listed: Sequence[TuningRecord]) -> None:
        """Tell why records of a task, or of its signature, are not in the answer to its question."""
        key = signature_key(task.signature)
        every = [
            *self._database.list_records(RecordFilter(workload_hash=task.workload_hash)),
            *self._database.list_records(RecordFilter(signature_key=key)),
        ]
        answered = {(record.layer, record.id) for record in listed}
        for record in {(one.layer, one.id): one for one in every if (one.layer, one.id) not in answered}.values():
            reason = why_not_true(self._key, self.environment, record)
            if reason is None and record.workload_hash != task.workload_hash and record.route in WORKLOAD_ROUTES:
                reason = f"of a like workload: a decision of route {record.route} belongs to one workload alone"
            if reason is None and record.status is not Status.OK:
                reason = f"the candidate failed: {record.status}"
            self.tell(task, [record], reason or f"more than {_LISTED} records are faster")

    def _question(self, task: TuningTask, route: Route | None = None) -> Question:
        return Question(task.workload_hash, signature_key(task.signature), self._key, self.environment, route)


def left_out(before: Sequence[TuningRecord], after: Sequence[TuningRecord]) -> list[TuningRecord]:
    """Return the records of `before` that are not in `after`, in their order."""
    kept = {id(record) for record in after}
    return [record for record in before if id(record) not in kept]
