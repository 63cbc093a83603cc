"""The final of a task: its best candidates are timed once more, alternately, before the winner is named.

The best of many candidates is in part the luckiest, and clocks drift between the first and the last. So those that are
near the best are checked again on both sets of values, then timed alternately in one process on the same arguments.
These measurements are recorded. The newest measurement of a decision counts; earlier ones of other decisions count as
if they had drifted as much (`drift`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from relaxtune.pipeline.tuning.measure.backend import MeasureBackend, Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.plan.recorder import Recorder
from relaxtune.pipeline.tuning.plan.state import Contender, TaskState, median_latency_us, spread
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.winner import drift

logger = logging.getLogger(__name__)

# Candidates at most so far behind the best are in the final, or within half the spread of the best's latencies.
_MARGIN = 0.05


class Finals:
    """The finals of a run: each is measured like a candidate, while the run goes on with other tasks.

    Parameters
    ----------
    backend : MeasureBackend
        Holds the final of one task on one device, those of several tasks side by side.
    on_back : callable
        Called, in another thread, when a final is back.
    rounds : int
        Latencies of each contender; 0 holds no finals.
    """

    def __init__(
        self,
        backend: MeasureBackend,
        recorder: Recorder,
        stop: StopSignal,
        on_back: Callable[[], None],
        *,
        rounds: int,
    ) -> None:
        self._backend, self._recorder, self._stop = backend, recorder, stop
        self._on_back = on_back
        self._rounds = rounds
        #: Finals that are on their way.
        self.out = 0
        self._back: SimpleQueue[tuple[TaskState, list[Contender], Sequence[Outcome] | None]] = SimpleQueue()
        # By the id of a task: its valid candidates when its final was held.
        self._held: dict[int, int] = {}

    def hold(self, states: Sequence[TaskState]) -> list[TaskState]:
        """Hand in the finals of tasks that are done; return the tasks that need none."""
        return [state for state in states if not self._hand_in(state)]

    def take(self) -> list[TaskState]:
        """Return the tasks whose finals are back, with their winners named anew."""
        found = []
        while not self._back.empty():
            state, finalists, outcomes = self._back.get()
            self.out -= 1
            found.append(state)
            if outcomes is None or any(isinstance(one.status, Unmeasured) for one in outcomes):
                continue
            _name_winner(state, finalists, outcomes)
            for one, outcome in zip(finalists, outcomes, strict=True):
                self._recorder.add(state.task, one.route, one.decision, outcome)
                state.seconds += outcome.duration_s
        return found

    def _hand_in(self, state: TaskState) -> bool:
        fresh = self._held.get(id(state)) != state.valid
        self._held[id(state)] = state.valid
        if not fresh or not self._rounds or self._stop.asked or state.spec is None:
            return False
        finalists = list_finalists(state)
        artifacts = [one.artifact for one in finalists if one.artifact is not None]
        if len(finalists) < 2 or not self._backend.capabilities.compares:
            return False

        def back(outcomes: Sequence[Outcome] | None) -> None:
            self._back.put((state, finalists, outcomes))
            self._on_back()

        self.out += 1
        self._backend.compare(artifacts, state.spec, self._rounds, back)
        return True


def list_finalists(state: TaskState) -> list[Contender]:
    """Return the contenders of a task that may be its best, when the best is of this run.

    The fallback is one where its fastest run is no slower than the best: such a tie gives it the kernel
    (`without_ties`), and one run may have been lucky, or all others disturbed.
    """
    kept = [one for one in state.contenders if one.artifact is not None]
    if not kept or state.best_us is None or kept[0].latency_us > state.best_us:
        return []
    margin = max(_MARGIN, (state.best_spread or 0.0) / 2)
    limit_us, best_us = state.best_us * (1 + margin), state.best_us
    return [
        one for one in kept if one.latency_us <= limit_us or (one.route is Route.FALLBACK and one.fastest_us <= best_us)
    ]


def _name_winner(state: TaskState, finalists: Sequence[Contender], outcomes: Sequence[Outcome]) -> None:
    state.best_us, state.route, state.best_spread = None, None, None
    state.slower = 1.0
    again: list[tuple[float, float]] = []
    for one, outcome in zip(finalists, outcomes, strict=True):
        latency_us = median_latency_us(outcome)
        if latency_us is None:
            logger.warning("task %s: %s in the final: %s", state.task.name, one.decision[:80], outcome.error)
            continue
        again.append((one.latency_us, latency_us))
        if one.route is Route.FALLBACK:
            state.before_us = latency_us
        state.offer(one.route, latency_us, spread(outcome.seconds))
    slower = drift(again)
    if state.before_us is not None and all(one.route is not Route.FALLBACK for one in finalists):
        state.slower = slower
        state.offer(Route.FALLBACK, state.before_us * slower)
    for one in state.contenders:
        if one not in finalists:
            state.offer(one.route, one.latency_us * slower)
