"""The tuning database in the shape that MetaSchedule asks for, and the TVM forms of its texts.

The only module of `tuning_db` that imports TVM.

What is stored: a workload is the structural hash of its IRModule, as decimal text, with the module as JSON beside it;
a decision is the trace as JSON (`trace_to_json`). Both belong to one TVM version, which `tuning_db.lookup` enforces. A
hash has 64 bits, so a module found by it is compared structurally before it is believed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Sequence

import tvm
import tvm_ffi
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import InstructionKind
from tvm.target import Target

from tuning_db import errors
from tuning_db.errors import InvalidRecordError
from tuning_db.records import (
    Environment,
    Mode,
    RecordFilter,
    Route,
    Status,
    TargetKey,
    TuningRecord,
    Workload,
    canonical_json,
)
from tuning_db.store import TuningDatabase

_LOG = logging.getLogger(__name__)

#: MetaSchedule gives a failed candidate one latency of 1e10 seconds; nothing real takes a tenth of that.
FAILURE_S = 1e9
US_PER_S = 1e6
UNKNOWN_FAMILY = "unknown"
#: What replaying a trace that does not fit raises: ScheduleError and TVM's checks are RuntimeErrors, the rest comes
#: from texts that are not a trace.
REPLAY_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)


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


#: For modules that must not import TVM themselves.
IRModule = tvm.ir.IRModule


def tvm_version() -> str:
    """Return the version of the running TVM."""
    return str(tvm.__version__)


def workload_hash(mod: tvm.ir.IRModule) -> str:
    """Return the structural hash of a module as decimal text."""
    return str(tvm_ffi.structural_hash(mod))


def ir_to_json(mod: tvm.ir.IRModule) -> str:
    """Return a module as JSON text, which this TVM version reads back."""
    return str(tvm.ir.save_json(mod))


def ir_from_json(text: str) -> tvm.ir.IRModule:
    """Return the module of `ir_to_json`.

    Raises
    ------
    InvalidRecordError
        This TVM cannot read it.
    """
    try:
        mod = tvm.ir.load_json(text)
    except REPLAY_ERRORS as e:
        raise InvalidRecordError(
            f"TVM {tvm.__version__} cannot read the IR of a workload ({_first_line(e)}); the text begins {text[:80]!r}."
            " It was written by another TVM version or is damaged: record the workload again."
        ) from e
    if not isinstance(mod, tvm.ir.IRModule):
        raise InvalidRecordError(f"The IR of a workload is a {type(mod).__name__}, expected an IRModule.")
    return mod


def trace_to_json(trace: Trace) -> str:
    """Return a trace as JSON text: the decision of a record of the route `metaschedule`."""
    # Trace.as_json leaves TVM integers inside, which JSON does not know; the record's own form has plain ones.
    record = ms.database.TuningRecord(trace, ms.database.Workload(tvm.ir.IRModule({})))
    return canonical_json(record.as_json()[0])


def replay_decision(mod: tvm.ir.IRModule, decision: str) -> Schedule:
    """Return `mod` scheduled by a stored decision.

    Raises
    ------
    InvalidRecordError
        The decision is not a trace, or does not fit this module.
    """
    record = _rebuild(ms.database.Workload(mod), decision, run_secs=None, target=None)
    schedule = Schedule(mod)
    record.trace.apply_to_schedule(schedule, remove_postproc=False)
    return schedule


def check_trace(trace: object) -> None:
    """Accept a trace of MetaSchedule's JSON form; it is parsed, not replayed.

    Raises
    ------
    InvalidRecordError
        It is not a list of instructions and one of decisions, or names an instruction that this TVM does not know.
    """
    match trace:
        case [list() as instructions, list() as decisions]:
            pass
        case _:
            raise InvalidRecordError(f"A trace is [instructions, decisions], got {str(trace)[:60]!r}.")
    for instruction in instructions:
        match instruction:
            case [str() as name, list(), list(), list()]:
                _check_instruction(name)
            case _:
                raise InvalidRecordError(
                    f"An instruction is [name, inputs, attributes, outputs], got {str(instruction)[:60]!r}."
                )
    for decision in decisions:
        match decision:
            case [int() as place, _] if 0 <= place < len(instructions):
                pass
            case _:
                raise InvalidRecordError(f"A decision is [instruction, value], got {str(decision)[:60]!r}.")


def _check_instruction(name: str) -> None:
    try:
        InstructionKind.get(name)
    except REPLAY_ERRORS as e:
        raise InvalidRecordError(f"TVM {tvm.__version__} knows no instruction {name[:40]!r} in a trace.") from e


def stock_workload(mod: tvm.ir.IRModule) -> list[str]:
    """Return a module as stock MetaSchedule writes it: its hash, and its JSON in base64."""
    return [str(part) for part in ms.database.Workload(mod).as_json()]


def args_info_json(mod: tvm.ir.IRModule) -> list[object]:
    """Return the arguments of a module as stock MetaSchedule writes them."""
    infos = ms.arg_info.ArgInfo.from_entry_func(mod, remove_preproc=True)
    return [json.loads(canonical_json(_plain(info.as_json()))) for info in infos]


def target_to_json(target: TargetKey) -> dict[str, object]:
    """Return a target as stock MetaSchedule writes it, its architecture included.

    Raises
    ------
    InvalidRecordError
        TVM knows no such target.
    """
    attributes: dict[str, object] = json.loads(target.attributes)
    attributes.setdefault("arch" if target.kind == "cuda" else "mcpu", target.arch)
    try:
        return dict(json.loads(str(Target({"kind": target.kind, **attributes}))))
    except REPLAY_ERRORS as e:
        raise InvalidRecordError(
            f"TVM {tvm.__version__} knows no target {target.kind!r} with {target.attributes} ({_first_line(e)})."
        ) from e


def _plain(value: object) -> object:
    if isinstance(value, str | float | bool) or value is None:
        return value
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return int(value)  # type: ignore[call-overload]


def is_failure(run_secs: Sequence[float]) -> bool:
    """Return whether MetaSchedule's latencies say that the candidate failed."""
    return not run_secs or any(not math.isfinite(value) or value <= 0 or value >= FAILURE_S for value in run_secs)


