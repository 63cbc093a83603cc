"""The tasks of a tuning run, and the choice of the next one."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tasks.similar_shapes import NearRecords
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.candidates import Candidate, State
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
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
# Inputs to the choice of a task: with a row for each, a choice among 20,000 is a few vector operations.
_ROW = np.dtype(
    [
        ("us", float),  # Of all its calls in one inference, with the best kernel known.
        ("rounds", int),
        ("seconds", float),
        ("gain_us", float),
        ("size", float),
        ("begins_near", bool),
        ("in_flight", int),
        ("free", bool),  # It is open, and its search is not running.
        ("may_settle", bool),  # It may end for what it promises: all candidates of its templates are back.
        ("is_line", bool),  # It is a size of a table.
    ]
)


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
    row: int = -1  # Its place among the `Tasks`.

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

    def round_seconds(self, usual: float) -> float:
        """Return the seconds of a round of this task; `usual` for one that had none."""
        return self.seconds / self.rounds if self.rounds else usual


class Tasks:
    """The tasks of a run, and which of them is next.

    `target`: the target of the kernels; it may bound the reach of a search. None leaves that aside. `min_gain`: a task
    ends when a round of it promises less than this part of a model's kernel time.
    """

    def __init__(self, target: ResolvedTarget | None = None, min_gain: float = 0.0) -> None:
        self._target = target
        self._min_gain = min_gain
        #: Models that the tasks are of: `min_gain` is of one of them, on average.
        self.models = 1
        self._by_hash: dict[str, TaskState] = {}
        self._bounds: dict[str, float | None] = {}
        self._closed: str | None = None
        self._settled: list[TaskState] = []
        self._rows = np.zeros(0, _ROW)
        self._us = 0.0  # The sum of a column of them.

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
        added = {state.task.workload_hash: state for state in states}
        for row, state in enumerate(added.values(), len(self)):
            state.row = row
        self._by_hash |= added
        self._rows = np.concatenate([self._rows, np.zeros(len(added), _ROW)])
        for state in added.values():
            self.changed(state)

    @property
    def model_us(self) -> float:
        """Microseconds of all kernels of one inference of a model, the average of all, with the best known of each."""
        return self._us / max(1, self.models)

    def choose(self, in_flight_max: float = 0.0) -> TaskState | None:
        """Return the open task whose next round promises most: time saved in all models per second of tuning.

        Tasks that begin with one candidate of a near shape come first, and the larger kernel among equal promises.
        Tasks that are not worth another round end.

        Tasks with more than `in_flight_max` candidates in flight are skipped.
        """
        rows, states = self._rows, self.states
        for row in np.flatnonzero(rows["may_settle"] & (rows["gain_us"] < self._min_gain * self.model_us)):
            self.changed(states[int(row)])
        chosen = np.flatnonzero(rows["free"] & (rows["in_flight"] <= in_flight_max))
        if not chosen.size:
            return None
        own_s = rows["seconds"] / np.maximum(rows["rounds"], 1)
        round_s = np.maximum(np.where(rows["rounds"] > 0, own_s, self._usual_seconds), _SECONDS_MIN)
        behind = _times_of_best_line(states, chosen[rows["is_line"][chosen]])
        for score in (rows["begins_near"], behind * rows["gain_us"] / round_s, rows["size"]):
            chosen = chosen[score[chosen] == score[chosen].max()]
        return states[int(chosen[0])]

    def changed(self, state: TaskState) -> None:
        """Take in what was decided about a task, handed in or came back: its rank changes, it may end, or be over."""
        known_us = state.task.weight * (state.best_us or state.before_us or 0.0)
        self._us += known_us - float(self._rows[state.row]["us"])
        gain_us = state.expected_gain_us()
        may_end = state.open and state.idle
        may_settle = may_end and (state.templates is None or state.templates.done)
        if may_end:
            state.ended = (self._reason_to_end(state, gain_us) if may_settle else None) or self._closed
        self._rows[state.row] = (
            known_us,
            state.rounds,
            state.seconds,
            gain_us,
            state.task.weight * (state.before_us or state.task.flops),
            state.begins_near,
            state.in_flight,
            state.open and not state.searching,
            may_settle,
            bool(state.task.tables),
        )
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
        waiting = [one for one in self._by_hash.values() if not one.left_alone]
        round_s = {one.row: max(one.round_seconds(usual), _SECONDS_MIN) for one in waiting}
        waiting.sort(key=lambda one: one.expected_gain_us() / round_s[one.row], reverse=True)
        ranks = np.array([one.expected_gain_us() / round_s[one.row] for one in waiting])
        # After n rounds, a round that follows others that saved nothing has the rank hope / n.
        hope = _HOPE * np.array([self._rows["us"][one.row] / round_s[one.row] for one in waiting])
        done = np.array([len(one.progress) for one in waiting])

        def rounds_before(number: int) -> int:
            """Return the rounds that tasks of a higher rank get before this one gets its first."""
            more = hope[:number] / max(ranks[number], 1e-12) - done[:number]
            return number + int(np.minimum(np.maximum(0, np.ceil(more) - 1), rounds).sum())

        for state in waiting[bisect_left(range(len(waiting)), rounds, key=rounds_before) :]:
            if state.open and state.idle:
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

    def _reason_to_end(self, state: TaskState, gain_us: float) -> str | None:
        model_us, key = self.model_us, state.task.workload_hash
        if gain_us < self._min_gain * model_us:
            return f"{SETTLED}: the next round would save about {max(0.0, gain_us):.2f} of {model_us:.0f} us"
        if self._target is not None and key not in self._bounds:
            self._bounds[key] = search_bound_us(state.task, self._target)
        bound_us = self._bounds.get(key)
        if bound_us is not None and state.best_us is not None and bound_us > state.best_us:
            return f"no search: without tensor cores at least {bound_us:.1f} us, the best is {state.best_us:.1f}"
        return None

    @property
    def _usual_seconds(self) -> float:
        rounds = self._rows["rounds"].sum()
        return float(self._rows["seconds"].sum() / rounds) if rounds else 1.0


def _times_of_best_line(states: Sequence[TaskState], lines: Iterable[int]) -> np.ndarray:
    """Return for each line of a table how many times as long it takes as at the rates of the table's best lines.

    The rates are operations and bytes a microsecond. A line far from them has more to win than one that reaches them.
    For all other tasks it is 1.
    """
    behind, known, best = np.ones(len(states)), [], dict[tuple[str, str], np.ndarray]()
    for place in lines:
        one, of = states[place], states[place].task.tables[0]
        if one.best_us:
            rates = np.array([one.task.flops, one.task.bytes]) / one.best_us
            known.append((place, (of.model, of.function), rates))
            best[of.model, of.function] = np.maximum(best.get((of.model, of.function), 0.0), rates)
    for place, table, rates in known:
        behind[place] = 1 / max(rate / most for rate, most in zip(rates, best[table], strict=True) if most > 0.0)
    return behind
