"""Decisions of the route `metaschedule`: traces as JSON, checked, and replayed on a module."""

from __future__ import annotations

import json
import time

import tvm
import tvm_ffi
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import InstructionKind
from tvm.target import Target

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.metaschedule.texts import REPLAY_ERRORS, first_line, plain_json, workload_hash
from relaxtune.tuning_db.records import canonical_json

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
    workload: ms.database.Workload,
    decision: str,
    *,
    run_secs: list[float] | None,
    target: Target | None,
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
