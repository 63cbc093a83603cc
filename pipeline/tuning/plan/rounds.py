"""The rounds of a tuning run: tasks are asked for candidates while those of others are built and measured.

Everything here happens in the thread that tunes. `in_flight` hands candidates in, takes back what is finished, records
it and lets the search learn. The cost model learns from a batch once three quarters of it are back. Slow builds do not
hold their task up; the model learns from them when they arrive.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relaxtune.pipeline.spans import span
from relaxtune.pipeline.tuning.measure.evaluate import Evaluator, Finished
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.plan.beginnings import Beginnings
from relaxtune.pipeline.tuning.plan.end_of_task import SETTLED
from relaxtune.pipeline.tuning.plan.feed import Arrival, TaskFeed
from relaxtune.pipeline.tuning.plan.finals import Finals
from relaxtune.pipeline.tuning.plan.in_flight import InFlight, Tag
from relaxtune.pipeline.tuning.plan.recorder import Recorder
from relaxtune.pipeline.tuning.plan.search_pool import SearchPool
from relaxtune.pipeline.tuning.plan.state import TaskState
from relaxtune.pipeline.tuning.plan.task_queue import TaskQueue
from relaxtune.pipeline.tuning.progress import ProgressListener
from relaxtune.schedules.targets import ResolvedTarget

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
        self._evaluator = evaluator
        self._recorder = recorder
        self._stop = stop
        self._workers = workers
        self._searches = searches
        self._in_flight = InFlight(
            states, self._queue, evaluator, recorder, target, options, progress, stop,
            spent=spent, searches=searches, feed=feed,
        )  # fmt: skip
        self._beginnings = Beginnings(
            evaluator,
            recorder,
            target,
            on_device=options.device_references,
            propose=self._in_flight.propose_templates,
        )
        self._finals = Finals(evaluator.backend, recorder, stop, evaluator.wake, rounds=options.finals)
        self._flushed = 0.0
        # Rounds that were left when tasks were last left out.
        self._looked_at = math.inf

    def begin(self, states: Sequence[TaskState]) -> None:
        """Hand in the references of tasks; what else is measured of a task follows its reference."""
        self._beginnings.begin(states)

    def run(self) -> None:
        """Search, hand in and take back until the trials or the time are used up, or nothing promises anything."""
        self._in_flight.began = time.monotonic()
        while not self._stop.due:
            self._take_back(0)
            self._listen()
            self._end_early()
            state = self._next_task() if self._has_room() else None
            if state is not None:
                self._in_flight.propose(state)
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
        self._in_flight.trials, self._in_flight.spent = admitted.trials, admitted.spent
        self._queue.models = admitted.models
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
            self._queue.refresh(self._in_flight.per_task_max)
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
        remaining = self._in_flight.remaining
        if remaining is None or self._arriving:
            return
        if remaining == 0 and not self._searches.running:
            # A search may find fewer than it was asked for; others take the rest.
            self._queue.close("the candidates of the run are used up")
        rounds = math.ceil(_LEFT_OUT * remaining / self._in_flight.round_size)
        beside = self._feed is not None and not self._evaluator.exclusive
        if beside and not self._beginnings.due and rounds < min(len(self._states), _FEWER * self._looked_at):
            self._looked_at = rounds
            self._queue.end_left_out(rounds)

    def _end_all(self) -> bool:
        """End what is open, since nothing is left to choose; return whether something was."""
        self._queue.close("the candidates of the run are used up")
        self._queue.refresh(self._in_flight.per_task_max)
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
        if self._in_flight.remaining == 0:
            return None
        return self._queue.choose(self._in_flight.per_task_max)

    def _take_back(self, timeout_s: float) -> None:
        """Take what is finished, waiting so long for the first."""
        with span("driver: wait"):
            finished = self._evaluator.take(timeout_s)
        while finished is not None:
            self._take(finished)
            finished = self._evaluator.take(0)
        for proposal in self._searches.take():
            self._in_flight.take_proposal(proposal)
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
        self._queue.touch(tag.state)
        (self._beginnings if tag.reference else self._in_flight).take(tag, finished)
