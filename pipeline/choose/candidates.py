"""The one look-up of a task's candidates: which records of it count here, the best first, and which are refuted.

Records come from every layer of the database, by workload or by signature as their route asks (`tuning_db.lookup`). A
decision whose newest measurement here was a wrong result does not count, whichever layer or twin of the task it was
measured in (`tuning_db.standing`).
"""

from __future__ import annotations

from relaxtune.pipeline.choose.plausible_latency import believable_records
from relaxtune.pipeline.choose.replay import without_stale_fallbacks
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.lookup_cache import LookupCache
from relaxtune.tuning_db.records import Environment, Route, Status, TuningRecord, signature_key
from relaxtune.tuning_db.standing import standing_records

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
    """

    def __init__(self, database: TuningDatabase, target: ResolvedTarget, environment: Environment) -> None:
        """Hold a database; nothing is read."""
        self._answers = LookupCache(database)
        self.target = target
        self.environment = environment
        self._key = target_key(target)

    def list_standing(self, task: TuningTask) -> list[TuningRecord]:
        """Return the valid records of a task that count, the best first."""
        listed = self._answers.list_top(self._question(task), k=_LISTED)
        held = without_stale_fallbacks(task, believable_records(task, listed), self.target)
        return standing_records(held, self.environment, self.list_refuted(task)) if held else []

    def list_refuted(self, task: TuningTask) -> tuple[TuningRecord, ...]:
        """Return the records of a task whose results were wrong, the oldest first."""
        return self._answers.list_failed(self._question(task), status=Status.WRONG_RESULT)

    def failed_templates(self, task: TuningTask) -> frozenset[str]:
        """Return the decisions of templates that failed for a task on a device of this architecture."""
        failed = self._answers.list_failed(self._question(task, Route.TEMPLATE))
        return frozenset(record.decision for record in failed if record.target.arch == self._key.arch)

    def _question(self, task: TuningTask, route: Route | None = None) -> Question:
        return Question(task.workload_hash, signature_key(task.signature), self._key, self.environment, route)