def describe_unknown(mod: tvm.ir.IRModule) -> Workload:
    """Return a workload of which nothing but its IR is known; FLOPs and bytes are 0."""
    key = workload_hash(mod)
    names = sorted(str(var.name_hint) for var in mod.get_global_vars())
    signature = {"family": UNKNOWN_FAMILY, "workload_hash": key, "tvm_version": tvm.__version__}
    return Workload(
        workload_hash=key,
        family=UNKNOWN_FAMILY,
        signature=canonical_json(signature),
        name=names[0] if names else UNKNOWN_FAMILY,
        flops=0.0,
        bytes=0.0,
        ir_json=ir_to_json(mod),
        tvm_version=tvm.__version__,
    )


def _rebuild(
    workload: ms.database.Workload,
    decision: str,
    *,
    run_secs: list[float] | None,
    target: Target | None,
) -> ms.database.TuningRecord:
    try:
        record = ms.database.TuningRecord.from_json([json.loads(decision), run_secs, None, None], workload)
        args_info = ms.arg_info.ArgInfo.from_entry_func(workload.mod, remove_preproc=True)
    except REPLAY_ERRORS as e:
        raise InvalidRecordError(
            f"TVM {tvm.__version__} cannot replay a stored trace on workload {workload_hash(workload.mod)} "
            f"({_first_line(e)}). The record is of no use here; tune the task again."
        ) from e
    return ms.database.TuningRecord(record.trace, workload, run_secs, target, args_info)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"


@derived_object
class MetaScheduleAdapter(ms.database.PyDatabase):  # type: ignore[misc]
    """A `TuningDatabase` as the database of a MetaSchedule run.

    Reads obey `tuning_db.lookup` for one target and environment; MetaSchedule itself ignores the target.

    Writes: with `commit_records` (the default) every record that MetaSchedule commits is kept, a failed one as
    `run_error` without a reason, since MetaSchedule does not pass the reason on. A caller that records candidates
    itself through `TuningDatabase.record_measurements`, with the error texts, sets `commit_records=False`: then the
    adapter writes workloads only, and nothing is recorded twice. Reads see the caller's records at once. A database
    opened read-only is read, and commits are dropped.

    A stored trace that this TVM cannot replay is skipped and counted in `skipped_traces`.

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
        self._target = target
        self._environment = environment
        self._tvm_target = tvm_target
        self._job_id = job_id
        self._seed = seed
        self._commit_records = commit_records
        self._describe = describe or describe_unknown
        self._workloads: dict[str, ms.database.Workload] = {}
        self._signature_keys: dict[str, str] = {}
        self._replayed: dict[int | None, ms.database.TuningRecord | None] = {}

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
                decision=canonical_json(record.as_json()[0]),
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
        if not self.has_workload(workload.mod):
            return []
        wanted = int(top_k)
        asked = wanted
        while True:
            found = self._database.list_top(
                workload_hash=key,
                signature_key=None,
                target=self._target,
                environment=self._environment,
                route=Route.METASCHEDULE,
                k=asked,
            )
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
        if not self._database.has_workload(key, self._environment.tvm_version):
            return None
        stored = self._database.get_workload(key, self._environment.tvm_version)
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
        if value.id not in self._replayed:
            run_secs = [latency / US_PER_S for latency in value.latencies_us]
            try:
                record = _rebuild(workload, value.decision, run_secs=run_secs, target=self._tvm_target)
            except InvalidRecordError as e:
                _LOG.warning("record %d of %s is skipped: %s", value.id, self._database.url, e)
                record = None
            self._replayed[value.id] = record
        return self._replayed[value.id]
