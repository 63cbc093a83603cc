"""Between the tuning database and TVM: the texts it stores, and records as MetaSchedule holds them.

The only part of `tuning_db` that imports TVM.

What is stored: a workload is the structural hash of its IRModule, as decimal text, with the module as JSON beside it;
a decision is the trace as JSON (`trace_to_json`). Both belong to one TVM version, which `tuning_db.lookup` enforces. A
hash has 64 bits, so a module found by it is compared structurally before it is believed.
"""

from relaxtune.tuning_db.metaschedule.texts import (
    REPLAY_ERRORS,
    UNKNOWN_FAMILY,
    US_PER_S,
    IRModule,
    args_info_json,
    describe_unknown,
    ir_from_json,
    ir_to_json,
    is_failure,
    stock_workload,
    target_to_json,
    tvm_version,
    workload_hash,
)
from relaxtune.tuning_db.metaschedule.traces import check_trace, replay_decision, top_records, trace_to_json

__all__ = [
    "REPLAY_ERRORS",
    "UNKNOWN_FAMILY",
    "US_PER_S",
    "IRModule",
    "args_info_json",
    "check_trace",
    "describe_unknown",
    "ir_from_json",
    "ir_to_json",
    "is_failure",
    "replay_decision",
    "stock_workload",
    "target_to_json",
    "top_records",
    "trace_to_json",
    "tvm_version",
    "workload_hash",
]
