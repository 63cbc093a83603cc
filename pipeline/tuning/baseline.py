"""The start of a task: a reference to compare with, and the fallback schedule's latency as "before"."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm.s_tir import meta_schedule as ms

from pipeline.codegen.finish import finish_kernels
from pipeline.errors import LoweringError
from pipeline.tolerances import kernel_tolerance
from pipeline.tuning.evaluate import Evaluator, Job, Outcome
from pipeline.tuning.failure import read_failure
from pipeline.tuning.kernel_ir import written_params
from pipeline.tuning.note import CandidateNote
from pipeline.tuning.state import TaskState
from schedules.errors import ScheduleError
from schedules.fallback import apply_fallback, fallback_rule_names
from schedules.targets import ResolvedTarget
from tuning_db.records import Status, canonical_json

logger = logging.getLogger(__name__)

# An unscheduled PrimFunc runs at about 0.3 GFLOP/s; beyond this the reference has the CPU's fallback schedule, which
# shares nothing with MetaSchedule's.
_PLAIN_FLOPS_MAX = 1e8


@dataclass(frozen=True)
class Fallback:
    """The fallback schedule of a task, to be measured like a candidate."""

    state: TaskState
    decision: str
    job: Job


TakeFailure = Callable[[TaskState, str, Outcome], None]


def prepare_references(
    states: Sequence[TaskState], evaluator: Evaluator, target: ResolvedTarget, take: TakeFailure
) -> None:
    """Give every task its reference; one that cannot have any is skipped.

    Parameters
    ----------
    take : callable
        Told task, decision and outcome of a fallback that was to be the reference and does not build.
    """
    host = target.target.host if target.target.host is not None else target.target
    mods = [_reference_mod(state, host) for state in states]
    built = evaluator.build(mods, host)
    for state, result in zip(states, built, strict=True):
        state.note = _note(state, None if result.error_msg is not None else str(result.artifact_path))
        if result.error_msg is not None:
            logger.warning("task %s has no reference on the CPU: %s", state.task.name, result.error_msg)
    missing = [state for state in states if state.note and state.note.reference is None]
    _references_on_device(missing, evaluator, target, take)


def list_fallbacks(states: Sequence[TaskState], target: ResolvedTarget) -> list[Fallback]:
    """Return the fallbacks to measure: of tasks with a reference, whose `before_us` is not known yet."""
    found = []
    for state in states:
        if state.before_us is not None or state.note is None or state.note.reference is None:
            continue
        scheduled = _fallback(state, target)
        if scheduled is not None:
            args_info = ms.arg_info.ArgInfo.from_entry_func(state.task.mod, False)
            found.append(Fallback(state, scheduled[1], Job(scheduled[0], args_info, state.note)))
    return found


def _reference_mod(state: TaskState, host: tvm.target.Target) -> tvm.ir.IRModule:
    if state.task.flops <= _PLAIN_FLOPS_MAX:
        return state.task.mod
    try:
        return apply_fallback(state.task.mod, host)
    except ScheduleError as e:
        logger.warning("the reference of task %s is unscheduled: %s", state.task.name, e)
        return state.task.mod


def _note(state: TaskState, reference: str | None, *, on_device: bool = False) -> CandidateNote:
    func = state.task.mod["main"]
    accepted = kernel_tolerance(func)
    return CandidateNote(
        workload=state.task.workload_hash,
        index_ranges={str(position): bound for position, bound in state.task.index_ranges.items()},
        outputs=written_params(func),
        reference=reference,
        reference_on_device=on_device,
        rtol=accepted.rtol,
        atol=accepted.atol,
        accumulated=accepted.accumulated,
    )


def _references_on_device(
    states: Sequence[TaskState],
    evaluator: Evaluator,
    target: ResolvedTarget,
    take: TakeFailure,
) -> None:
    """Take the device's fallback as the reference of tasks that the host cannot compute, such as some 8-bit floats.

    A fallback that does not build either is told as failed, and its task is skipped.
    """
    scheduled = [(state, *found) for state in states if (found := _fallback(state, target)) is not None]
    results = evaluator.build([mod for _, mod, _ in scheduled], target.target) if scheduled else []
    for (state, _, decision), result in zip(scheduled, results, strict=True):
        if result.error_msg is None:
            state.note = _note(state, str(result.artifact_path), on_device=True)
        else:
            status, reason = read_failure(str(result.error_msg), Status.BUILD_ERROR)
            take(state, decision, Outcome(status, error=reason))
    for state in states:
        if state.note is None or state.note.reference is None:
            state.skipped = "no reference could be built to check its candidates with"


def _fallback(state: TaskState, target: ResolvedTarget) -> tuple[tvm.ir.IRModule, str] | None:
    try:
        names = fallback_rule_names(state.task.mod, target.target)
        scheduled = apply_fallback(state.task.mod, target.target)
        # As `compile_module` does it: what is measured is what an artifact gets.
        finished = finish_kernels(scheduled, target.target)
        return finished, canonical_json({"rule": names["main"]})
    except (ScheduleError, LoweringError) as e:
        logger.warning("task %s has no fallback schedule: %s", state.task.name, e)
        state.last_error = str(e)
        return None
