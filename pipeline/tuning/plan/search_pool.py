"""Searches of several tasks at the same time, beside the thread that tunes.

MetaSchedule searches in C++ and releases Python's lock meanwhile. A task's search and its learning never overlap. The
cost model, which all tasks share, has a lock of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from relaxtune.pipeline.tuning.measure.clock import BusyClock
from relaxtune.pipeline.tuning.plan.state import TaskState, decision_key
from relaxtune.pipeline.tuning.search.evolution import Candidate, TaskSearch
from relaxtune.tuning_db.metaschedule import REPLAY_ERRORS

logger = logging.getLogger(__name__)

MakeSearch = Callable[[TaskState], TaskSearch]
# A candidate and its median seconds, None for a failure.
Lesson = tuple[Candidate, float | None]


@dataclass(frozen=True)
class Proposal:
    """What a task's search came back with: candidates, or why it failed."""

    state: TaskState
    size: int
    candidates: Sequence[Candidate]
    seconds: float
    failure: str | None = None


class SearchPool:
    """Threads in which tasks are searched.

    Parameters
    ----------
    threads : int
        Tasks searched at the same time.
    make_search : callable
        Starts the search of a task.
    on_done : callable
        Called, in another thread, when a search is over.
    """

    def __init__(self, threads: int, make_search: MakeSearch, on_done: Callable[[], None]) -> None:
        self.threads = threads
        self.clock = BusyClock()
        self._make_search = make_search
        self._on_done = on_done
        self._lessons: dict[int, list[Lesson]] = {}
        self._running: list[Future[Proposal]] = []
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="relaxtune-search")

    @property
    def running(self) -> int:
        """Searches that are not taken back yet."""
        return len(self._running)

    def submit(self, state: TaskState, size: int) -> None:
        """Let a task's search learn from what came back and propose candidates; `size` of them will be taken."""
        lessons = self._lessons.pop(id(state), [])
        state.searching = size
        # What is decided is read in the other thread, which must not see it change.
        decided = frozenset(state.decided)
        future = self._executor.submit(self._search, state, size, lessons, decided)
        future.add_done_callback(lambda _: self._on_done())
        self._running.append(future)

    def teach(self, state: TaskState, lessons: Sequence[Lesson]) -> None:
        """Keep what came back of a task's candidates for when it is searched again."""
        self._lessons.setdefault(id(state), []).extend(lessons)

    def forget(self, state: TaskState) -> None:
        """Give up what a task's search was to learn next: the task is over."""
        self._lessons.pop(id(state), None)

    def take(self) -> list[Proposal]:
        """Return the searches that are over, in the order in which they began."""
        done = [future for future in self._running if future.done()]
        self._running = [future for future in self._running if future not in done]
        found = [future.result() for future in done]
        for proposal in found:
            proposal.state.searching = 0
        return found

    def close(self) -> None:
        """Wait for the searches in hand, which nothing can stop, and end the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _search(self, state: TaskState, size: int, lessons: Sequence[Lesson], decided: frozenset[str]) -> Proposal:
        began = time.monotonic()
        self.clock.enter()
        failure = None
        candidates: list[Candidate] = []
        try:
            if state.search is None:
                state.search = self._make_search(state)
            if lessons:
                state.search.learn([one for one, _ in lessons], [None if s is None else [s] for _, s in lessons])
            while state.near.traces and not candidates:
                tried, left = state.near.traces[:size], state.near.traces[size:]
                state.near = replace(state.near, traces=left)
                adopted = state.search.adopt(tried)
                if any(decision_key(one.decision) not in decided for one in adopted):
                    candidates = adopted
            candidates = candidates or state.search.propose()
        except REPLAY_ERRORS as e:
            # A space that cannot be searched must not end the other tasks' run.
            lines = str(e).strip().splitlines()
            failure = lines[-1] if lines else type(e).__name__
            logger.warning("the search of task %s failed: %s", state.task.name, failure)
        finally:
            self.clock.leave()
        return Proposal(state, size, candidates, time.monotonic() - began, failure)
