"""What a tuning run knows of each task while it runs."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tasks.similar_shapes import NearRecords
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.options import TaskSummary
from relaxtune.pipeline.tuning.plan.task_start import TaskStart
from relaxtune.pipeline.tuning.search.evolution import TaskSearch
from relaxtune.pipeline.tuning.search.template_search import TemplateSearch
from relaxtune.tuning_db.records import Route, Status

_US_PER_S = 1e6
# Rounds over which a task's recent improvement is looked at.
_WINDOW = 3
# How much of the expectation is hope (a task searched n rounds might still halve within n more) and not experience.
_HOPE = 0.2
# The part of a fallback's latency that the first round of a task is expected to save where no near shape tells it.
_FIRST_HOPE = 0.5
# Contenders of a task that are kept for its final.
_CONTENDERS_MAX = 6
# So many times as slow as the best, a candidate is in no final: spreads are a few per cent.
_HOPELESS = 2.0


@dataclass(frozen=True)
class Contender:
    """One of a task's best candidates: its route, decision, latency and fastest run, and its artifact if it is kept."""

    route: Route
    decision: str
    latency_us: float
    artifact: BuiltArtifact | None
    fastest_us: float = math.inf


@dataclass
class TaskState:
    """One task of a run.

    Attributes
    ----------
    decided
        Key of a decision -> median seconds, or None for a failure; of earlier runs too, but for mode `force`.
    templates
        Candidates of templates, which come before any search.
    near, near_begun
        What was best for near shapes and is not tried yet, and whether the first of it was asked for.
    begins
        What it begins with, until its fallback is handed in.
    ready
        Its reference and its fallback are there.
    fallback_due
        It has begun, and its fallback is not measured yet.
    in_flight, on_way, searching
        Candidates that are not back, the keys of their decisions, and how many the present search will hand in.
    slower
        What the device took in the final over what it took when `before_us` was measured.
    progress, rounds
        Best latency after each round, earlier runs included; rounds of this run.
    """

    task: TuningTask
    decided: dict[str, float | None] = field(default_factory=dict)
    templates: TemplateSearch | None = None
    known: int = 0
    spec: WorkloadSpec | None = None
    search: TaskSearch | None = None
    near: NearRecords = field(default_factory=NearRecords)
    near_begun: bool = False
    begins: TaskStart | None = None
    ready: bool = False
    fallback_due: bool = False
    in_flight: int = 0
    on_way: set[str] = field(default_factory=set)
    searching: int = 0
    before_us: float | None = None
    slower: float = 1.0
    best_us: float | None = None
    best_spread: float | None = None
    route: Route | None = None
    valid: int = 0
    failures: Counter[Status] = field(default_factory=Counter)
    seconds: float = 0.0
    skipped: str | None = None
    ended: str | None = None
    last_error: str | None = None
    empty_rounds: int = 0
    progress: list[float | None] = field(default_factory=list)
    rounds: int = 0
    contenders: list[Contender] = field(default_factory=list)

    @property
    def start(self) -> TaskStart:
        """What it begins with; asked for before its fallback is handed in."""
        if self.begins is None:
            raise UsageError(f"task {self.task.name} has begun already.")
        return self.begins

    @property
    def failed(self) -> int:
        """Candidates that failed in this run."""
        return sum(self.failures.values())

    @property
    def begins_near(self) -> bool:
        """Whether its next candidate is the first of what was best for a near shape, where that saved something."""
        return bool(self.near.traces) and not self.near_begun and self.near.saved != 0.0

    @property
    def open(self) -> bool:
        """Whether more candidates can be asked for."""
        return self.ready and self.skipped is None and self.ended is None

    @property
    def over(self) -> bool:
        """Whether nothing more of it will be measured, unless it is taken up again."""
        ended = self.skipped is not None or self.ended is not None
        return ended and not (self.in_flight or self.searching or self.fallback_due)

    def take(self, route: Route, outcome: Outcome) -> None:
        """Count a finished candidate; fallbacks only set what they are compared with."""
        median_us = median_latency_us(outcome)
        if route is Route.FALLBACK:
            self.before_us = median_us
        elif outcome.status is Status.OK:
            self.valid += 1
        elif not isinstance(outcome.status, Unmeasured):
            self.failures[outcome.status] += 1
        if outcome.error is not None:
            self.last_error = outcome.error
        if median_us is not None:
            self.offer(route, median_us, spread(outcome.seconds))

    def offer(self, route: Route, latency_us: float, relative_spread: float | None = None) -> None:
        """Keep a latency if it is the best known."""
        if self.best_us is None or latency_us < self.best_us:
            self.best_us, self.route, self.best_spread = latency_us, route, relative_spread

    def keep(self, contender: Contender) -> list[Contender]:
        """Keep a candidate for the final if it is among the best, or the fallback; return those that are no longer."""
        ranked = sorted([*self.contenders, contender], key=lambda one: one.latency_us)
        limit_us = _HOPELESS * ranked[0].latency_us
        dropped = [
            one
            for place, one in enumerate(ranked)
            if one.route is not Route.FALLBACK and (place >= _CONTENDERS_MAX or one.latency_us > limit_us)
        ]
        self.contenders = [one for one in ranked if one not in dropped]
        return dropped

    def release(self) -> list[BuiltArtifact]:
        """Forget what only further candidates need, now that the task is over; return the artifacts that it kept.

        When it is taken up again, its search begins with the records.
        """
        kept = [one.artifact for one in self.contenders if one.artifact is not None]
        self.contenders = [replace(one, artifact=None) for one in self.contenders]
        self.begins = self.templates = self.search = None
        self.near = replace(self.near, traces=())
        return kept

    def close_round(self) -> None:
        """Note how far the task is after a round."""
        self.progress.append(self.best_us)
        self.rounds += 1

    def expected_gain_us(self) -> float:
        """Return the microseconds that one more round may save in one inference; calls of the kernel counted."""
        rounds = len(self.progress)
        if rounds == 0:
            hoped = self.best_us if self.best_us is not None else self.before_us
            part = _FIRST_HOPE if self.near.saved is None else self.near.saved
            return float("inf") if hoped is None else self.task.weight * part * hoped
        latency = self.best_us if self.best_us is not None else 0.0
        earlier = self.progress[max(0, rounds - 1 - _WINDOW)]
        experience = (earlier - latency) / min(rounds, _WINDOW) if earlier is not None else 0.0
        return self.task.weight * ((1 - _HOPE) * experience + _HOPE * latency / rounds)

    def hoped_gain_us(self, more: int) -> float:
        """Return what a round may save after so many more, at least one, that saved nothing."""
        return self.task.weight * _HOPE * (self.best_us or self.before_us or 0.0) / (len(self.progress) + more)

    def round_seconds(self, usual: float) -> float:
        """Return what a round of this task takes; `usual` for one that had none."""
        return self.seconds / self.rounds if self.rounds else usual


def decision_key(decision: str) -> str:
    """Return a short key of a decision: thousands of traces are megabytes."""
    return hashlib.blake2b(decision.encode(), digest_size=12).hexdigest()


def median_latency_us(outcome: Outcome) -> float | None:
    """Return the median latency of an outcome, or None for a failure."""
    return statistics.median(outcome.seconds) * _US_PER_S if outcome.status is Status.OK else None


def spread(seconds: Sequence[float]) -> float | None:
    """Return the distance from the fastest to the slowest run over the median, or None for fewer than two."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds) if len(seconds) > 1 else None


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
            before_us=None if state.before_us is None else state.before_us * state.slower,
            after_us=state.best_us,
            spread=state.best_spread,
            route=state.route,
            weight=state.task.weight,
            share=time / total if total else 0.0,
            seconds=state.seconds,
            skipped=state.skipped,
            ended=state.ended,
            last_error=state.last_error,
        )
        for state, time in zip(states, times, strict=True)
    ]
    return tuple(sorted(summaries, key=lambda summary: (-summary.share, summary.task.name)))


def _frozen(failures: Counter[Status]) -> Mapping[Status, int]:
    return dict(sorted(failures.items()))
