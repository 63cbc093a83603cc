"""The baseline of a task: a reference to compare with, and the fallback schedule's latency as "before"."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tuning.measure.backend import Outcome, build_all
from relaxtune.pipeline.tuning.measure.evaluate import Evaluator, Job
from relaxtune.pipeline.tuning.measure.recipe import Buildable
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact
from relaxtune.pipeline.tuning.plan.state import TaskState
from relaxtune.schedules.targets import ResolvedTarget

logger = logging.getLogger(__name__)

# What has more arithmetic is computed on the GPU: GPT-2's logits for 8 x 512 tokens take a CPU with 16 cores seconds.
_HOST_FLOPS_MAX = 2e9


@dataclass(frozen=True)
class Fallback:
    """The fallback schedule of a task, to be measured like a candidate."""

    decision: str
    job: Job


def device_reference(state: TaskState, target: ResolvedTarget) -> Buildable | None:
    """Return what computes a large task's reference on the GPU: its default schedule; None leaves it to the host."""
    if target.kind != "cuda" or state.task.flops <= _HOST_FLOPS_MAX:
        return None
    scheduled = state.start.fallback
    return None if isinstance(scheduled, str) else scheduled.mod


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
    state.spec = replace(state.start.spec, reference=artifact)
    if on_device is not None:
        state.spec = replace(state.spec, reference=on_device, reference_on_device=True, host_reference=artifact)
    if artifact is None:
        logger.warning(
            "task %s has no reference on the CPU: %s: %s", state.task.name, outcome.status, last_line(outcome.error)
        )


def make_fallback(state: TaskState) -> Fallback | None:
    """Return a task's fallback, to be measured; None when its latency is known or there is no such schedule."""
    if state.before_us is not None or state.spec is None or state.spec.reference is None:
        return None
    scheduled = state.start.fallback
    if isinstance(scheduled, str):
        state.last_error = scheduled
        return None
    return Fallback(scheduled.decision, Job(scheduled.mod, state.spec))


def reference_on_device(state: TaskState, evaluator: Evaluator, target: ResolvedTarget) -> tuple[str, Outcome] | None:
    """Take the device's fallback as the reference where the host cannot compute a task, such as some 8-bit floats.

    Returns
    -------
    tuple or None
        Decision and outcome of a fallback that does not build either; the task is skipped then.
    """
    scheduled = state.start.fallback
    failed = None
    if not isinstance(scheduled, str):
        (built,) = build_all(evaluator.builder, [scheduled.mod], target.target)
        if built.artifact is not None:
            state.spec = replace(state.start.spec, reference=built.artifact, reference_on_device=True)
            return None
        failed = (scheduled.decision, Outcome(built.status, error=built.error))
    state.skipped = "no reference could be built to check its candidates with"
    return failed
