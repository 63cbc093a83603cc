"""The one look-up of a task's records: which of them count here, the best first.

Records come from every layer of the database, by workload or by signature as their route asks (`tuning_db.lookup`);
`tuning_db.winner` judges them. Only the code that makes kernels knows that a record of a default schedule is stale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from relaxtune.pipeline.choose.replay import replay_record
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.lookup import SIGNATURE_ROUTES, Question
from relaxtune.tuning_db.records import Environment, RecordFilter, Route, Status, TuningRecord, signature_key
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.winner import Doubt, Judged, impossible_latency, judge, not_in_answer, winner

logger = logging.getLogger(__name__)

# Records looked at, the best first: enough to find the fallback's among them, and those of the wanted routes.
_LISTED = 1000


class RecordLookup:
    """Looks up the records of tasks for one place.

    `database`: where records are. `target`, `environment`: what is compiled for, and where it is to run. `explain`:
    whether the trace has the records that are not true here, too. This reads all records of a task.
    """

    def __init__(
        self, database: TuningDatabase, target: ResolvedTarget, environment: Environment, *, explain: bool = False
    ) -> None:
        self._database = database
        self._explain = explain
        self.target = target
        self.environment = environment
        self._key = target_key(target)

    def judge(self, task: TuningTask) -> Judged:
        """Return the valid records of a task that count, the best first, and what became of the others."""
        question = self._question(task)
        listed = self._database.list_top(question, k=_LISTED)
        found = judge(listed, self.environment, lambda: self.list_refuted(task), doubt_of(task, self.target))
        if not self._explain:
            return found
        every = [
            *self._database.list_records(RecordFilter(workload_hash=task.workload_hash)),
            *self._database.list_records(RecordFilter(signature_key=question.signature_key)),
        ]
        return Judged(found.standing, (*found.trace, *not_in_answer(question, every, listed)))

    def list_refuted(self, task: TuningTask) -> list[TuningRecord]:
        """Return the records of a task whose results were wrong, the oldest first."""
        return self._database.list_failed(self._question(task), status=Status.WRONG_RESULT)

    def failed_templates(self, task: TuningTask) -> frozenset[str]:
        """Return the decisions of templates that failed for a task on a device of this architecture."""
        failed = self._database.list_failed(self._question(task, Route.TEMPLATE))
        return frozenset(record.decision for record in failed if record.target.arch == self._key.arch)

    def _question(self, task: TuningTask, route: Route | None = None) -> Question:
        return Question(task.workload_hash, signature_key(task.signature), self._key, self.environment, route)


def doubt_of(task: TuningTask, target: ResolvedTarget) -> Doubt:
    """Return what leaves out a task's impossible latencies, and fallbacks that the default schedules make no more."""
    # Measured again and again, a fallback is scheduled once for each kernel it was.
    stale: dict[str | None, str | None] = {}

    def doubt(record: TuningRecord) -> str | None:
        wrong = impossible_latency(record, task.flops, task.bytes)
        if wrong is not None:
            logger.warning(
                "record %s of task %s is not believed: %s. Remove it with `relaxtune db delete %s`",
                record.id, task.name, wrong, record.id,
            )  # fmt: skip
            return wrong
        if record.route is not Route.FALLBACK or record.status is not Status.OK:
            return None
        if record.kernel_hash not in stale:
            reason = unusable(task, record, target)
            if reason is not None:
                logger.info("%s", reason)
                reason = "the default schedules have changed since the measurement"
            stale[record.kernel_hash] = reason
        return stale[record.kernel_hash]

    return doubt


def unusable(task: TuningTask, record: TuningRecord, target: ResolvedTarget) -> str | None:
    """Return why a record makes no kernel, or another one than was measured; None where it makes that one."""
    try:
        replay_record(task, record, target)
    except LoweringError as e:
        return str(e)
    return None


def still_true_in(
    database: TuningDatabase, target: ResolvedTarget, environment: Environment
) -> Callable[[TuningTask, Sequence[TuningRecord]], list[TuningRecord]]:
    """Return what `tune` leaves stale records out with, for the database, target and environment that it is given."""
    return partial(without_stale, RecordLookup(database, target, environment))


def without_stale(lookup: RecordLookup, task: TuningTask, known: Sequence[TuningRecord]) -> list[TuningRecord]:
    """Return a task's records less those of fallbacks, templates and libraries that selection would pass over.

    Records of latencies that no device reaches are left out, too.

    Records of templates and libraries are tried as in the selection, the fastest first, until one is usable. If none
    is, all of their routes are stale.

    `lookup`: of this device, and of the database that `known` is from. `known`: of this device, failed ones included.
    """
    doubt = doubt_of(task, lookup.target)
    known = [record for record in known if doubt(record) is None]
    offered = [record for record in known if record.route in SIGNATURE_ROUTES]
    valid = [record for record in offered if record.status is Status.OK]
    ranked = sorted(valid, key=lambda record: record.latency_us or 0.0)
    judged = judge(ranked, lookup.environment, lambda: lookup.list_refuted(task))
    found = winner(judged, unusable=lambda record: unusable(task, record, lookup.target))
    stale = {record.decision for record in found.unusable}
    if stale:
        logger.info("task %s: %s", task.name, found.why)
    if stale and found.record is None:
        stale = {record.decision for record in offered}
    return [record for record in known if record.route not in SIGNATURE_ROUTES or record.decision not in stale]
