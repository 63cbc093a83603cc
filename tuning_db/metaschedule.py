"""Between the tuning database and TVM: the texts it stores, and records as MetaSchedule holds them.

The only part of `tuning_db` that imports TVM.

Stored values: a workload is the structural hash of its IRModule, as decimal text, with the module as JSON;
a decision is the trace as JSON (`trace_to_json`). Both belong to one TVM version, which `tuning_db.lookup` enforces. A
hash has 64 bits, so a module found by it is compared structurally before it is believed.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence

import tvm
import tvm_ffi
from tvm.s_tir import Schedule, Trace, meta_schedule as ms
from tvm.s_tir.schedule import InstructionKind
from tvm.target import Target

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import Environment, Route, TargetKey, TuningRecord, Workload, canonical_json
from relaxtune.tuning_db.store import TuningDatabase

_LOG = logging.getLogger(__name__)

UNKNOWN_FAMILY = "unknown"
#: What TVM raises for a text that does not fit: ScheduleError and its checks are RuntimeErrors, the rest comes from
#: texts that are no trace or no module at all.
REPLAY_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)

# TVM turns an error of a Python callback into a RuntimeError, unless its class is registered under its name.
tvm_ffi.register_error(InvalidRecordError)

# Seconds that a trace may take to apply. Traces that a search finds take 0.01 to 0.1 s.
REPLAY_LIMIT_S = 10.0
# A search's traces have up to 70 instructions before its postprocessing. TVM reads a trace in time that grows with the
# cube of their number: 400 nested splits take 0.7 s, 1600 take 26 s.
INSTRUCTIONS_MAX = 500

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

    Raises `InvalidRecordError`: this TVM cannot read it.
    """
    try:
        mod = tvm.ir.load_json(text)
    except REPLAY_ERRORS as e:
        raise InvalidRecordError(
            f"TVM {tvm.__version__} cannot read the IR of a workload ({first_line(e)}); the text begins {text[:80]!r}."
            " It was written by another TVM version or is damaged: record the workload again."
        ) from e
    if not isinstance(mod, tvm.ir.IRModule):
        raise InvalidRecordError(f"The IR of a workload is a {type(mod).__name__}, expected an IRModule.")
    return mod


def plain_json(value: object) -> object:
    """Return a value of TVM's JSON forms without TVM's own integers, floats and containers."""
    if isinstance(value, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return value.value
    if isinstance(value, str | float | int) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain_json(item) for item in value]
    raise InvalidRecordError(f"TVM {tvm.__version__} wrote a {type(value).__name__}, expected what JSON can hold.")


def describe_unknown(mod: tvm.ir.IRModule) -> Workload:
    """Return the workload of a module without a description, made from its IR; FLOPs and bytes are 0."""
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


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"


#: MetaSchedule gives a failed candidate one latency of 1e10 seconds; nothing real takes a tenth of that.
FAILURE_S = 1e9
US_PER_S = 1e6


def stock_workload(mod: tvm.ir.IRModule) -> list[str]:
    """Return a module as stock MetaSchedule writes it: its hash, and its JSON in base64."""
    return [str(part) for part in ms.database.Workload(mod).as_json()]


def args_info_json(mod: tvm.ir.IRModule) -> list[object]:
    """Return the arguments of a module as stock MetaSchedule writes them."""
    infos = ms.arg_info.ArgInfo.from_entry_func(mod, remove_preproc=True)
    return [json.loads(canonical_json(plain_json(info.as_json()))) for info in infos]


def target_to_json(target: TargetKey) -> dict[str, object]:
    """Return a target as stock MetaSchedule writes it, its architecture included.

    Raises `InvalidRecordError`: TVM knows no such target.
    """
    attributes: dict[str, object] = json.loads(target.attributes)
    attributes.setdefault("arch" if target.kind == "cuda" else "mcpu", target.arch)
    try:
        return dict(json.loads(str(Target({"kind": target.kind, **attributes}))))
    except REPLAY_ERRORS as e:
        raise InvalidRecordError(
            f"TVM {tvm.__version__} knows no target {target.kind!r} with {target.attributes} ({first_line(e)})."
        ) from e


def is_failure(run_secs: Sequence[float]) -> bool:
    """Return whether MetaSchedule's latencies say that the candidate failed."""
    return not run_secs or any(not math.isfinite(value) or value <= 0 or value >= FAILURE_S for value in run_secs)


def trace_to_json(trace: Trace) -> str:
    """Return a trace as JSON text: the decision of a record of the route `metaschedule`."""
    # `TuningRecord.as_json` would do both, and fails on a changed layout: it does not know the map of indices.
    return canonical_json(plain_json(trace.as_json()))


def replay_decision(mod: tvm.ir.IRModule, decision: str, *, limit_s: float = REPLAY_LIMIT_S) -> Schedule:
    """Return `mod` scheduled by a stored decision.

    Raises `InvalidRecordError`: the decision is not a trace, does not fit this module, or takes longer than `limit_s`
    to apply.
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

    Raises `InvalidRecordError`: the decision is not a trace of this TVM, or one of more than `INSTRUCTIONS_MAX`
    instructions.
    """
    try:
        trace = json.loads(decision)
        match trace:
            case [list() as instructions, _] if len(instructions) > INSTRUCTIONS_MAX:
                raise InvalidRecordError(
                    f"A stored trace has {len(instructions)} instructions, expected at most {INSTRUCTIONS_MAX}: "
                    "reading it would take minutes. Remove its record with `relaxtune db delete ID`."
                )
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


def check_trace(trace: object) -> None:
    """Accept a trace of MetaSchedule's JSON form; it is parsed, not replayed.

    Raises `InvalidRecordError`: it is not a list of instructions and one of decisions, or names an instruction that
    this TVM does not know.
    """
    match trace:
        case [list() as instructions, list() as decisions]:
            pass
        case _:
            raise InvalidRecordError(f"A trace is [instructions, decisions], got {str(trace)[:60]!r}.")
    for instruction in instructions:
        match instruction:
            case [str() as name, list(), list(), list()]:
                try:
                    InstructionKind.get(name)
                except REPLAY_ERRORS as e:
                    raise InvalidRecordError(
                        f"TVM {tvm.__version__} knows no instruction {name[:40]!r} in a trace."
                    ) from e
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

    Raises `InvalidRecordError`: the stored IR of the workload cannot be read.
    """
    workload = ms.database.Workload(mod)
    question = Question(workload_hash(mod), None, target, environment, Route.METASCHEDULE)
    # A module is compared with the stored one only where something is known of its hash.
    if not database.list_top(question, k=1):
        return []
    stored = database.find_workload(workload_hash(mod), environment.tvm_version)
    if stored is None or (stored.ir_json and not tvm_ffi.structural_equal(ir_from_json(stored.ir_json), mod)):
        return []
    wanted = k
    while True:
        found = database.list_top(question, k=wanted)
        rebuilt = (_rebuild(database, value, workload, tvm_target) for value in found)
        usable = [record for record in rebuilt if record is not None]
        if len(usable) >= k or len(found) < wanted:
            return usable[:k]
        wanted *= 2


def _rebuild(
    database: TuningDatabase, value: TuningRecord, workload: ms.database.Workload, target: Target | None
) -> ms.database.TuningRecord | None:
    run_secs = [latency / US_PER_S for latency in value.latencies_us]
    try:
        return rebuild_record(workload, value.decision, run_secs=run_secs, target=target)
    except InvalidRecordError as e:
        _LOG.warning("record %d of %s is skipped: %s", value.id, value.layer or database.url, e)
        return None
