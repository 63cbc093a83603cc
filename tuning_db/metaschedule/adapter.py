"""The tuning database in the shape that MetaSchedule asks for."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import tvm
import tvm_ffi
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from relaxtune.tuning_db import errors
from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.lookup_cache import LookupCache
from relaxtune.tuning_db.metaschedule.stock_forms import US_PER_S, is_failure
from relaxtune.tuning_db.metaschedule.texts import describe_unknown, ir_from_json, ir_to_json, workload_hash
from relaxtune.tuning_db.metaschedule.traces import rebuild_record, trace_to_json
from relaxtune.tuning_db.records import (
    Environment,
    Mode,
    RecordFilter,
    Route,
    Status,
    TargetKey,
    TuningRecord,
    Workload,
)
from relaxtune.tuning_db.store import TuningDatabase

_LOG = logging.getLogger(__name__)

# TVM turns an error of a Python callback into a RuntimeError, unless its class is registered under its name.
for _error in (
    errors.TuningDatabaseError,
    errors.DatabaseUrlError,
    errors.DatabaseOpenError,
    errors.SchemaVersionError,
    errors.DatabaseBusyError,
    errors.DatabaseWriteError,
    errors.InvalidRecordError,
    errors.NotFoundError,
    errors.ExchangeError,
):
    tvm_ffi.register_error(_error)


@derived_object
class MetaScheduleAdapter(ms.database.PyDatabase):  # type: ignore[misc]
    """A `TuningDatabase` as the database of a MetaSchedule run.

    Reads obey `tuning_db.lookup` for one target and environment; MetaSchedule itself ignores the target.

    Writes: with `commit_records` (the default) every record that MetaSchedule commits is kept, a failed one as
    `run_error` without a reason, since MetaSchedule does not pass the reason on. A caller that records candidates
    itself through `TuningDatabase.record_measurements`, with the error texts, sets `commit_records=False`: then the
    adapter writes workloads only, and nothing is recorded twice. Reads see the caller's records at once. A database
    opened read-only is read, and commits are dropped.

    A stored trace that this TVM cannot replay is skipped and counted in `skipped_traces`. Look-ups are answered from
    memory until this process writes (`tuning_db.lookup_cache`).

    Parameters
    ----------
    database : TuningDatabase
        Where records are; the adapter does not close it.
    target : TargetKey
        What is compiled for.
    environment : Environment
        The machine that measures; its TVM version has to be the running one.
    tvm_target : tvm.target.Target or None
        Given to the records that MetaSchedule reads.
    job_id : str or None
        The job of the records written.
    seed : int or None
        The seed noted in the records written.
    commit_records : bool
        Whether `commit_tuning_record` writes.
    describe : callable or None
        Returns the `Workload` of a module that is not in the database yet; by default one of the family `unknown`.
        Workloads recorded beforehand keep their description.

    Raises
    ------
    InvalidRecordError
        The environment names another TVM version than the running one.
    """

    def __init__(
        self,
        database: TuningDatabase,
        target: TargetKey,
        environment: Environment,
        *,
        tvm_target: Target | None = None,
        job_id: str | None = None,
        seed: int | None = None,
        commit_records: bool = True,
        describe: Callable[[tvm.ir.IRModule], Workload] | None = None,
    ) -> None:
        """Hold the database; nothing is read."""
        super().__init__()
        if environment.tvm_version != tvm.__version__:
            raise InvalidRecordError(
                f"The environment says TVM {environment.tvm_version}, running is {tvm.__version__}: its traces would "
                "be stamped wrong. Detect the environment in the process that tunes."
            )
        self._database = database
        self._lookups = LookupCache(database)
        self._target = target
        self._environment = environment
        self._tvm_target = tvm_target
        self._job_id = job_id
        self._seed = seed
        self._commit_records = commit_records
        self._describe = describe or describe_unknown
        self._workloads: dict[str, ms.database.Workload] = {}
        self._signature_keys: dict[str, str] = {}
        # An id belongs to one layer.
        self._replayed: dict[tuple[str | None, int | None], ms.database.TuningRecord | None] = {}

    @property
    def skipped_traces(self) -> int:
        """How many stored records could not be replayed so far."""
        return sum(record is None for record in self._replayed.values())

    def has_workload(self, mod: tvm.ir.IRModule) -> bool:
        """Return whether this very module is known."""
        key = workload_hash(mod)
        return key in self._workloads or self._stored(key, mod) is not None

    def commit_workload(self, mod: tvm.ir.IRModule) -> ms.database.Workload:
        """Return the workload of a module, recorded if it was not."""
        key = workload_hash(mod)
        if key not in self._workloads:
            if self._database.mode is not Mode.READ_ONLY:
                self._record_workload(key, mod)
            self._workloads[key] = ms.database.Workload(mod)
        return self._workloads[key]

    def commit_tuning_record(self, record: ms.database.TuningRecord) -> None:
        """Keep a record, unless the caller does it (`commit_records=False`)."""
        if not self._commit_records or self._database.mode is Mode.READ_ONLY:
            return
        run_secs = [float(value) for value in record.run_secs or ()]
        failed = is_failure(run_secs)
        key = workload_hash(record.workload.mod)
        self.commit_workload(record.workload.mod)
        if key not in self._signature_keys:
            workload = self._database.get_workload(key, self._environment.tvm_version)
            self._signature_keys[key] = workload.signature_key
        self._database.record_measurement(
            TuningRecord(
                workload_hash=key,
                signature_key=self._signature_keys[key],
                target=self._target,
                environment=self._environment,
                route=Route.METASCHEDULE,
                decision=trace_to_json(record.trace),
                status=Status.RUN_ERROR if failed else Status.OK,
                latencies_us=() if failed else tuple(value * US_PER_S for value in run_secs),
                error="MetaSchedule reported a failed build or run and gave no reason" if failed else None,
                seed=self._seed,
                job_id=self._job_id,
            )
        )

    def get_top_k(self, workload: ms.database.Workload, top_k: int) -> list[ms.database.TuningRecord]:
        """Return up to `top_k` valid records that replay, the best first."""
        key = workload_hash(workload.mod)
        wanted = int(top_k)
        asked = wanted
        while True:
            found = self._lookups.list_top(
                Question(
                    workload_hash=key,
                    signature_key=None,
                    target=self._target,
                    environment=self._environment,
                    route=Route.METASCHEDULE,
                ),
                k=asked,
            )
            # A module is compared with the stored one only where something is known of its hash.
            if not found or not self.has_workload(workload.mod):
                return []
            usable = [record for record in (self._replay(value, workload) for value in found) if record is not None]
            if len(usable) >= wanted or len(found) < asked:
                return usable[:wanted]
            asked += wanted - len(usable)

    def get_all_tuning_records(self) -> list[ms.database.TuningRecord]:
        """Return all valid records of this target and TVM version that replay, in the order they were written."""
        found: list[ms.database.TuningRecord] = []
        for value in self._database.list_records(self._own_records()):
            workload = self._workload_of(value.workload_hash)
            record = None if workload is None else self._replay(value, workload)
            if record is not None:
                found.append(record)
        return found

    def __len__(self) -> int:
        """Return how many valid records of this target and TVM version there are."""
        return self._database.count_records(self._own_records())

    def _own_records(self) -> RecordFilter:
        return RecordFilter(
            route=Route.METASCHEDULE,
            status=Status.OK,
            target_kind=self._target.kind,
            arch=self._target.arch,
            tvm_version=self._environment.tvm_version,
        )

    def _stored(self, key: str, mod: tvm.ir.IRModule) -> Workload | None:
        stored = self._database.find_workload(key, self._environment.tvm_version)
        if stored is None:
            return None
        if stored.ir_json is not None and not tvm_ffi.structural_equal(ir_from_json(stored.ir_json), mod):
            return None
        return stored

    def _record_workload(self, key: str, mod: tvm.ir.IRModule) -> None:
        stored = self._stored(key, mod)
        if stored is not None:
            if stored.ir_json is None:
                self._database.record_workload(dataclasses.replace(stored, ir_json=ir_to_json(mod)))
            return
        if self._database.has_workload(key, self._environment.tvm_version):
            raise InvalidRecordError(
                f"Another module with the structural hash {key} is in {self._database.url}: expected equal modules for "
                "equal hashes. Tune this task with a database of its own."
            )
        self._database.record_workload(self._describe(mod))

    def _workload_of(self, key: str) -> ms.database.Workload | None:
        if key not in self._workloads:
            text = self._database.get_workload(key, self._environment.tvm_version).ir_json
            if text is None:
                return None
            self._workloads[key] = ms.database.Workload(ir_from_json(text))
        return self._workloads[key]

    def _replay(self, value: TuningRecord, workload: ms.database.Workload) -> ms.database.TuningRecord | None:
        place = value.layer, value.id
        if place not in self._replayed:
            run_secs = [latency / US_PER_S for latency in value.latencies_us]
            try:
                record = rebuild_record(workload, value.decision, run_secs=run_secs, target=self._tvm_target)
            except InvalidRecordError as e:
                _LOG.warning("record %d of %s is skipped: %s", value.id, value.layer or self._database.url, e)
                record = None
            self._replayed[place] = record
        return self._replayed[place]
