"""The tasks of a tuning run: what is known of each, and which of them is next."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tasks.similar_shapes import NearRecords
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.candidates import Candidate, State
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.options import TaskSummary
from relaxtune.pipeline.tuning.search.evolution import Lesson, TaskSearch
from relaxtune.pipeline.tuning.search.matmul_bound import search_bound_us
from relaxtune.pipeline.tuning.search.template_search import TemplateSearch
from relaxtune.pipeline.tuning.task_start import TaskStart
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Route, Status

# Rounds over which a task's recent improvement is looked at.
_WINDOW = 3
# How much of the expectation is hope (a task searched n rounds might still halve within n more) and not experience.
_HOPE = 0.2
# The part of a fallback's latency that the first round of a task is expected to save without a near shape.
_FIRST_HOPE = 0.5
# Contenders of a task that are kept for its final.
_CONTENDERS_MAX = 6
# A candidate so many times as slow as the best is in no final: spreads are a few per cent.
_HOPELESS = 2.0
_SECONDS_MIN = 1e-3
# How the reason begins where a task ended for what it promises.
SETTLED = "settled"


@dataclass(eq=False)
class TaskState:
    """One task of a run."""

    task: TuningTask
    # Key of a decision -> median seconds, or None for a failure; of earlier runs too, but for mode `force`.
    decided: dict[str, float | None] = field(default_factory=dict)
    templates: TemplateSearch | None = None  # Candidates of templates, which come before any search.
    known: int = 0
    spec: WorkloadSpec | None = None
    search: TaskSearch | None = None
    # Best decisions of near shapes that are not tried yet, and whether the first of them was tried.
    near: NearRecords = field(default_factory=NearRecords)
    near_begun: bool = False
    begins: TaskStart | None = None  # Its reference, fallback and offers, until its fallback is handed in.
    references: int = 0  # References that are being built.
    ready: bool = False  # Its reference and its fallback are there.
    fallback_due: bool = False  # It has begun, and its fallback is not measured yet.
    # Candidates that are not back, the keys of their decisions, and whether its search is running.
    in_flight: int = 0
    on_way: set[str] = field(default_factory=set)
    searching: bool = False
    round_size: int = 0  # Candidates of the present round; 0 when most of them are back.
    lessons: list[Lesson] = field(default_factory=list)  # Measured candidates that its search learns from next.
    before_us: float | None = None
    slower: float = 1.0  # The latency of the device in the final over the latency when `before_us` was measured.
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
    # Best latency after each round, earlier runs included; rounds of this run.
    progress: list[float | None] = field(default_factory=list)
    rounds: int = 0
    contenders: list[Candidate] = field(default_factory=list)
    final_of: int | None = None  # Its valid candidates when its final was held; None before.
    reported: bool = False  # It is over, and `Tasks.take_settled` returns it.
    # Its expected gain, and its part of the sums of `Tasks`, as of the last `Tasks.changed`.
    gain_us: float = math.inf
    counted: tuple[float, int, float] = (0.0, 0, 0.0)

    @property
    def start(self) -> TaskStart:
        """Its reference, fallback and offers, until its fallback is handed in."""
        if self.begins is None:
            raise UsageError(f"task {self.task.name} has begun already.")
        return self.begins

    @property
    def begins_near(self) -> bool:
        """Whether its next candidate is the first of what was best for a near shape, where that saved something."""
        return bool(self.near.traces) and not self.near_begun and self.near.saved != 0.0

    @property
    def left_alone(self) -> bool:
        """Whether no more of it is to be measured."""
        return self.skipped is not None or self.ended is not None

    @property
    def open(self) -> bool:
        """Whether it can propose more candidates."""
        return self.ready and not self.left_alone

    @property
    def idle(self) -> bool:
        """Whether it has no candidate on its way and no running search."""
        return not (self.in_flight or self.searching)

    @property
    def over(self) -> bool:
        """Whether nothing more of it will be measured, unless it is taken up again."""
        return self.left_alone and self.idle and not self.fallback_due

    def take(self, candidate: Candidate) -> None:
        """Count a finished candidate; fallbacks only set the latency that others are compared with."""
        outcome, latency_us = candidate.outcome, candidate.latency_us
        if candidate.route is Route.FALLBACK:
            self.before_us = latency_us
        elif candidate.state is State.MEASURED:
            self.valid += 1
        elif outcome is not None and isinstance(outcome.status, Status):
            self.failures[outcome.status] += 1
        if outcome is not None and outcome.error is not None:
            self.last_error = outcome.error
        if latency_us is not None:
            self.offer(candidate.route, latency_us, candidate.spread)

    def offer(self, route: Route, latency_us: float, relative_spread: float | None = None) -> None:
        """Keep a latency if it is the best known."""
        if self.best_us is None or latency_us < self.best_us:
            self.best_us, self.route, self.best_spread = latency_us, route, relative_spread

    def keep(self, candidate: Candidate) -> list[Candidate]:
        """Keep a valid candidate for the final if it is among the best, or the fallback; return the others."""
        ranked = sorted([*self.contenders, candidate], key=lambda one: one.latency_us or 0.0)
        limit_us = _HOPELESS * (ranked[0].latency_us or 0.0)
        dropped = [
            one
            for place, one in enumerate(ranked)
            if one.route is not Route.FALLBACK and (place >= _CONTENDERS_MAX or (one.latency_us or 0.0) > limit_us)
        ]
        self.contenders = [one for one in ranked if one not in dropped]
        return dropped

    def release(self) -> list[BuiltArtifact]:
        """Forget all that further candidates would need; return the artifacts that it kept.

        When it is taken up again, its search begins with the records.
        """
        kept = [one.artifact for one in self.contenders if one.artifact is not None]
        self.contenders = [replace(one, artifact=None) for one in self.contenders]
        self.begins = self.templates = self.search = None
        self.near = replace(self.near, traces=())
        self.lessons = []
        return kept

    def close_round(self) -> None:
        """Note how far the task is after a round."""
        self.round_size = 0
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
        """Return the microseconds that a round may save after so many more, at least one, that saved nothing."""
        return self.task.weight * _HOPE * (self.best_us or self.before_us or 0.0) / (len(self.progress) + more)

    def round_seconds(self, usual: float) -> float:
        """Return the seconds of a round of this task; `usual` for one that had none."""
        return self.seconds / self.rounds if self.rounds else usual


class Tasks:
    """The tasks of a run, and which of them is next.

    Parameters
    ----------
    target : ResolvedTarget or None
        What is compiled for; it may bound what a search can reach. None leaves that aside.
    min_gain : float
        A task ends when a round of it promises less than this part of a model's kernel time.

    Attributes
    ----------
    models
        Models that the tasks are of: `min_gain` is of one of them, on average.
    """

    def __init__(self, target: ResolvedTarget | None = None, min_gain: float = 0.0) -> None:
        self._target = target
        self._min_gain = min_gain
        self.models = 1
        self._by_hash: dict[str, TaskState] = {}
        self._bounds: dict[str, float | None] = {}
        self._closed: str | None = None
        self._settled: list[TaskState] = []
        # Sums over all tasks: microseconds of one inference of all models, rounds, seconds.
        self._us, self._rounds, self._seconds = 0.0, 0, 0.0

    @property
    def states(self) -> Sequence[TaskState]:
        """All tasks, in the order in which they came."""
        return list(self._by_hash.values())

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._by_hash)

    def find(self, workload_hash: str) -> TaskState | None:
        """Return the task of a workload, if there is one."""
        return self._by_hash.get(workload_hash)

    def get(self, workload_hash: str) -> TaskState:
        """Return the task of a workload; KeyError where there is none."""
        return self._by_hash[workload_hash]

    def add(self, states: Iterable[TaskState]) -> None:
        """Take in more tasks."""
        for state in states:
            self._by_hash[state.task.workload_hash] = state
            self.changed(state)

    @property
    def model_us(self) -> float:
        """Microseconds of all kernels of one inference of a model, the average of all, with the best known of each."""
        return self._us / max(1, self.models)

    def choose(self, in_flight_max: float = 0.0) -> TaskState | None:
        """Return the open task whose next round promises most: time saved in all models per second of tuning.

        Tasks that begin with one candidate of a near shape come first. Tasks that are not worth another round end.

        Parameters
        ----------
        in_flight_max : float
            A task with more candidates on their way is passed over.
        """
        usual, least_us = self._usual_seconds, self._min_gain * self.model_us
        eligible = [
            one
            for one in self._by_hash.values()
            if one.ended is None and one.ready and one.in_flight <= in_flight_max and one.open and not one.searching
        ]
        weak = [one for one in eligible if one.gain_us < least_us and one.idle]
        for state in weak:
            self.changed(state)
        if weak:
            eligible = [one for one in eligible if one.ended is None]
        return max(eligible, key=lambda one: _promise(one, usual), default=None)

    def changed(self, state: TaskState) -> None:
        """Look at a task of which something was decided or came back: its rank changes, it may end, or be over."""
        us, rounds, seconds = state.counted
        known_us = state.task.weight * (state.best_us or state.before_us or 0.0)
        state.counted = known_us, state.rounds, state.seconds
        self._us += known_us - us
        self._rounds += state.rounds - rounds
        self._seconds += state.seconds - seconds
        state.gain_us = state.expected_gain_us()
        if state.open and state.idle:
            state.ended = self._reason_to_end(state) or self._closed
        if state.over and not state.reported:
            state.reported = True
            self._settled.append(state)

    def end(self, state: TaskState, why: str) -> None:
        """End a task: no more candidates of it are proposed."""
        state.ended = state.ended or why
        self.changed(state)

    def take_settled(self) -> list[TaskState]:
        """Return the tasks that are over, each once."""
        settled, self._settled = self._settled, []
        return settled

    def take_rest(self) -> list[TaskState]:
        """Return them and all others that were never returned: the run is over."""
        rest = [one for one in self._by_hash.values() if not one.reported]
        for state in rest:
            state.reported = True
        return [*self.take_settled(), *rest]

    def end_left_out(self, rounds: int) -> None:
        """End the tasks that would get none of so many more rounds, even if all rounds save nothing.

        Their models need not wait for the end of the run.
        """
        usual = self._usual_seconds

        def rank(state: TaskState, more: int) -> float:
            gain_us = state.hoped_gain_us(more) if more else state.expected_gain_us()
            return gain_us / max(state.round_seconds(usual), _SECONDS_MIN)

        waiting = [one for one in self._by_hash.values() if not one.left_alone]
        heap = [(-rank(one, 0), number, 0) for number, one in enumerate(waiting)]
        heapq.heapify(heap)
        reached: set[int] = set()
        for _ in range(rounds if heap else 0):
            _, number, more = heap[0]
            reached.add(number)
            heapq.heapreplace(heap, (-rank(waiting[number], more + 1), number, more + 1))
        for number, state in enumerate(waiting):
            if number not in reached and state.open and state.idle:
                self.end(state, f"{SETTLED}: the candidates that are left are for tasks that promise more")

    def close(self, why: str) -> None:
        """End every open task as soon as nothing of it is on its way: there are no candidates left for it."""
        if self._closed is None:
            self._closed = why
            for state in self._by_hash.values():
                self.changed(state)

    def reopen(self, state: TaskState) -> None:
        """Look at a task again that more models have now; `take_settled` returns it again when it is over."""
        if state.ended is not None and state.ended.startswith(SETTLED):
            state.ended = None
        state.reported = False
        self.changed(state)

    def _reason_to_end(self, state: TaskState) -> str | None:
        """Return why a task is not worth another round, or None when it is; templates are measured in any case."""
        if state.templates is not None and not state.templates.done:
            return None
        gain_us, model_us = state.gain_us, self.model_us
        if gain_us < self._min_gain * model_us:
            return f"{SETTLED}: a round is expected to save {gain_us:.2f} of {model_us:.0f} us"
        bound_us = self._bound_us(state)
        if bound_us is not None and state.best_us is not None and bound_us > state.best_us:
            return f"no search: without tensor cores at least {bound_us:.1f} us, the best is {state.best_us:.1f}"
        return None

    def _bound_us(self, state: TaskState) -> float | None:
        if self._target is None:
            return None
        key = state.task.workload_hash
        if key not in self._bounds:
            self._bounds[key] = search_bound_us(state.task, self._target)
        return self._bounds[key]

    @property
    def _usual_seconds(self) -> float:
        """The seconds of a round, the average of all."""
        return self._seconds / self._rounds if self._rounds else 1.0


def _promise(state: TaskState, usual_s: float) -> tuple[bool, float, float]:
    """Return the key by which the next task is chosen; among equal promises the larger kernel comes first."""
    size = state.task.weight * (state.before_us or state.task.flops)
    return state.begins_near, state.gain_us / max(state.round_seconds(usual_s), _SECONDS_MIN), size


def summarise(states: Sequence[TaskState]) -> tuple[TaskSummary, ...]:
    """Return the summaries of all tasks, those that take most of the model's time first."""
    times = [state.task.weight * (state.best_us or 0.0) for state in states]
    total = sum(times)
    summaries = [
        TaskSummary(
            task=state.task,
            valid=state.valid,
            failed=state.failures.total(),
            failures=dict(sorted(state.failures.items())),
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
