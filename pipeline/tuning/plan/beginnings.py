"""How tasks begin: their references are built, then what their templates propose first, then their fallbacks.

::

    begin ── build references ──▶ take ── first proposals of templates ──▶ fallback, once all references are there
                                       └─ nothing to propose ──▶ fallback

Where building disturbs measurements, a task's candidates wait for its fallback instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from relaxtune.pipeline.tuning.measure.backend import Unmeasured
from relaxtune.pipeline.tuning.measure.evaluate import Evaluator, Finished
from relaxtune.pipeline.tuning.plan.baseline import (
    device_reference,
    make_fallback,
    reference_on_device,
    take_reference,
)
from relaxtune.pipeline.tuning.plan.in_flight import FIRST_INFORMED, Tag
from relaxtune.pipeline.tuning.plan.recorder import Recorder
from relaxtune.pipeline.tuning.plan.state import TaskState
from relaxtune.pipeline.tuning.plan.task_start import host_target
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Route

logger = logging.getLogger(__name__)

# The first proposals of every task's templates are measured before anything else: compilation takes them. One is enough
# where a near shape was tuned (`FIRST_INFORMED`); none is needed where something is known of the task itself.
_FIRST_PROPOSALS = 2


class Beginnings:
    """The tasks of a run that have begun, and what is still missing of each.

    Parameters
    ----------
    on_device : bool
        Whether the device computes references, where the CPU would be slow.
    propose : callable
        Hands in so many candidates of a task's templates.
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
        # By the id of a task: how many of its references are being built. Then those that are built.
        self._references: dict[int, int] = {}
        self._built: dict[tuple[int, bool], Finished] = {}
        self._later: list[TaskState] = []

    def begin(self, states: Sequence[TaskState]) -> None:
        """Hand in the references of tasks that are not left alone."""
        states = [state for state in states if state.skipped is None and state.ended is None]
        self.due += len(states)
        for state in states:
            state.fallback_due = True
        tagged = [(state.start.reference, Tag(state, Route.FALLBACK, "", reference=True)) for state in states]
        self._references |= {id(state): 1 for state in states}
        self._evaluator.submit_builds(tagged, host_target(self._target))
        if not self._on_device or self._evaluator.exclusive:
            return
        for state in states:
            mod = device_reference(state, self._target)
            if mod is not None:
                self._references[id(state)] += 1
                tag = Tag(state, Route.FALLBACK, "", reference=True, on_device=True)
                self._evaluator.submit_builds([(mod, tag)], self._target.target)

    def take(self, tag: Tag, finished: Finished) -> None:
        """Let a task begin when all its references are there: with what its templates propose, or with its fallback."""
        if finished.outcome.status is Unmeasured.STOPPED:
            return
        state = tag.state
        self._built[id(state), tag.on_device] = finished
        self._references[id(state)] -= 1
        if self._references[id(state)]:
            return
        self._take_references(state)
        self.due -= 1
        if self._evaluator.exclusive:
            state.ready = not self._measure_fallback(state)
            return
        state.ready = True
        if state.spec is not None and state.spec.reference is not None:
            # It is computed while the first candidates are built.
            self._evaluator.backend.prepare_reference(state.spec)
        if state.skipped is None and state.templates is not None and not state.templates.done and not state.known:
            self._later.append(state)
            self._propose(state, FIRST_INFORMED if state.templates.informed else _FIRST_PROPOSALS)
        else:
            self._measure_fallback(state)
        if self.due == 0:
            later, self._later = self._later, []
            for one in later:
                self._measure_fallback(one)

    def _take_references(self, state: TaskState) -> None:
        finished = self._built.pop((id(state), False))
        device = self._built.pop((id(state), True), None)
        on_device = None if device is None else device.artifact
        if device is not None and device.artifact is None:
            logger.warning("task %s has no reference on the device: %s", state.task.name, device.outcome.error)
        take_reference(state, finished.artifact, finished.outcome, on_device)
        if finished.artifact is None and on_device is None:
            failed = reference_on_device(state, self._evaluator, self._target)
            if failed is not None:
                decision, outcome = failed
                self._recorder.add(state.task, Route.FALLBACK, decision, outcome)
                state.take(Route.FALLBACK, outcome)

    def _measure_fallback(self, state: TaskState) -> bool:
        """Hand in a task's fallback, unless it has none or it was measured before; return whether it was."""
        fallback = make_fallback(state)
        state.begins = None
        state.fallback_due = fallback is not None
        if fallback is not None:
            self._evaluator.submit([(fallback.job, Tag(state, Route.FALLBACK, fallback.decision))])
        return fallback is not None
