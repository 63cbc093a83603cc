"""What a tuning run knows of each task while it runs, and which task is worth the next round."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.tuning.evaluate import Outcome
from pipeline.tuning.note import CandidateNote
from pipeline.tuning.options import TaskSummary
from pipeline.tuning.search import TaskSearch
from pipeline.tuning.task import TuningTask
from pipeline.tuning.template_candidates import TemplateCandidate
from tuning_db.records import Route, Status

_US_PER_S = 1e6
# Rounds over which a task's recent improvement is looked at.
_WINDOW = 3
# How much of the expectation is hope (a task searched n rounds might still halve within n more) and not experience.
_HOPE = 0.2


@dataclass
class TaskState:
    """One task of a run.

    `decided` holds what earlier runs recorded: decision -> raw seconds, or None for a failure. `templates` are the
    candidates of kernel templates still to be measured, the most promising first; they come before any search.
    `progress` is the best latency after each round.
    """

    task: TuningTask
    decided: dict[str, tuple[float, ...] | None]
    templates: list[TemplateCandidate] = field(default_factory=list)
    known: int = 0
    note: CandidateNote | None = None
    search: TaskSearch | None = None
    before_us: float | None = None
    best_us: float | None = None
    route: Route | None = None
    valid: int = 0
    failures: Counter[Status] = field(default_factory=Counter)
    seconds: float = 0.0
    skipped: str | None = None
    last_error: str | None = None
    exhausted: bool = False
    empty_rounds: int = 0
    progress: list[float | None] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Candidates that failed in this run."""
        return sum(self.failures.values())

    @property
    def open(self) -> bool:
        """Whether more candidates can be asked for."""
        return self.skipped is None and not self.exhausted

    def take(self, route: Route, outcome: Outcome) -> None:
        """Count a finished candidate; fallbacks only set what they are compared with."""
        median_us = median_latency_us(outcome)
        if route is Route.FALLBACK:
            self.before_us = median_us
        elif outcome.status is Status.OK:
            self.valid += 1
        else:
            self.failures[outcome.status] += 1
        if outcome.error is not None:
            self.last_error = outcome.error
        if median_us is not None:
            self.offer(route, median_us)

    def offer(self, route: Route, latency_us: float) -> None:
        """Keep a latency if it is the best known."""
        if self.best_us is None or latency_us < self.best_us:
            self.best_us, self.route = latency_us, route

    def close_round(self) -> None:
        """Note how far the task is after a round."""
        self.progress.append(self.best_us)

    def expected_gain_us(self) -> float:
        """Return the microseconds that one more round may save in one inference; calls of the kernel counted."""
        if not self.progress:
            return float("inf")
        latency = self.best_us if self.best_us is not None else 0.0
        rounds = len(self.progress)
        earlier = self.progress[max(0, rounds - 1 - _WINDOW)]
        experience = (earlier - latency) / min(rounds, _WINDOW) if earlier is not None else 0.0
        return self.task.weight * ((1 - _HOPE) * experience + _HOPE * latency / rounds)


def median_latency_us(outcome: Outcome) -> float | None:
    """Return the median latency of an outcome, or None for a failure."""
    return statistics.median(outcome.seconds) * _US_PER_S if outcome.status is Status.OK else None


def choose_task(states: Sequence[TaskState]) -> TaskState | None:
    """Return the open task whose next round promises most; every task gets its first round before any its second."""
    candidates = [state for state in states if state.open]
    if not candidates:
        return None
    return max(
        candidates,
        key=lambda state: (state.expected_gain_us(), state.task.weight * (state.before_us or state.task.flops)),
    )


def summarise(states: Sequence[TaskState]) -> tuple[TaskSummary, ...]:
    """Return the summaries of all tasks, those that take most of the model's time first."""
    times = [state.task.weight * (state.best_us or 0.0) for state in states]
    total = sum(times)
    summaries = [
        TaskSummary(
            task=state.task,
            valid=state.valid,
            failed=state.failed,
            failures=_frozen(state.failures),
            known=state.known,
            before_us=state.before_us,
            after_us=state.best_us,
            route=state.route,
            weight=state.task.weight,
            share=time / total if total else 0.0,
            seconds=state.seconds,
            skipped=state.skipped,
            last_error=state.last_error,
        )
        for state, time in zip(states, times, strict=True)
    ]
    return tuple(sorted(summaries, key=lambda summary: (-summary.share, summary.task.name)))


def _frozen(failures: Counter[Status]) -> Mapping[Status, int]:
    return dict(sorted(failures.items()))
