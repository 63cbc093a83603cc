"""Finds stale records: their decision makes another kernel today than the one that was measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from relaxtune.pipeline.choose.candidates import CandidateLookup, doubt_of, unusable
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.lookup import SIGNATURE_ROUTES
from relaxtune.tuning_db.records import Environment, Status, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.winner import judge, winner

logger = logging.getLogger(__name__)


def still_true_in(
    database: TuningDatabase, target: ResolvedTarget, environment: Environment
) -> Callable[[TuningTask, Sequence[TuningRecord]], list[TuningRecord]]:
    """Return what `tune` leaves stale records out with, for the database, target and environment that it is given."""
    return partial(without_stale, CandidateLookup(database, target, environment))


def without_stale(lookup: CandidateLookup, task: TuningTask, known: Sequence[TuningRecord]) -> list[TuningRecord]:
    """Return a task's records less those of fallbacks, templates and libraries that selection would pass over.

    Records of latencies that no device reaches are left out, too.

    Those of templates and libraries are tried as selection tries them, the fastest first, until one holds; when none
    of those holds, all of their routes are stale.

    Parameters
    ----------
    lookup : CandidateLookup
        Of this device, and of the database that `known` is from.
    known : sequence of TuningRecord
        Of this device, failed ones included.
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
