"""The loop of a tuning run: a task proposes candidates while those of others are built and measured.

::

    choose a task (tasks) ─▶ propose (search) ─▶ build, measure (candidates) ─▶ record (record) ─▶ learn

All of it happens in the thread that tunes; other threads answer through one inbox (`Evaluator.take`). The cost model
learns from a round once three quarters of it are back. Slow builds do not hold their task up; the model learns from
them when they arrive.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.spans import span
from relaxtune.pipeline.tuning.admission import Admission, TaskFeed
from relaxtune.pipeline.tuning.beginnings import FIRST_INFORMED, Beginnings
from relaxtune.pipeline.tuning.candidates import Candidate, Evaluator, Purpose, State
from relaxtune.pipeline.tuning.finals import Final, Finals
from relaxtune.pipeline.tuning.measure.backend import Unmeasured
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.options import FINALS_SHARE, TuningOptions
from relaxtune.pipeline.tuning.progress import OnCandidate, ProgressEvent, estimate_left
from relaxtune.pipeline.tuning.search.evolution import Proposal, SearchPool, SearchRequest
from relaxtune.pipeline.tuning.task_start import OFFERED_ROUTES
from relaxtune.pipeline.tuning.tasks import TaskState
from relaxtune.schedules.search.space import find_refusal
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.targets.host import physical_cores
from relaxtune.tuning_db.records import Route

_WAIT_S = 0.2
# Rounds in which a task proposed nothing new, before it counts as exhausted.
_EMPTY_ROUNDS_MAX = 2
# Share of a round that must be back before the model learns from it and its task goes on.
_QUORUM = 0.75
# A task ends that would get no round even of twice the rounds that are left: other tasks may end early. Tasks are
# looked at again when a fifth of those rounds is over.
_LEFT_OUT = 2
_FEWER = 0.8
# Tasks searched at the same time, where that disturbs no measurement.
_SEARCHES_MAX = 4
_USED_UP = "the candidates of the run are used up"


class TuningLoop:
    """One run from its first proposal to its last record.

    `feed` gives more tasks while the run goes on; it gets the best latencies, and the tasks that are over.
    """

    def __init__(
        self,
        admission: Admission,
        evaluator: Evaluator,
        target: ResolvedTarget,
        options: TuningOptions,
        progress: OnCandidate | None,
        stop: StopSignal,
        feed: TaskFeed | None,
    ) -> None:
        self._admission, self._tasks, self._recorder = admission, admission.tasks, admission.recorder
        self._evaluator, self._options = evaluator, options
        self._progress, self._stop, self._feed = progress, stop, feed
        workers = options.workers or physical_cores()
        threads = 1 if evaluator.exclusive else max(1, min(_SEARCHES_MAX, workers // 2))
        self._search_threads = max(1, workers // threads)
        self._searches = SearchPool(threads, evaluator.inbox.put)
        self._beginnings = Beginnings(
            evaluator, self._recorder, target, on_device=options.device_references, propose=self._propose_templates
        )
        # Candidates of the run.
        self._in_flight = self._valid = self._failed = 0
        self._finals = Finals(evaluator.backend, self._recorder, options.finals, stop, evaluator.inbox.put)
        self._began_s = time.monotonic()
        # Rounds that were left when tasks were last left out.
        self._rounds_left = math.inf

    def run(self, began_s: float) -> None:
        """Tune until the trials or the time are used up, or nothing promises anything; everything measured is recorded.

        `began_s` is when the run began, for the seconds of its start.
        """
        seconds = self._admission.seconds
        try:
            # The processes start meanwhile.
            with span("driver: begin"):
                self._admission.begin(self._tasks.states)
            with span("driver: begin tasks"):
                self._beginnings.begin(self._tasks.states)
            self._began_s = time.monotonic()
            seconds["start"] += self._began_s - began_s
            self._go_round()
        finally:
            self._recorder.close()
            self._searches.close()
            seconds.update(self._evaluator.seconds)
            seconds["search"] += self._searches.clock.seconds

    def _go_round(self) -> None:
        while not self._stop.due:
            self._take_back(0)
            self._listen()
            self._end_early()
            in_flight_max = (1 - _QUORUM) * self._admission.round_size
            state = self._tasks.choose(in_flight_max) if self._has_room() and self._remaining else None
            if state is not None:
                self._propose(state)
            elif not self._idle:
                self._take_back(_WAIT_S)
            elif self._feed is None:
                break
            elif self._feed.arriving:
                with span("driver: wait for cells"):
                    self._feed.wait(_WAIT_S)
            else:
                # Nothing is left to choose.
                self._tasks.close(_USED_UP)
                settled = self._tasks.take_settled()
                self._hold_finals(settled)
                if not settled:
                    break
        # When the run is stopped, most candidates come back unmeasured.
        while self._evaluator.pending or (self._searches.running and not self._stop.due):
            self._take_back(_WAIT_S)
        self._hold_last_finals()

    # Proposals.

    def _propose(self, state: TaskState) -> None:
        if state.templates is not None and not state.templates.done:
            self._propose_templates(state, self._admission.round_size)
        elif Route.METASCHEDULE not in self._options.routes:
            self._tasks.end(state, "the routes have no search")
        elif (refusal := find_refusal(state.task.mod["main"])) is not None:
            self._tasks.end(state, f"no search: {refusal.reason}")
        else:
            self._search(state)

    def _propose_templates(self, state: TaskState, wanted: int) -> None:
        size = int(min(wanted, self._remaining))
        if state.templates is not None and size:
            self._hand_in(state, state.templates.propose(size))

    def _search(self, state: TaskState) -> None:
        """Let the search of a task learn and propose; the proposal arrives in the inbox."""
        begins_near = bool(state.near.traces) and not state.near_begun
        size = int(min(FIRST_INFORMED if begins_near else self._admission.round_size, self._remaining))
        state.near_begun = state.searching = True
        self._tasks.changed(state)
        lessons, state.lessons = state.lessons, []
        self._searches.submit(
            SearchRequest(
                state.task.workload_hash,
                size,
                lambda: state.search or self._admission.new_search(state, self._search_threads),
                lessons,
                state.near.traces,
                # The other thread must not see it change.
                frozenset(state.decided),
            )
        )

    def _take_proposal(self, proposal: Proposal) -> None:
        request = self._searches.running.pop(proposal.request.workload)
        state = self._tasks.get(request.workload)
        state.searching, state.search = False, proposal.search
        state.near = replace(state.near, traces=tuple(proposal.near))
        state.seconds += proposal.seconds
        if proposal.failure is not None:
            state.skipped = f"its search failed: {proposal.failure}"
        elif not proposal.candidates:
            state.ended = "exhausted: the search found nothing more"
        else:
            known = [one for one in proposal.candidates if one.key in state.decided]
            state.lessons += [(one, state.decided[one.key]) for one in known]
            fresh = [one for one in proposal.candidates if one.key not in state.decided.keys() | state.on_way]
            state.empty_rounds = 0 if fresh else state.empty_rounds + 1
            if state.empty_rounds >= _EMPTY_ROUNDS_MAX:
                state.ended = "exhausted: the search proposes what was measured"
            if fresh and not self._stop.due:
                self._hand_in(state, fresh[: request.size])
            else:
                state.close_round()
        self._tasks.changed(state)

    def _hand_in(self, state: TaskState, candidates: Sequence[Candidate]) -> None:
        if state.spec is None:
            raise UsageError(f"task {state.task.name} has no reference to compare candidates with.")
        spec = replace(state.spec, best_s=None if state.best_us is None else state.best_us / 1e6)
        state.in_flight += len(candidates)
        self._in_flight += len(candidates)
        state.on_way |= {one.key for one in candidates}
        state.round_size = len(candidates)
        self._tasks.changed(state)
        self._evaluator.submit([one.handed_in(spec) for one in candidates])

    # Answers.

    def _take_back(self, timeout_s: float) -> None:
        """Take everything that arrived, waiting so long for the first."""
        with span("driver: wait"):
            events = self._evaluator.take(timeout_s)
        while events is not None:
            for event in events:
                self._take(event)
            events = self._evaluator.take(0)
        self._recorder.flush_if_due()

    def _take(self, event: object) -> None:
        match event:
            case Candidate(purpose=Purpose.KERNEL):
                self._take_candidate(event)
            case Candidate():
                state = self._tasks.get(event.workload.workload)
                self._beginnings.take(state, event)
                self._tasks.changed(state)
            case Proposal():
                self._take_proposal(event)
            case Final():
                self._finals.take(event)
                self._tasks.changed(event.state)
                # A task that was taken up meanwhile is reported when it is over again.
                self._report_settled([event.state] if event.state.over else [])
            case _:
                raise TypeError(f"expected an answer to this run, got {type(event).__name__}")

    def _take_candidate(self, candidate: Candidate) -> None:
        state = self._tasks.get(candidate.workload.workload)
        state.on_way.discard(candidate.key)
        if candidate.route is Route.FALLBACK:
            state.fallback_due = False
        else:
            state.in_flight -= 1
            self._in_flight -= 1
        if candidate.state is State.LOST:
            self._lose(state, candidate)
        else:
            self._record(state, candidate)
        if state.round_size and state.in_flight <= (1 - _QUORUM) * state.round_size:
            state.close_round()
        self._tasks.changed(state)

    def _lose(self, state: TaskState, candidate: Candidate) -> None:
        """Go on without a candidate, of which nothing is known; this run does not propose it again."""
        outcome = candidate.outcome
        if candidate.artifact is not None:
            self._evaluator.builder.discard(candidate.artifact)
        if outcome is None or outcome.status is Unmeasured.STOPPED:
            return
        if outcome.no_reference:
            # The other candidates of the task are lost for the same reason.
            state.skipped = "memory is too small for its reference"
        self._recorder.lose(state.task, outcome)
        if candidate.route is Route.FALLBACK:
            state.ready = True
        else:
            state.decided[candidate.key] = None

    def _record(self, state: TaskState, candidate: Candidate) -> None:
        recorded = self._recorder.add(state.task, candidate)
        state.take(candidate)
        if self._feed is not None and state.best_us is not None:
            self._feed.improved(state.task.workload_hash, state.best_us)
        if candidate.outcome is not None:
            state.seconds += candidate.outcome.duration_s
            if candidate.outcome.no_reference:
                state.skipped = "the reference cannot be computed"
        valid = candidate.state is State.MEASURED
        for one in state.keep(recorded) if valid else [recorded]:
            if one.artifact is not None:
                self._evaluator.builder.discard(one.artifact)
        if candidate.route is Route.FALLBACK:
            state.ready = True
            return
        self._valid += valid
        self._failed += not valid
        latency_us = candidate.latency_us
        state.decided[candidate.key] = None if latency_us is None else latency_us / 1e6
        if candidate.schedule is not None:
            state.lessons.append((candidate, state.decided[candidate.key]))
        if candidate.route in OFFERED_ROUTES and state.templates is not None:
            state.templates.learn(candidate.decision, latency_us)
        self._report_progress(state)

    def _report_progress(self, state: TaskState) -> None:
        if self._progress is None:
            return
        now, done = time.monotonic(), self._valid + self._failed
        budget_left = None if self._stop.deadline is None else max(0.0, self._stop.deadline - now)
        trials = self._admission.trials
        total = None if trials is None else max(trials - self._admission.spent, done)
        self._progress(
            ProgressEvent(
                state.task.name,
                done,
                total,
                self._valid,
                self._failed,
                state.best_us,
                estimate_left(done, total, now - self._began_s, budget_left),
                state.task.workload_hash,
                self._evaluator.backend.capacity,
            )
        )

    # The ends of tasks.

    def _listen(self) -> None:
        """Let tasks of the feed join, and report tasks that are over."""
        if self._feed is None:
            return
        while True:
            idle = self._idle
            if idle or not self._evaluator.exclusive:
                self._hold_finals(self._tasks.take_settled())
            if self._evaluator.exclusive:
                self._await_finals()
            arrivals = self._feed.take(idle=idle)
            for arrival in arrivals:
                with span("driver: admit"):
                    new = self._admission.admit(arrival)
                    self._admission.begin(new)
                with span("driver: begin tasks"):
                    self._beginnings.begin(new)
            if not arrivals or not idle:
                return

    def _end_early(self) -> None:
        """End tasks whose share of the remaining candidates is zero; their models can then be compiled."""
        remaining = self._remaining
        if math.isinf(remaining) or self._feed is None or self._feed.arriving:
            return
        if remaining == 0 and not self._searches.running:
            # A search may find fewer candidates than it was to propose; other tasks take the rest.
            self._tasks.close(_USED_UP)
        rounds = math.ceil(_LEFT_OUT * remaining / self._admission.round_size)
        ends_early = not self._evaluator.exclusive and not self._beginnings.due
        if ends_early and rounds < min(len(self._tasks), _FEWER * self._rounds_left):
            self._rounds_left = rounds
            self._tasks.end_left_out(rounds)

    def _hold_finals(self, settled: Sequence[TaskState]) -> None:
        self._report_settled([state for state in settled if not self._finals.hold(state)])

    def _hold_last_finals(self) -> None:
        """Hold the finals of all other tasks while their share of the time lasts, those of the most time first."""
        deadline = self._stop.deadline
        until = math.inf if deadline is None else deadline + FINALS_SHARE * (deadline - self._began_s)
        rest = sorted(self._tasks.take_rest(), key=lambda one: one.task.weight * (one.best_us or 0.0), reverse=True)
        for state in rest:
            if time.monotonic() < until:
                self._hold_finals([state])
            else:
                self._report_settled([state])
            while self._finals.running >= self._evaluator.backend.capacity:
                self._take_back(_WAIT_S)
        self._await_finals()

    def _await_finals(self) -> None:
        while self._finals.running:
            self._take_back(_WAIT_S)

    def _report_settled(self, states: Sequence[TaskState]) -> None:
        for state in (one for one in states if one.over):
            for artifact in state.release():
                self._evaluator.builder.discard(artifact)
        if states and self._feed is not None:
            self._recorder.try_flush()
            self._feed.settled([state.task.workload_hash for state in states])

    # Limits.

    @property
    def _remaining(self) -> float:
        """Candidates that may still be handed in; infinite without a limit."""
        trials = self._admission.trials
        if trials is None:
            return math.inf
        taken = self._admission.spent + self._valid + self._failed + self._in_flight + self._searches.promised
        return max(0, trials - taken)

    @property
    def _idle(self) -> bool:
        return not (self._evaluator.pending or self._searches.running or self._finals.running)

    def _has_room(self) -> bool:
        if self._evaluator.exclusive:
            return self._idle
        if 0 < self._beginnings.due < self._evaluator.pending:
            # First proposals of tasks whose reference is still being built come before another task's second.
            return False
        builder, searches = self._evaluator.builder, self._searches
        return builder.waiting < builder.capacity and len(searches.running) < searches.threads
