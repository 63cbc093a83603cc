"""The best records of a module as MetaSchedule holds them: what a search starts with."""

from __future__ import annotations

import logging

import tvm
import tvm_ffi
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.metaschedule.stock_forms import US_PER_S
from relaxtune.tuning_db.metaschedule.texts import ir_from_json, workload_hash
from relaxtune.tuning_db.metaschedule.traces import rebuild_record
from relaxtune.tuning_db.records import Environment, Route, TargetKey, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase

_LOG = logging.getLogger(__name__)


def top_records(
    database: TuningDatabase,
    mod: tvm.ir.IRModule,
    target: TargetKey,
    environment: Environment,
    k: int,
    *,
    tvm_target: Target | None = None,
) -> list[ms.database.TuningRecord]:
    """Return up to `k` valid records of a module whose traces this TVM can read, the best first.

    Reads obey `tuning_db.lookup` for one target and environment. A trace that cannot be read is skipped and logged.
    `tvm_target` is given to the records.

    Raises
    ------
    InvalidRecordError
        The stored IR of the workload cannot be read.
    """
    workload = ms.database.Workload(mod)
    question = Question(workload_hash(mod), None, target, environment, Route.METASCHEDULE)
    # A module is compared with the stored one only where something is known of its hash.
    if not database.list_top(question, k=1) or not _is_stored(database, mod, environment):
        return []
    asked = k
    while True:
        found = database.list_top(question, k=asked)
        rebuilt = (_rebuild(database, value, workload, tvm_target) for value in found)
        usable = [record for record in rebuilt if record is not None]
        if len(usable) >= k or len(found) < asked:
            return usable[:k]
        asked *= 2


def _is_stored(database: TuningDatabase, mod: tvm.ir.IRModule, environment: Environment) -> bool:
    stored = database.find_workload(workload_hash(mod), environment.tvm_version)
    if stored is None:
        return False
    return stored.ir_json is None or bool(tvm_ffi.structural_equal(ir_from_json(stored.ir_json), mod))


def _rebuild(
    database: TuningDatabase, value: TuningRecord, workload: ms.database.Workload, target: Target | None
) -> ms.database.TuningRecord | None:
    run_secs = [latency / US_PER_S for latency in value.latencies_us]
    try:
        return rebuild_record(workload, value.decision, run_secs=run_secs, target=target)
    except InvalidRecordError as e:
        _LOG.warning("record %d of %s is skipped: %s", value.id, value.layer or database.url, e)
        return None
