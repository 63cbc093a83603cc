"""How a task begins: its references are built, then the first proposals of its templates, then its fallback.

::

    begin ── build references ──▶ take ── first proposals of templates ──▶ fallback, once all references are there
                                       └─ nothing to propose ──▶ fallback

Where building disturbs measurements, a task's candidates wait for its fallback instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tuning.candidates import Candidate, Evaluator, Purpose
from relaxtune.pipeline.tuning.measure.backend import Unmeasured, build_all
from relaxtune.pipeline.tuning.measure.recipe import Buildable
from relaxtune.pipeline.tuning.record import Recorder
from relaxtune.pipeline.tuning.task_start import host_target
from relaxtune.pipeline.tuning.tasks import TaskState
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Route

logger = logging.getLogger(__name__)

# The reference of a task with more operations is computed on the GPU: GPT-2's logits for 8 x 512 tokens take a CPU with
# 16 cores seconds.
_HOST_FLOPS_MAX = 2e9
# The first proposals of every task's templates are measured before anything else: compilation takes them. One is enough
# where a near shape was tuned; none is needed where something is known of the task itself.
_FIRST_PROPOSALS = 2
FIRST_INFORMED = 1


def device_reference(state: TaskState, target: ResolvedTarget) -> Buildable | None:
    """Return the default schedule that computes a large task's reference on the GPU; None leaves it to the host."""
    if target.kind != "cuda" or state.task.flops <= _HOST_FLOPS_MAX:
        return None
    scheduled = state.start.fallback
    return None if isinstance(scheduled, str) else scheduled.mod


class Beginnings:
    """The tasks of a run whose references are being built, and the fallbacks that wait for all references.

    Where `on_device`, the device computes references for which the CPU would be slow. `propose` hands in so many
    candidates of a task's templates.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        recorder: Recorder,
        target: ResolvedTarget,
        *,
        on_device: bool,
        propose: Callable[[TaskState, int], None],
    ) -> None:
        self._evaluator = evaluator
        self._recorder = recorder
        self._target = target
        self._on_device = on_device
        self._propose = propose
        #: Tasks whose references are being built.
        self.due = 0
        self._fallback_later: list[TaskState] = []

    def begin(self, states: Sequence[TaskState]) -> None:
        """Hand in the references of tasks that are not left alone."""
        states = [state for state in states if not state.left_alone]
        self.due += len(states)
        for state in states:
            state.fallback_due = True
            state.spec = state.start.spec
            state.references = 1
        self._evaluator.submit(
            [_reference(state, state.start.reference, Purpose.REFERENCE) for state in states], host_target(self._target)
        )
        if not self._on_device or self._evaluator.exclusive:
            return
        for state in states:
            mod = device_reference(state, self._target)
            if mod is not None:
                state.references += 1
                self._evaluator.submit([_reference(state, mod, Purpose.DEVICE_REFERENCE)])

    def take(self, state: TaskState, reference: Candidate) -> None:
        """Take in a reference; when all of a task are there, measure its first proposals or its fallback."""
        outcome = reference.outcome
        if state.spec is None or outcome is None or outcome.status is Unmeasured.STOPPED:
            return
        if reference.artifact is None:
            where = "CPU" if reference.purpose is Purpose.REFERENCE else "device"
            why = f"{outcome.status}: {last_line(outcome.error)}"
            logger.warning("task %s has no reference on the %s: %s", state.task.name, where, why)
        elif reference.purpose is Purpose.REFERENCE:
            state.spec = replace(state.spec, host_reference=reference.artifact)
        else:
            state.spec = replace(state.spec, reference=reference.artifact, reference_on_device=True)
        state.references -= 1
        if state.references:
            return
        self._settle_references(state)
        self.due -= 1
        if self._evaluator.exclusive:
            state.ready = not self._measure_fallback(state)
            return
        state.ready = True
        if state.spec.reference is not None:
            # It is computed while the first candidates are built.
            self._evaluator.backend.prepare_reference(state.spec)
        if state.skipped is None and state.templates is not None and not state.templates.done and not state.known:
            self._fallback_later.append(state)
            self._propose(state, FIRST_INFORMED if state.templates.informed else _FIRST_PROPOSALS)
        else:
            self._measure_fallback(state)
        if self.due == 0:
            later, self._fallback_later = self._fallback_later, []
            for one in later:
                self._measure_fallback(one)

    def _settle_references(self, state: TaskState) -> None:
        """Compare with the host's reference unless the device computes it; the host's then decides about doubts.

        Where the host cannot compute a task, such as some 8-bit floats, the fallback on the device is the reference.
        Without any reference the task is skipped.
        """
        spec = state.spec
        if spec is None or spec.reference is not None:
            return
        if spec.host_reference is not None:
            state.spec = replace(spec, reference=spec.host_reference, host_reference=None)
            return
        scheduled = state.start.fallback
        if not isinstance(scheduled, str):
            (built,) = build_all(self._evaluator.builder, [scheduled.mod], self._target.target)
            if built.artifact is not None:
                state.spec = replace(spec, reference=built.artifact, reference_on_device=True)
                return
            failed = Candidate(Route.FALLBACK, scheduled.decision, scheduled.mod).handed_in(spec).built(built)
            self._recorder.add(state.task, failed)
            state.take(failed)
        state.skipped = "no reference could be built to check its candidates with"

    def _measure_fallback(self, state: TaskState) -> bool:
        """Hand in a task's fallback, unless it has none or its latency is known; return whether it was handed in."""
        scheduled = state.start.fallback
        state.begins, state.fallback_due = None, False
        if state.before_us is not None or state.spec is None or state.spec.reference is None:
            return False
        if isinstance(scheduled, str):
            state.last_error = scheduled
            return False
        state.fallback_due = True
        fallback = Candidate(Route.FALLBACK, scheduled.decision, scheduled.mod)
        self._evaluator.submit([fallback.handed_in(state.spec)])
        return True


def _reference(state: TaskState, mod: Buildable, purpose: Purpose) -> Candidate:
    return Candidate(Route.FALLBACK, "", mod, purpose=purpose).handed_in(state.start.spec)
