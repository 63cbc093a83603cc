"""The start of a task: a reference to compare with, and the fallback schedule's latency as "before"."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import tirx

from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tuning.measure.arguments import argument_specs
from relaxtune.pipeline.tuning.measure.backend import Outcome, build_all
from relaxtune.pipeline.tuning.measure.evaluate import Evaluator, Job
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.plan.state import FallbackSchedule, TaskState
from relaxtune.pipeline.validate.tolerances import KernelTolerance, kernel_tolerance
from relaxtune.schedules.errors import Refusal, ScheduleError
from relaxtune.schedules.fallback import apply_fallback, fallback_with_rules
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.tir.blocks import written_params
from relaxtune.schedules.tir.dependent_arguments import column_sums_of_weights, padding_masks, partial_sums_of_rows
from relaxtune.schedules.tir.epilogue import recognise_matmul
from relaxtune.schedules.tir.row_norm import COUNT
from relaxtune.tuning_db.records import canonical_json

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
    state: TaskState, artifact: BuiltArtifact | None, outcome: Outcome, on_device: BuiltArtifact | None = None
) -> None:
    """Give a task its reference, or a spec without one when it did not build for the host.

    Parameters
    ----------
    artifact : BuiltArtifact or None
        The host's.
    outcome : Outcome
        What came of building the host's.
    on_device : BuiltArtifact or None
        The device's, where the device computes the reference; the host's is for appeals then.
    """
    state.spec = _spec(state, artifact)
    if on_device is not None:
        state.spec = replace(state.spec, reference=on_device, reference_on_device=True, host_reference=artifact)
    if artifact is None:
        logger.warning(
            "task %s has no reference on the CPU: %s: %s", state.task.name, outcome.status, last_line(outcome.error)
        )


def make_fallback(state: TaskState, target: ResolvedTarget) -> Fallback | None:
    """Return a task's fallback, to be measured; None when its latency is known or there is no such schedule."""
    if state.before_us is not None or state.spec is None or state.spec.reference is None:
        return None
    scheduled = _fallback(state, target)
    if scheduled is None:
        return None
    return Fallback(scheduled.decision, Job(scheduled.mod, state.spec))


def reference_on_device(state: TaskState, evaluator: Evaluator, target: ResolvedTarget) -> tuple[str, Outcome] | None:
    """Take the device's fallback as the reference where the host cannot compute a task, such as some 8-bit floats.

    Returns
    -------
    tuple or None
        Decision and outcome of a fallback that does not build either; the task is skipped then.
    """
    scheduled = _fallback(state, target)
    failed = None
    if scheduled is not None:
        (built,) = build_all(evaluator.builder, [scheduled.mod], target.target)
        if built.artifact is not None:
            state.spec = replace(_spec(state, built.artifact), reference_on_device=True)
            return None
        failed = (scheduled.decision, Outcome(built.status, error=built.error))
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


def _spec(state: TaskState, reference: BuiltArtifact | None) -> WorkloadSpec:
    func = state.task.mod["main"]
    return WorkloadSpec(
        workload=state.task.workload_hash,
        arguments=argument_specs(func),
        outputs=written_params(func),
        index_ranges=state.task.index_ranges,
        reference=reference,
        tolerance=kernel_tolerance(func),
        masks=padding_masks(func),
        partial_sums=partial_sums_of_rows(func),
        column_sums=column_sums_of_weights(func),
        own_tolerances=own_tolerances(func),
    )


def own_tolerances(func: tirx.PrimFunc) -> dict[int, KernelTolerance]:
    """Return the tolerances of statistics and partial sums of rows, by the positions of those outputs.

    Statistics are computed in float32 from parameters alone, whatever the product is rounded to. The sums of squares
    among the partial sums are much larger than the sums.
    """
    matmul = recognise_matmul(func)
    if isinstance(matmul, Refusal):
        return {}
    own: dict[int, KernelTolerance] = {}
    if matmul.norm is not None and matmul.norm.output is not None:
        own[matmul.norm.output] = kernel_tolerance(func, matmul.norm.output)
    if matmul.partials is not None:
        own[matmul.partials.output] = replace(kernel_tolerance(func, matmul.partials.output), quantities=COUNT)
    return own


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
