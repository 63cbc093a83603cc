"""Candidates in flight: handed in to be built and measured, then taken back, recorded and learnt from."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from relaxtune.pipeline.errors import MeasuringBrokenError, UsageError
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.evaluate import Evaluator, Finished, Job
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.plan.feed import TaskFeed
from relaxtune.pipeline.tuning.plan.recorder import Recorder
from relaxtune.pipeline.tuning.plan.search_pool import Lesson, Proposal, SearchPool
from relaxtune.pipeline.tuning.plan.state import Contender, TaskState, decision_key, median_latency_us
from relaxtune.pipeline.tuning.plan.task_queue import TaskQueue
from relaxtune.pipeline.tuning.progress import ProgressEvent, ProgressListener, estimate_left
from relaxtune.pipeline.tuning.search.evolution import Candidate
from relaxtune.pipeline.tuning.search.template_candidates import OFFERED_ROUTES
from relaxtune.schedules.search.space import find_refusal
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Route

logger = logging.getLogger(__name__)

# First candidates of a task about which something is known, such as records of a near shape.
FIRST_INFORMED = 1
# Rounds in which a task proposed nothing new, before it counts as exhausted.
_EMPTY_ROUNDS_MAX = 2
_ROUND_MIN = 4
# Share of a batch that must be back before the model learns from it and its task goes on.
_QUORUM = 0.75
# So many candidates lost one after another are no accident.
_LOST_MAX = 16


@dataclass
class Batch:
    """Candidates of one round. `left` are on their way; the model has not learnt from those in `back` yet."""

    state: TaskState
    size: int
    left: int
    back: list[Lesson] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True)
class Tag:
    """What a job on its way is: a candidate, a fallback, or a `reference` (the CPU's, or the device's)."""

    state: TaskState
    route: Route
    decision: str
    batch: Batch | None = None
    candidate: Candidate | None = None
    reference: bool = False
    on_device: bool = False


class InFlight:
    """The candidates of a run on their way: proposed, handed in, and taken back.

    Parameters
    ----------
    states : sequence of TaskState
        The tasks of the run, those that come later too.
    spent : int
        Candidates of earlier runs of the same job, which count against the trials.
    feed : TaskFeed or None
        Told when a task's best latency falls.

    Attributes
    ----------
    trials, spent
        What limits the run (None: no limit), and what of it is used up by earlier runs.
    began
        When the run began, by `time.monotonic`.
    """

    def __init__(
        self,
        states: Sequence[TaskState],
        queue: TaskQueue,
        evaluator: Evaluator,
        recorder: Recorder,
        target: ResolvedTarget,
        options: TuningOptions,
        progress: ProgressListener,
        stop: StopSignal,
        *,
        spent: int,
        searches: SearchPool,
        feed: TaskFeed | None,
    ) -> None:
        self._states = states
        self._queue = queue
        self._evaluator = evaluator
        self._recorder = recorder
        self._target = target
        self._options = options
        self._progress = progress
        self._stop = stop
        self._searches = searches
        self._feed = feed
        self._lost = 0
        self.trials = options.trials
        self.spent = spent
        self.began = time.monotonic()

    @property
    def remaining(self) -> int | None:
        """Candidates that may still be handed in; None without a limit."""
        if self.trials is None:
            return None
        self._queue.tally()
        return max(0, self.trials - self.spent - self._queue.asked)

    @property
    def round_size(self) -> int:
        """Candidates of a round: fewer when the trials would not give every task one."""
        size = self._options.trials_per_iteration
        if self.trials is None:
            return size
        return max(1, min(size, max(_ROUND_MIN, self.trials // max(1, len(self._states)))))

    @property
    def per_task_max(self) -> float:
        """Candidates of a task that may be in flight when it is asked again."""
        return (1 - _QUORUM) * self.round_size

    def propose(self, state: TaskState) -> None:
        """Hand in the next candidates of one task: those of templates first, then of the search."""
        remaining = self.remaining
        size = self.round_size if remaining is None else min(self.round_size, remaining)
        if state.templates is not None and not state.templates.done:
            self.propose_templates(state, self.round_size)
        elif Route.METASCHEDULE not in self._options.routes:
            state.ended = "no search was asked for"
        elif (refusal := find_refusal(state.task.mod["main"])) is not None:
            state.ended = f"no search: {refusal.reason}"
        else:
            begins = bool(state.near.traces) and not state.near_begun
            state.near_begun = True
            self._searches.submit(state, min(size, FIRST_INFORMED) if begins else size)

    def propose_templates(self, state: TaskState, wanted: int) -> None:
        """Hand in so many candidates of a task's templates, or as many as the trials leave."""
        remaining = self.remaining
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

    def take_proposal(self, proposal: Proposal) -> None:
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

    def take(self, tag: Tag, finished: Finished) -> None:
        """Record a candidate that is back, or a fallback, and learn from it."""
        state, outcome = tag.state, finished.outcome
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
        if outcome.no_reference:
            # Those of the task that are on their way go the same way.
            tag.state.skipped = "memory is too small for its reference"
        else:
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

    def _tell(self, state: TaskState) -> None:
        now = time.monotonic()
        budget_left = None if self._stop.deadline is None else max(0.0, self._stop.deadline - now)
        self._queue.touch(state)
        self._queue.tally()
        valid, failed = self._queue.valid, self._queue.failed
        total = None if self.trials is None else max(self.trials - self.spent, valid + failed)
        left = estimate_left(valid + failed, total, now - self.began, budget_left)
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
