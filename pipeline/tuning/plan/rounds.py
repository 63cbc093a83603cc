"""The rounds of a tuning run: tasks are asked for candidates while those of others are built and measured.

Everything here happens in the thread that tunes: it hands candidates in, takes back what is finished, records it and
lets the search learn. The cost model learns from a batch once three quarters of it are back. Slow builds do not hold
their task up; the model learns from them when they arrive.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from relaxtune.pipeline.errors import MeasuringBrokenError, UsageError
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.spans import span
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.evaluate import Evaluator, Finished, Job
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.plan.beginnings import FIRST_INFORMED, Beginnings
from relaxtune.pipeline.tuning.plan.end_of_task import SETTLED
from relaxtune.pipeline.tuning.plan.feed import Arrival, TaskFeed
from relaxtune.pipeline.tuning.plan.finals import Finals
from relaxtune.pipeline.tuning.plan.in_flight import Batch, Tag
from relaxtune.pipeline.tuning.plan.recorder import Recorder
from relaxtune.pipeline.tuning.plan.search_pool import Proposal, SearchPool
from relaxtune.pipeline.tuning.plan.state import (
    Contender,
    TaskState,
    decision_key,
    median_latency_us,
)
from relaxtune.pipeline.tuning.plan.task_queue import TaskQueue
from relaxtune.pipeline.tuning.progress import ProgressEvent, ProgressListener, estimate_left
from relaxtune.pipeline.tuning.search.template_candidates import OFFERED_ROUTES
from relaxtune.schedules.search.space import find_refusal
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Route

logger = logging.getLogger(__name__)

# Rounds in which a task proposed nothing new, before it counts as exhausted.
_EMPTY_ROUNDS_MAX = 2
_ROUND_MIN = 4
# Share of a batch that must be back before the model learns from it and its task goes on.
_QUORUM = 0.75
# So many candidates lost one after another are no accident.
_LOST_MAX = 16
_WAIT_S = 0.2
# A task is left out where twice as many rounds as are left would not come to it: others may end sooner than they seem
# to. It is looked for again when a fifth of those rounds is over.
_LEFT_OUT = 2
_FEWER = 0.8


@dataclass(frozen=True)
class Admitted:
    """What an arrival means to a run: new tasks, known ones whose weight grew, and what limits the run from now on."""

    new: Sequence[TaskState]
    heavier: Sequence[TaskState]
    dropped: Sequence[TaskState]
    trials: int | None
    spent: int
    models: int


class Rounds:
    """The loop of a run.

    Parameters
    ----------
    states : sequence of TaskState
        The tasks, those to be left alone already marked.
    workers : int
        Build processes, which are kept busy.
    spent : int
        Candidates of earlier runs of the same job, which count against the trials.
    searches : SearchPool
        Where tasks are searched.
    feed, admit : optional
        What gives more tasks while the run goes on, and what makes states of them; `states` has them from then on.
    """

    def __init__(
        self,
        states: Sequence[TaskState],
        evaluator: Evaluator,
        recorder: Recorder,
        target: ResolvedTarget,
        options: TuningOptions,
        progress: ProgressListener,
        stop: StopSignal,
        *,
        workers: int,
        spent: int,
        searches: SearchPool,
        feed: TaskFeed | None = None,
        admit: Callable[[Arrival], Admitted] | None = None,
    ) -> None:
        self._states = states
        self._queue = TaskQueue(target, options.min_gain)
        self._queue.add(states)
        self._feed = feed
        self._admit = admit
        self._trials = options.trials
        self._evaluator = evaluator
        self._recorder = recorder
        self._target = target
        self._options = options
        self._progress = progress
        self._stop = stop
        self._workers = workers
        self._spent = spent
        self._searches = searches
        self._beginnings = Beginnings(
            evaluator, recorder, target, on_device=options.device_references, propose=self._template_round
        )
        self._finals = Finals(evaluator.backend, recorder, stop, evaluator.wake, rounds=options.finals)
        self._lost = 0
        self._began = time.monotonic()
        self._flushed = 0.0
        # Rounds that were left when tasks were last left out.
        self._looked_at = math.inf

    def begin(self, states: Sequence[TaskState]) -> None:
        """Hand in the references of tasks; what else is measured of a task follows its reference."""
        self._beginnings.begin(states)

    def run(self) -> None:
        """Search, hand in and take back until the trials or the time are used up, or nothing promises anything."""
        self._began = time.monotonic()
        while not self._stop.due:
            self._take_back(0)
            self._listen()
            self._end_early()
            state = self._next_task() if self._has_room() else None
            if state is not None:
                self._round(state)
                self._queue.touch(state)
            elif not self._idle:
                self._take_back(_WAIT_S)
            elif self._feed is not None and self._arriving:
                with span("driver: wait for cells"):
                    self._feed.wait(_WAIT_S)
            elif self._feed is None or not self._end_all():
                break
        self._drain()
        self._hold_finals(self._queue.take_rest())
        self._await_finals()

    def take(self, admitted: Admitted) -> None:
        """Go on with what came of an arrival."""
        self._trials, self._spent, self._queue.models = admitted.trials, admitted.spent, admitted.models
        self._queue.add(admitted.new)
        for state in admitted.heavier:
            if state.ended is not None and state.ended.startswith(SETTLED):
                self._queue.reopen(state)
            self._queue.touch(state)
            self._queue.tell_again(state)
        for state in admitted.dropped:
            state.ended = state.ended or "no model wants it any more"
            self._queue.touch(state)

    def _listen(self) -> None:
        """Take in tasks that came, and tell of those that are settled."""
        if self._feed is None or self._admit is None:
            return
        while True:
            idle = self._idle
            self._queue.refresh(self._in_flight_max)
            if idle or not self._evaluator.exclusive:
                self._hold_finals(self._queue.take_settled())
            if self._evaluator.exclusive:
                self._await_finals()
            arrivals = self._feed.take(idle=idle)
            for arrival in arrivals:
                with span("driver: admit"):
                    admitted = self._admit(arrival)
                    self.take(admitted)
                with span("driver: begin tasks"):
                    self.begin(admitted.new)
            if not arrivals or not idle:
                return

    def _end_early(self) -> None:
        """End tasks that what is left of the candidates is not for, so that their models can be finished."""
        remaining = self._remaining()
        if remaining is None or self._arriving:
            return
        if remaining == 0:
            self._queue.close("the candidates of the run are used up")
        rounds = math.ceil(_LEFT_OUT * remaining / self._round_size())
        beside = self._feed is not None and not self._evaluator.exclusive
        if beside and not self._beginnings.due and rounds < min(len(self._states), _FEWER * self._looked_at):
            self._looked_at = rounds
            self._queue.end_left_out(rounds)

    def _end_all(self) -> bool:
        """End what is open, since nothing is left to choose; return whether something was."""
        self._queue.close("the candidates of the run are used up")
        self._queue.refresh(self._in_flight_max)
        settled = self._queue.take_settled()
        self._hold_finals(settled)
        return bool(settled)

    def _hold_finals(self, settled: Sequence[TaskState]) -> None:
        """Hand in the finals of settled tasks; tell the feed of those that need none."""
        self._tell_settled(self._finals.hold(settled))

    def _take_finals(self) -> None:
        """Take in the finals that are back, and tell the feed of their tasks."""
        back = self._finals.take()
        for state in back:
            self._queue.touch(state)
        # A task that was taken up meanwhile is told of when it is over again.
        self._tell_settled([state for state in back if state.over])

    def _await_finals(self) -> None:
        while self._finals.out:
            self._take_back(_WAIT_S)

    def _tell_settled(self, states: Sequence[TaskState]) -> None:
        for state in (one for one in states if one.over):
            self._searches.forget(state)
            for one in state.release():
                self._evaluator.builder.discard(one)
        if states and self._feed is not None:
            self._recorder.try_flush()
            self._feed.settled([state.task.workload_hash for state in states])

    @property
    def _idle(self) -> bool:
        """Whether nothing is built, measured or searched for."""
        return not (self._evaluator.pending or self._searches.running or self._finals.out)

    @property
    def _arriving(self) -> bool:
        return self._feed is not None and self._feed.arriving

    def _has_room(self) -> bool:
        if self._evaluator.exclusive:
            return self._idle
        if 0 < self._beginnings.due < self._evaluator.pending:
            # First proposals of tasks whose reference is still being built come before another task's second.
            return False
        return self._evaluator.builder.waiting < self._workers and self._searches.running < self._searches.threads

    def _next_task(self) -> TaskState | None:
        """Return the task to ask next; what is not worth another round is ended here."""
        if self._remaining() == 0:
            return None
        return self._queue.choose(self._in_flight_max)

    @property
    def _in_flight_max(self) -> float:
        return (1 - _QUORUM) * self._round_size()

    def _round(self, state: TaskState) -> None:
        """Hand in the next candidates of one task: those of templates first, then of the search."""
        remaining = self._remaining()
        size = self._round_size() if remaining is None else min(self._round_size(), remaining)
        if state.templates is not None and not state.templates.done:
            self._template_round(state, self._round_size())
        elif Route.METASCHEDULE not in self._options.routes:
            state.ended = "no search was asked for"
        elif (refusal := find_refusal(state.task.mod["main"])) is not None:
            state.ended = f"no search: {refusal.reason}"
        else:
            begins = bool(state.near.traces) and not state.near_begun
            state.near_begun = True
            self._searches.submit(state, min(size, FIRST_INFORMED) if begins else size)

    def _template_round(self, state: TaskState, wanted: int) -> None:
        remaining = self._remaining()
        size = wanted if remaining is None else min(wanted, remaining)
        if state.templates is None or size == 0:
            return
        spec = self._spec_of(state)
        chosen = state.templates.propose(size)
        batch = Batch(state, len(chosen), len(chosen))
        tags = [Tag(state, one.route, one.decision, batch) for one in chosen]
        self._hand_in(
            state, [(Job(one.recipe(self._target), spec), tag) for one, tag in zip(chosen, tags, strict=True)]
        )

    def _take_proposal(self, proposal: Proposal) -> None:
        """Hand in what a task's search proposed."""
        state = proposal.state
        state.seconds += proposal.seconds
        if proposal.failure is not None:
            state.skipped = f"its search failed: {proposal.failure}"
            return
        if not proposal.candidates:
            state.ended = "exhausted: the search found nothing more"
            return
        keyed = [(decision_key(one.decision), one) for one in proposal.candidates]
        fresh = [one for key, one in keyed if key not in state.decided and key not in state.on_way][: proposal.size]
        state.empty_rounds = 0 if fresh else state.empty_rounds + 1
        if state.empty_rounds >= _EMPTY_ROUNDS_MAX:
            state.ended = "exhausted: the search proposes what was measured"
        batch = Batch(state, len(fresh), len(fresh))
        batch.back = [(one, state.decided[key]) for key, one in keyed if key in state.decided]
        if not fresh or self._stop.due:
            self._close(batch)
            return
        spec = self._spec_of(state)
        tags = [Tag(state, Route.METASCHEDULE, one.decision, batch, one) for one in fresh]
        self._hand_in(state, [(Job(one.measure.sch.mod, spec), tag) for one, tag in zip(fresh, tags, strict=True)])

    def _hand_in(self, state: TaskState, jobs: list[tuple[Job, Tag]]) -> None:
        state.in_flight += len(jobs)
        state.on_way |= {decision_key(tag.decision) for _, tag in jobs}
        # They count against the candidates of the run from now on.
        self._queue.touch(state)
        self._evaluator.submit(jobs)

    def _spec_of(self, state: TaskState) -> WorkloadSpec:
        if state.spec is None:
            raise UsageError(f"task {state.task.name} has no reference to compare candidates with.")
        return replace(state.spec, best_s=None if state.best_us is None else state.best_us / 1e6)

    def _take_back(self, timeout_s: float) -> None:
        """Take what is finished, waiting so long for the first."""
        with span("driver: wait"):
            finished = self._evaluator.take(timeout_s)
        while finished is not None:
            self._take(finished)
            finished = self._evaluator.take(0)
        for proposal in self._searches.take():
            self._take_proposal(proposal)
            self._queue.touch(proposal.state)
        self._take_finals()
        if time.monotonic() - self._flushed > self._recorder.flush_interval_s:
            self._recorder.try_flush()
            self._flushed = time.monotonic()

    def _drain(self) -> None:
        """Take back what was handed in before the end; when the run is stopped, most of it comes back given up."""
        while self._evaluator.pending or (self._searches.running and not self._stop.due):
            self._take_back(_WAIT_S)

    def _take(self, finished: Finished) -> None:
        tag = finished.tag
        if not isinstance(tag, Tag):
            raise TypeError(f"expected a candidate of this run back, got {type(tag).__name__}")
        state, outcome = tag.state, finished.outcome
        self._queue.touch(state)
        if tag.reference:
            self._beginnings.take(tag, finished)
            return
        if tag.route is Route.FALLBACK:
            state.fallback_due = False
        else:
            state.in_flight -= 1
        state.on_way.discard(decision_key(tag.decision))
        if isinstance(outcome.status, Unmeasured):
            self._lose(tag, outcome)
        else:
            self._lost = 0
            self._record(tag, outcome, finished.artifact)
        if isinstance(outcome.status, Unmeasured) and finished.artifact is not None:
            self._evaluator.builder.discard(finished.artifact)
        if tag.batch is not None:
            self._advance(tag.batch, tag, outcome)

    def _lose(self, tag: Tag, outcome: Outcome) -> None:
        """Go on without a candidate that nothing is known of; this run does not ask for it again."""
        if outcome.status is Unmeasured.STOPPED:
            return
        self._lost += 1
        told = f"a candidate of task {tag.state.task.name} was lost and is not recorded: {last_line(outcome.error)}"
        logger.warning("%s", told)
        logger.debug("%s", outcome.error)
        if self._lost > _LOST_MAX:
            raise MeasuringBrokenError(f"{_LOST_MAX} candidates in a row were lost, through no fault of theirs; {told}")
        if tag.route is Route.FALLBACK:
            tag.state.ready = True
        else:
            tag.state.decided[decision_key(tag.decision)] = None

    def _record(self, tag: Tag, outcome: Outcome, artifact: BuiltArtifact | None) -> None:
        state = tag.state
        self._recorder.add(state.task, tag.route, tag.decision, outcome)
        state.take(tag.route, outcome)
        if self._feed is not None and state.best_us is not None:
            self._feed.improved(state.task.workload_hash, state.best_us)
        state.seconds += outcome.duration_s
        latency_us = median_latency_us(outcome)
        dropped = [] if artifact is None else [artifact]
        if latency_us is not None and artifact is not None:
            contender = Contender(tag.route, tag.decision, latency_us, artifact, min(outcome.seconds) * 1e6)
            dropped = [one.artifact for one in state.keep(contender) if one.artifact is not None]
        for one in dropped:
            self._evaluator.builder.discard(one)
        if outcome.no_reference:
            state.skipped = "the reference cannot be computed"
        if tag.route is Route.FALLBACK:
            state.ready = True
            return
        state.decided[decision_key(tag.decision)] = None if latency_us is None else latency_us / 1e6
        if tag.route in OFFERED_ROUTES and state.templates is not None:
            state.templates.learn(tag.decision, latency_us)
        self._tell(state)

    def _advance(self, batch: Batch, tag: Tag, outcome: Outcome) -> None:
        batch.left -= 1
        if not isinstance(outcome.status, Unmeasured) and tag.candidate is not None:
            batch.back.append((tag.candidate, batch.state.decided.get(decision_key(tag.decision))))
        if batch.left == 0 or (batch.left <= (1 - _QUORUM) * batch.size and not batch.closed):
            self._close(batch)

    def _close(self, batch: Batch) -> None:
        """Learn from what is back of a batch."""
        state = batch.state
        if not batch.closed:
            state.close_round()
        batch.closed = True
        back, batch.back = batch.back, []
        self._searches.teach(state, back)

    def _round_size(self) -> int:
        """Return the candidates of a round: fewer when the trials would not give every task one."""
        size = self._options.trials_per_iteration
        if self._trials is None:
            return size
        return max(1, min(size, max(_ROUND_MIN, self._trials // max(1, len(self._states)))))

    def _tell(self, state: TaskState) -> None:
        now = time.monotonic()
        budget_left = None if self._stop.deadline is None else max(0.0, self._stop.deadline - now)
        self._queue.touch(state)
        self._queue.tally()
        valid, failed = self._queue.valid, self._queue.failed
        total = None if self._trials is None else max(self._trials - self._spent, valid + failed)
        left = estimate_left(valid + failed, total, now - self._began, budget_left)
        self._progress.candidate_measured(
            ProgressEvent(
                state.task.name,
                valid + failed,
                total,
                valid,
                failed,
                state.best_us,
                left,
                state.task.workload_hash,
                self._evaluator.backend.capacity,
            )
        )

    def _remaining(self) -> int | None:
        if self._trials is None:
            return None
        self._queue.tally()
        return max(0, self._trials - self._spent - self._queue.asked)
