"""Decisions of the route `metaschedule`: traces as JSON, checked, replayed; the best ones, to start a search with."""

from __future__ import annotations

import json
import logging
import time

import tvm
import tvm_ffi
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import InstructionKind
from tvm.target import Target

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.metaschedule.texts import (
    REPLAY_ERRORS,
    US_PER_S,
    first_line,
    ir_from_json,
    plain_json,
    workload_hash,
)
from relaxtune.tuning_db.records import Environment, Route, TargetKey, TuningRecord, canonical_json
from relaxtune.tuning_db.store import TuningDatabase

# TVM turns an error of a Python callback into a RuntimeError, unless its class is registered under its name.
tvm_ffi.register_error(InvalidRecordError)

# Seconds that a trace may take to apply. Traces that a search finds take 0.01 to 0.1 s.
REPLAY_LIMIT_S = 10.0
# A search's traces have up to 70 instructions before its postprocessing. TVM reads a trace in time that grows with the
# cube of their number: 400 nested splits take 0.7 s, 1600 take 26 s.
INSTRUCTIONS_MAX = 500


def trace_to_json(trace: Trace) -> str:
    """Return a trace as JSON text: the decision of a record of the route `metaschedule`."""
    # `TuningRecord.as_json` would do both, and fails on a changed layout: it does not know the map of indices.
    return canonical_json(plain_json(trace.as_json()))


def replay_decision(mod: tvm.ir.IRModule, decision: str, *, limit_s: float = REPLAY_LIMIT_S) -> Schedule:
    """Return `mod` scheduled by a stored decision.

    Raises
    ------
    InvalidRecordError
        The decision is not a trace, does not fit this module, or takes longer than `limit_s` to apply.
    """
    record = rebuild_record(ms.database.Workload(mod), decision, run_secs=None, target=None)
    schedule = Schedule(mod)
    end = time.monotonic() + limit_s
    done = 0

    def in_time(_instruction: object, _inputs: object, _attributes: object, decided: object) -> object:
        # TVM calls this before each instruction. An instruction takes milliseconds, a hand-made trace has any number.
        nonlocal done
        if time.monotonic() > end:
            raise InvalidRecordError(
                f"A stored trace takes longer than {limit_s:g} s to apply: {done} of {len(record.trace.insts)} "
                "instructions are done. Remove its record with `relaxtune db delete ID`."
            )
        done += 1
        return decided

    try:
        record.trace.apply_to_schedule(schedule, remove_postproc=False, decision_provider=in_time)
    except REPLAY_ERRORS as e:
        raise _no_use(mod, e) from e
    return schedule


def rebuild_record(
    workload: ms.database.Workload, decision: str, *, run_secs: list[float] | None, target: Target | None
) -> ms.database.TuningRecord:
    """Return a record as MetaSchedule holds it, its trace parsed and not replayed.

    Raises
    ------
    InvalidRecordError
        The decision is not a trace of this TVM, or one of more than `INSTRUCTIONS_MAX` instructions.
    """
    try:
        trace = json.loads(decision)
        _require_short(trace)
        record = ms.database.TuningRecord.from_json([trace, run_secs, None, None], workload)
        args_info = ms.arg_info.ArgInfo.from_entry_func(workload.mod, remove_preproc=True)
    except REPLAY_ERRORS as e:
        raise _no_use(workload.mod, e) from e
    return ms.database.TuningRecord(record.trace, workload, run_secs, target, args_info)


def _no_use(mod: tvm.ir.IRModule, error: Exception) -> InvalidRecordError:
    return InvalidRecordError(
        f"TVM {tvm.__version__} cannot replay a stored trace on workload {workload_hash(mod)} ({first_line(error)}). "
        "The record is of no use here; tune the task again."
    )


def _require_short(trace: object) -> None:
    match trace:
        case [list() as instructions, _] if len(instructions) > INSTRUCTIONS_MAX:
            raise InvalidRecordError(
                f"A stored trace has {len(instructions)} instructions, expected at most {INSTRUCTIONS_MAX}: reading it "
                "would take minutes. Remove its record with `relaxtune db delete ID`."
            )


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
