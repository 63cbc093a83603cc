"""The end of a task: its best candidates are timed once more, in turns, before the winner is named.

The best of many candidates is in part the luckiest, and clocks drift between the first and the last. So those that are
near the best are timed alternately in one process, on the same arguments, after they were checked on both sets of
values again. What is measured is recorded; the newest measurement of a decision is the one that counts, and what was
measured before alone counts as if it had drifted as they did (`pipeline.choose.standing`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.choose.standing import drift
from relaxtune.pipeline.tuning.local.evaluate import Outcome
from relaxtune.pipeline.tuning.measure.failure import CANCELLED, StopSignal, read_failure
from relaxtune.pipeline.tuning.measure.resources import read_resources
from relaxtune.pipeline.tuning.plan.recorder import Recorder
from relaxtune.pipeline.tuning.plan.state import Contender, TaskState, median_latency_us, spread
from relaxtune.tuning_db.records import Route, Status

logger = logging.getLogger(__name__)

# Candidates at most so far behind the best are in the final, or within half the spread of the best's latencies.
_MARGIN = 0.05

Compare = Callable[[Sequence[ms.runner.RunnerInput], int], list[ms.runner.RunnerResult] | None]


def hold_finals(
    states: Sequence[TaskState],
    compare: Compare,
    recorder: Recorder,
    stop: StopSignal,
    *,
    kind: str,
    rounds: int,
) -> None:
    """Time the contenders of every task in turns and name the winners anew; ends early when somebody asks for it.

    Parameters
    ----------
    compare : callable
        Times some artifacts in turns; see `pipeline.tuning.local.runner.ProcessRunner.compare`.
    kind : str
        The target's kind.
    rounds : int
        Latencies of each.
    """
    for state in states:
        finalists = list_finalists(state)
        if len(finalists) < 2 or stop.asked:
            continue
        args_info = ms.arg_info.ArgInfo.from_entry_func(state.task.mod, False)
        items = [ms.runner.RunnerInput(one.artifact, kind, args_info) for one in finalists]
        began = time.monotonic()
        results = compare(items, rounds)
        share = (time.monotonic() - began) / len(items)
        if results is not None and not any(str(result.error_msg or "").startswith(CANCELLED) for result in results):
            outcomes = [_outcome(result, share, one) for result, one in zip(results, finalists, strict=True)]
            _name_winner(state, finalists, outcomes)
            for one, outcome in zip(finalists, outcomes, strict=True):
                recorder.add(state.task, one.route, one.decision, outcome)
        state.seconds += time.monotonic() - began


def list_finalists(state: TaskState) -> list[Contender]:
    """Return the contenders of a task that may be its best, when the best is of this run."""
    kept = [one for one in state.contenders if one.artifact is not None]
    if not kept or state.best_us is None or kept[0].latency_us > state.best_us:
        return []
    margin = max(_MARGIN, (state.best_spread or 0.0) / 2)
    return [one for one in kept if one.latency_us <= state.best_us * (1 + margin)]


def _outcome(result: ms.runner.RunnerResult, duration_s: float, finalist: Contender) -> Outcome:
    assert finalist.artifact is not None
    resources = read_resources(finalist.artifact)
    if result.error_msg is None:
        return Outcome(Status.OK, tuple(float(value) for value in result.run_secs), None, duration_s, resources)
    status, error = read_failure(str(result.error_msg), Status.RUN_ERROR)
    return Outcome(status, (), error, duration_s, resources)


def _name_winner(state: TaskState, finalists: Sequence[Contender], outcomes: Sequence[Outcome]) -> None:
    state.best_us, state.route, state.best_spread = None, None, None
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
        state.offer(Route.FALLBACK, state.before_us * slower)
    for one in state.contenders:
        if one not in finalists:
            state.offer(one.route, one.latency_us * slower)
