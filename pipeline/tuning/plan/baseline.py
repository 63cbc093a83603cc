"""The start of a task: a reference to compare with, and the fallback schedule's latency as "before"."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import tvm
from tvm import tirx
from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.tuning.local.evaluate import Evaluator, Job, Outcome
from relaxtune.pipeline.tuning.measure.failure import read_failure
from relaxtune.pipeline.tuning.measure.notes import CandidateNote
from relaxtune.pipeline.tuning.plan.state import FallbackSchedule, TaskState
from relaxtune.pipeline.validate.tolerances import KernelTolerance, kernel_tolerance
from relaxtune.schedules.errors import Refusal, ScheduleError
from relaxtune.schedules.fallback import apply_fallback, fallback_with_rules
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.tir.blocks import written_params
from relaxtune.schedules.tir.dependent_arguments import column_sums_of_weights, padding_masks, partial_sums_of_rows
from relaxtune.schedules.tir.epilogue import recognise_matmul
from relaxtune.schedules.tir.row_norm import COUNT
from relaxtune.tuning_db.records import Status, canonical_json

logger = logging.getLogger(__name__)

# What has more arithmetic is computed on the GPU: GPT-2's logits for 8 x 512 tokens take a CPU with 16 cores seconds.
_HOST_FLOPS_MAX = 2e9
# An unscheduled PrimFunc runs at about 0.3 GFLOP/s; beyond this the reference has the CPU's fallback schedule, which
# shares nothing with MetaSchedule's.
_PLAIN_FLOPS_MAX = 1e8


@dataclass(frozen=True)
class Fallback:
    """The fallback schedule of a task, to be measured like a candidate."""

    decision: str
    job: Job


def reference_mods(states: Sequence[TaskState], target: ResolvedTarget) -> list[tvm.ir.IRModule]:
    """Return what each task's candidates are compared with: modules for the host."""
    host = host_target(target)
    return [_reference_mod(state, host) for state in states]


def host_target(target: ResolvedTarget) -> tvm.target.Target:
    """Return the CPU that references are computed on."""
    return target.target.host if target.target.host is not None else target.target


def device_reference_mod(state: TaskState, target: ResolvedTarget) -> tvm.ir.IRModule | None:
    """Return what computes a large task's reference on the GPU: its default schedule; None leaves it to the host."""
    if target.kind != "cuda" or state.task.flops <= _HOST_FLOPS_MAX:
        return None
    scheduled = _fallback(state, target)
    return None if scheduled is None else scheduled.mod


def take_reference(
    state: TaskState, artifact: str | None, failure: Outcome | None, on_device: str | None = None
) -> None:
    """Give a task its reference, or a note without one when it did not build for the host.

    Parameters
    ----------
    artifact : str or None
        The host's.
    on_device : str or None
        The device's, where it makes it; the host's is for appeals then.
    """
    state.note = _note(state, artifact)
    if on_device is not None:
        state.note = _note(state, on_device, on_device=True, host_reference=artifact)
    if failure is not None:
        told = f"{failure.status.value}: {failure.error}"
        logger.warning("task %s has no reference on the CPU: %s", state.task.name, told)


def make_fallback(state: TaskState, target: ResolvedTarget) -> Fallback | None:
    """Return a task's fallback, to be measured; None when its latency is known or there is no such schedule."""
    if state.before_us is not None or state.note is None or state.note.reference is None:
        return None
    scheduled = _fallback(state, target)
    if scheduled is None:
        return None
    args_info = ms.arg_info.ArgInfo.from_entry_func(state.task.mod, False)
    return Fallback(scheduled.decision, Job(scheduled.mod, args_info, state.note))


def reference_on_device(state: TaskState, evaluator: Evaluator, target: ResolvedTarget) -> tuple[str, Outcome] | None:
    """Take the device's fallback as the reference of a task that the host cannot compute, such as some 8-bit floats.

    Returns
    -------
    tuple or None
        Decision and outcome of a fallback that does not build either; the task is skipped then.
    """
    scheduled = _fallback(state, target)
    failed = None
    if scheduled is not None:
        (result,) = evaluator.build([scheduled.mod], target.target)
        if result.error_msg is None:
            state.note = _note(state, str(result.artifact_path), on_device=True)
            return None
        status, reason = read_failure(str(result.error_msg), Status.BUILD_ERROR)
        failed = (scheduled.decision, Outcome(status, error=reason))
    state.skipped = "no reference could be built to check its candidates with"
    return failed


def _reference_mod(state: TaskState, host: tvm.target.Target) -> tvm.ir.IRModule:
    if state.task.flops <= _PLAIN_FLOPS_MAX:
        return state.task.mod
    try:
        return apply_fallback(state.task.mod, host)
    except ScheduleError as e:
        logger.warning("the reference of task %s is unscheduled: %s", state.task.name, e)
        return state.task.mod


def _note(
    state: TaskState, reference: str | None, *, on_device: bool = False, host_reference: str | None = None
) -> CandidateNote:
    func = state.task.mod["main"]
    accepted = kernel_tolerance(func)
    return CandidateNote(
        workload=state.task.workload_hash,
        index_ranges={str(position): bound for position, bound in state.task.index_ranges.items()},
        outputs=written_params(func),
        reference=reference,
        reference_on_device=on_device,
        host_reference=host_reference,
        rtol=accepted.rtol,
        atol=accepted.atol,
        accumulated=accepted.accumulated,
        steps=accepted.steps,
        masks=padding_masks(func),
        partial_sums=partial_sums_of_rows(func),
        column_sums=column_sums_of_weights(func),
        own_tolerances=own_tolerances(func),
    )


def own_tolerances(func: tirx.PrimFunc) -> dict[str, dict[str, float]]:
    """Return the tolerances of statistics and partial sums of rows, by the positions of those outputs.

    Statistics are made in float32 of parameters alone, whatever the product is rounded to; of partial sums, the sums of
    squares are much larger than the sums.
    """
    matmul = recognise_matmul(func)
    if isinstance(matmul, Refusal):
        return {}
    own: dict[int, KernelTolerance] = {}
    if matmul.norm is not None and matmul.norm.output is not None:
        own[matmul.norm.output] = kernel_tolerance(func, matmul.norm.output)
    if matmul.partials is not None:
        own[matmul.partials.output] = replace(kernel_tolerance(func, matmul.partials.output), quantities=COUNT)
    return {str(position): asdict(accepted) for position, accepted in own.items()}


def _fallback(state: TaskState, target: ResolvedTarget) -> FallbackSchedule | None:
    if state.fallback is not None:
        return state.fallback
    try:
        scheduled, rules = fallback_with_rules(state.task.mod, target.target)
    except ScheduleError as e:
        logger.warning("task %s has no fallback schedule: %s", state.task.name, e)
        state.last_error = str(e)
        return None
    state.fallback = FallbackSchedule(scheduled, canonical_json({"rule": rules["main"]}))
    return state.fallback
