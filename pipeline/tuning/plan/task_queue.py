"""Which task is worth the next round: a decision that takes as long for 20,000 tasks as for twenty.

A task's rank is the time that a round may save in all models, per second that a round of it takes. It changes only when
something comes back of that task, so ranks lie in heaps. `touch` marks a task whose rank may have changed; an entry of
a heap that is older than its task's last change is passed over. Tasks that had no round yet take as many seconds as a
usual one, which changes with every candidate: they have heaps of their own, where that common factor does not matter.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from relaxtune.pipeline.tuning.plan.end_of_task import SETTLED, reason_to_end
from relaxtune.pipeline.tuning.plan.matmul_bound import search_bound_us
from relaxtune.pipeline.tuning.plan.state import TaskState
from relaxtune.schedules.targets import ResolvedTarget

# A rank, the task's size among equal ranks (both negative: the heap's first is the best), its change, its number.
_Entry = tuple[float, float, int, int]
_SECONDS_MIN = 1e-3


@dataclass(frozen=True)
class _Share:
    """What a task adds to the sums over all tasks."""

    us: float = 0.0
    rounds: int = 0
    seconds: float = 0.0
    asked: int = 0
    valid: int = 0
    failed: int = 0


class TaskQueue:
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
    asked, valid, failed
        Candidates of all tasks: those handed in or being searched for, and what came of those that are back.
    """

    def __init__(self, target: ResolvedTarget | None = None, min_gain: float = 0.0) -> None:
        self._target = target
        self._min_gain = min_gain
        self.models = 1
        self.asked = self.valid = self.failed = 0
        self._us = 0.0
        self._rounds = 0
        self._seconds = 0.0
        self._states: list[TaskState] = []
        self._numbers: dict[int, int] = {}
        self._shares: list[_Share] = []
        self._changes: list[int] = []
        self._bounds: dict[int, float | None] = {}
        self._touched: set[int] = set()
        # Those whose share of the sums is not up to date; fewer, since sums are asked for more often than ranks.
        self._uncounted: set[int] = set()
        self._new: dict[bool, list[_Entry]] = {True: [], False: []}
        self._begun: dict[bool, list[_Entry]] = {True: [], False: []}
        self._weakest: list[tuple[float, int, int]] = []
        self._over: set[int] = set()
        self._closed: str | None = None
        self._settled: list[TaskState] = []

    def add(self, states: Iterable[TaskState]) -> None:
        """Take in more tasks."""
        for state in states:
            number = self._numbers[id(state)] = len(self._states)
            self._states.append(state)
            self._shares.append(_Share())
            self._changes.append(0)
            self._touch(number)

    def touch(self, state: TaskState) -> None:
        """Note that something about a task has changed."""
        self._touch(self._numbers[id(state)])

    @property
    def model_us(self) -> float:
        """Microseconds of all kernels of one inference of a model, the average of all, with the best known of each."""
        return self._us / max(1, self.models)

    def choose(self, in_flight_max: float = 0.0) -> TaskState | None:
        """Return the open task whose next round promises most: time saved per second of tuning.

        What is not worth another round is ended here. Tasks that begin with one candidate of a near shape come first.

        Parameters
        ----------
        in_flight_max : float
            A task with more candidates on their way is passed over.
        """
        self.refresh(in_flight_max)
        self._end_weak()
        usual = self._seconds / self._rounds if self._rounds else 1.0
        for near in (True, False):
            new, begun = self._top(self._new[near]), self._top(self._begun[near])
            if new is None and begun is None:
                continue
            if new is None or begun is None:
                return self._states[(new or begun or (0, 0, 0, 0))[3]]
            rank = (new[0] / max(usual, _SECONDS_MIN), new[1])
            return self._states[new[3] if rank <= begun[:2] else begun[3]]
        return None

    def refresh(self, in_flight_max: float = 0.0) -> None:
        """Bring the sums and the heaps up to date with the tasks that were touched; end what promises too little."""
        self.tally()
        touched, self._touched = self._touched, set()
        for number in touched:
            state = self._states[number]
            self._changes[number] += 1
            if state.open and state.in_flight == 0 and not state.searching:
                why = reason_to_end(state, self.model_us, self._min_gain, self._bound(number, state))
                state.ended = why or self._closed
            self._note_end(number, state)
            if state.open and not state.searching and state.in_flight <= in_flight_max:
                self._push(number, state)

    def tally(self) -> None:
        """Bring the sums up to date with the tasks that were touched."""
        uncounted, self._uncounted = self._uncounted, set()
        for number in uncounted:
            self._count(number, self._states[number])

    def take_settled(self) -> list[TaskState]:
        """Return the tasks that are done, each once: nothing more of them will be measured."""
        settled, self._settled = self._settled, []
        return settled

    def take_rest(self) -> list[TaskState]:
        """Return those, and all others too: the run is over."""
        rest = [state for number, state in enumerate(self._states) if number not in self._over]
        self._over |= {self._numbers[id(state)] for state in rest}
        return [*self.take_settled(), *rest]

    def end_left_out(self, rounds: int) -> None:
        """End the tasks that so many more rounds will not come to, even if those save nothing.

        Their models need not wait for the end of the run.
        """
        self.tally()
        usual = self._seconds / self._rounds if self._rounds else 1.0

        def rank(state: TaskState, more: int) -> float:
            gain_us = state.hoped_gain_us(more) if more else state.expected_gain_us()
            return gain_us / max(state.round_seconds(usual), _SECONDS_MIN)

        waiting = [number for number, state in enumerate(self._states) if state.skipped is None and state.ended is None]
        heap = [(-rank(self._states[number], 0), number, 0) for number in waiting]
        heapq.heapify(heap)
        reached: set[int] = set()
        for _ in range(rounds if heap else 0):
            _, number, more = heap[0]
            reached.add(number)
            heapq.heapreplace(heap, (-rank(self._states[number], more + 1), number, more + 1))
        for number in waiting:
            state = self._states[number]
            if number not in reached and state.open and not (state.in_flight or state.searching):
                state.ended = f"{SETTLED}: the candidates that are left are for tasks that promise more"
                self._changes[number] += 1
                self._note_end(number, state)

    def close(self, why: str) -> None:
        """End every open task as soon as nothing of it is on its way: there are no candidates left for it."""
        if self._closed is None:
            self._closed = why
            self._touched |= set(range(len(self._states)))

    def reopen(self, state: TaskState) -> None:
        """Take a task that ended back in, since more models have it now."""
        number = self._numbers[id(state)]
        state.ended = None
        self._over.discard(number)
        self._touch(number)

    def tell_again(self, state: TaskState) -> None:
        """Let `take_settled` return a task again, if it is over."""
        number = self._numbers[id(state)]
        if number in self._over:
            self._over.discard(number)
            self._touch(number)

    def _touch(self, number: int) -> None:
        self._touched.add(number)
        self._uncounted.add(number)

    def _push(self, number: int, state: TaskState) -> None:
        change, gain_us = self._changes[number], state.expected_gain_us()
        size = state.task.weight * (state.before_us or state.task.flops)
        if state.rounds:
            rank = gain_us / max(state.round_seconds(1.0), _SECONDS_MIN)
            heapq.heappush(self._begun[state.begins_near], (-rank, -size, change, number))
        else:
            heapq.heappush(self._new[state.begins_near], (-gain_us, -size, change, number))
        if state.in_flight == 0 and (state.templates is None or state.templates.done):
            heapq.heappush(self._weakest, (gain_us, change, number))

    def _top(self, heap: list[_Entry]) -> _Entry | None:
        while heap and heap[0][2] != self._changes[heap[0][3]]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _end_weak(self) -> None:
        """End the tasks that promise too little by now, since others were added or got faster."""
        least_us = self._min_gain * self.model_us
        while self._weakest and self._weakest[0][0] < least_us:
            _, change, number = heapq.heappop(self._weakest)
            state = self._states[number]
            if change == self._changes[number] and state.open:
                state.ended = reason_to_end(state, self.model_us, self._min_gain, self._bound(number, state))
                if state.ended is not None:
                    self._changes[number] += 1
                    self._note_end(number, state)

    def _note_end(self, number: int, state: TaskState) -> None:
        if state.over and number not in self._over:
            self._over.add(number)
            self._settled.append(state)

    def _bound(self, number: int, state: TaskState) -> float | None:
        if self._target is None:
            return None
        if number not in self._bounds:
            self._bounds[number] = search_bound_us(state.task, self._target)
        return self._bounds[number]

    def _count(self, number: int, state: TaskState) -> None:
        before = self._shares[number]
        us = state.task.weight * (state.best_us or state.before_us or 0.0)
        asked = state.valid + state.failed + state.in_flight + state.searching
        now = _Share(us, state.rounds, state.seconds, asked, state.valid, state.failed)
        self._shares[number] = now
        self._us += now.us - before.us
        self._rounds += now.rounds - before.rounds
        self._seconds += now.seconds - before.seconds
        self.asked += now.asked - before.asked
        self.valid += now.valid - before.valid
        self.failed += now.failed - before.failed
