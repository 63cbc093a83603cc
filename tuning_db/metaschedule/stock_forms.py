"""The forms that stock MetaSchedule writes into its JSON files: workloads, targets, arguments, failures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.metaschedule.texts import REPLAY_ERRORS, first_line, plain_json
from relaxtune.tuning_db.records import TargetKey, canonical_json

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
