"""Workloads as texts: structural hash, IR as JSON, the workload of a module, and the forms of stock MetaSchedule."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import tvm
import tvm_ffi
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.records import TargetKey, Workload, canonical_json

UNKNOWN_FAMILY = "unknown"
#: What TVM raises for a text that does not fit: ScheduleError and its checks are RuntimeErrors, the rest comes from
#: texts that are no trace or no module at all.
REPLAY_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)

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
            f"TVM {tvm.__version__} knows no target {target.kind!r} with {target.attributes} ({first_line(e)})."
        ) from e


def is_failure(run_secs: Sequence[float]) -> bool:
    """Return whether MetaSchedule's latencies say that the candidate failed."""
    return not run_secs or any(not math.isfinite(value) or value <= 0 or value >= FAILURE_S for value in run_secs)
