"""Makes the kernel of a record again, if it is still the kernel that was measured."""

from __future__ import annotations

from tvm import tirx

from relaxtune.pipeline.codegen.kernel_hash import is_kernel, made_hash
from relaxtune.pipeline.codegen.tvm_errors import TVM_ERRORS
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.errors import ScheduleError
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.marks import as_scheduled
from relaxtune.schedules.registry import apply_decision
from relaxtune.schedules.search.tensor_intrinsics import register_intrinsics
from relaxtune.schedules.search.tensor_tile import has_tensor_tiles
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.errors import TuningDatabaseError
from relaxtune.tuning_db.metaschedule import replay_decision
from relaxtune.tuning_db.records import Route, TuningRecord


def replay_record(task: TuningTask, record: TuningRecord, target: ResolvedTarget) -> tirx.PrimFunc:
    """Return the task's PrimFunc scheduled as a record says, postprocessing included.

    Raises `LoweringError`: the decision does not fit the task, or makes another kernel by now than the one that was
    measured.
    """
    if has_tensor_tiles(target.target):
        register_intrinsics()
    try:
        match record.route:
            case Route.METASCHEDULE:
                with target.target:
                    scheduled = replay_decision(task.mod, record.decision).mod["main"]
            case Route.TEMPLATE | Route.LIBRARY:
                scheduled = apply_decision(task.mod["main"], target, record.decision)
            case Route.FALLBACK:
                scheduled = apply_fallback(task.mod, target.target)["main"]
    except (TuningDatabaseError, ScheduleError, *TVM_ERRORS) as e:
        raise LoweringError(f"record {record.id} of task {task.name} cannot be replayed: {last_line(e)}") from e
    if record.kernel_hash is None and record.route is not Route.METASCHEDULE:
        # A trace is the whole schedule. Other decisions are parameters of code that may have changed.
        raise LoweringError(f"record {record.id} of task {task.name} does not say which kernel was measured")
    if record.kernel_hash is not None and not is_kernel(record.kernel_hash, scheduled, target.target):
        raise LoweringError(
            f"record {record.id} of task {task.name} is of kernel {record.kernel_hash}, its decision makes "
            f"{made_hash(scheduled, target.target)} by now: the code that makes it has changed. Measure the task again "
            "(`relaxtune tune`)"
        )
    return as_scheduled(scheduled)
