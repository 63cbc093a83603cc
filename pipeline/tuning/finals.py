"""The final of a task: its best candidates are timed once more, alternately, before the winner is named.

The best of many candidates is in part the luckiest, and clocks drift between the first and the last. So those that are
near the best are checked again on both sets of values, then timed alternately in one process on the same arguments.
It is an experiment (`pipeline.experiment`) whose blocks are one latency of each, in the measuring process. These
measurements are recorded, and name the winner. The newest measurement of a decision counts; earlier ones of other
decisions count as if they had drifted as much (`drift`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.measure.backend import MeasureBackend, Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.record import Recorder
from relaxtune.pipeline.tuning.tasks import TaskState
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.winner import drift

logger = logging.getLogger(__name__)

# Candidates at most so far behind the best are in the final, or within half the spread of the best's latencies.
_MARGIN = 0.05


@dataclass(frozen=True)
class Final:
    """The outcomes of a task's finalists, in order; None where they could not all be run."""

    state: TaskState
    finalists: Sequence[Candidate]
    outcomes: Sequence[Outcome] | None


class Finals:
    """The finals of a run.

    Each finalist gets `rounds` latencies at most. `on_held` is called with each final, in another thread.
    """

    def __init__(
        self,
        backend: MeasureBackend,
        recorder: Recorder,
        rounds: int,
        stop: StopSignal,
        on_held: Callable[[Final], None],
    ) -> None:
        self._backend, self._recorder, self._rounds = backend, recorder, rounds
        self._stop, self._on_held = stop, on_held
        #: Finals that are handed in and not taken yet.
        self.running = 0

    def hold(self, state: TaskState) -> bool:
        """Hand in the final of a task; return whether it needs one. It needs none if the user stopped the run."""
        fresh = state.final_of != state.valid
        state.final_of = state.valid
        finalists = list_finalists(state)
        artifacts = [one.artifact for one in finalists if one.artifact is not None]
        if self._stop.requested or not (fresh and self._rounds and state.spec and len(artifacts) > 1):
            return False
        self.running += 1
        self._backend.compare(
            artifacts, state.spec, self._rounds, lambda outcomes: self._on_held(Final(state, finalists, outcomes))
        )
        return True

    def take(self, final: Final) -> None:
        """Name the winner of a task anew and record the outcomes of its final."""
        self.running -= 1
        state, outcomes = final.state, final.outcomes
        if outcomes is None or any(isinstance(one.status, Unmeasured) for one in outcomes):
            return
        again = [replace(one, outcome=outcome) for one, outcome in zip(final.finalists, outcomes, strict=True)]
        _name_winner(state, final.finalists, again)
        for one, outcome in zip(again, outcomes, strict=True):
            self._recorder.add(state.task, one)
            state.seconds += outcome.duration_s


def list_finalists(state: TaskState) -> list[Candidate]:
    """Return the contenders of a task that may be its best, when the best is of this run.

    The fallback is one where its fastest run is no slower than the best: such a tie gives it the kernel
    (`without_ties`), and one run may have been lucky, or all others disturbed.
    """
    kept = [one for one in state.contenders if one.artifact is not None]
    if not kept or state.best_us is None or (kept[0].latency_us or 0.0) > state.best_us:
        return []
    best_us = state.best_us
    limit_us = best_us * (1 + max(_MARGIN, (state.best_spread or 0.0) / 2))
    return [
        one
        for one in kept
        if (one.latency_us or 0.0) <= limit_us or (one.route is Route.FALLBACK and (one.fastest_us or 0.0) <= best_us)
    ]


def _name_winner(state: TaskState, finalists: Sequence[Candidate], again: Sequence[Candidate]) -> None:
    state.best_us, state.route, state.best_spread = None, None, None
    state.slower = 1.0
    latencies: list[tuple[float, float]] = []
    for before, one in zip(finalists, again, strict=True):
        if one.latency_us is None or before.latency_us is None:
            error = None if one.outcome is None else one.outcome.error
            logger.warning("task %s: a candidate failed in the final: %s", state.task.name, error)
            continue
        latencies.append((before.latency_us, one.latency_us))
        if one.route is Route.FALLBACK:
            state.before_us = one.latency_us
        state.offer(one.route, one.latency_us, one.spread)
    slower = drift(latencies)
    if state.before_us is not None and all(one.route is not Route.FALLBACK for one in finalists):
        state.slower = slower
        state.offer(Route.FALLBACK, state.before_us * slower)
    for one in state.contenders:
        if one not in finalists and one.latency_us is not None:
            state.offer(one.route, one.latency_us * slower)
