"""The search for one task: MetaSchedule's evolutionary search, one round at a time; `SearchPool` runs several.

MetaSchedule searches in C++ and releases Python's lock meanwhile. A task's search and its learning never overlap. The
cost model, which all tasks share, has a lock of its own.
"""

from __future__ import annotations

import ctypes
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import tvm
from tvm.s_tir import Schedule, Trace, meta_schedule as ms

from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.measure.backend import BusyClock
from relaxtune.schedules.search.space import QuietTuneContext
from relaxtune.schedules.search.tensor_tile import form_of
from relaxtune.tuning_db.metaschedule import REPLAY_ERRORS, trace_to_json
from relaxtune.tuning_db.records import Route

# Gives memory that was freed back to the system.
#
# TVM's schedules are small objects made and freed by many threads. glibc keeps what a thread freed for that thread, in
# heaps of their own, so that a process that searches for long takes more than it uses (`malloc_trim(3)`, `mallopt(3)`).


def return_freed_memory() -> bool:
    """Give freed memory back; return whether the C library here offers that (glibc does) and there was any."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


logger = logging.getLogger(__name__)

# MetaSchedule's search ends after so many candidates; the run's own limits come first.
_TRIALS_MAX = 1 << 20
# Generations between two rounds. Each mutates the whole population, runs the postprocessors on it and asks the cost
# model about it: most of the time of a search.
_GENERATIONS = 1
# Candidates after which a search begins again from its best, so many of them.
_RENEW_AFTER = 512
_PARENTS = 64
# The latency of a failed candidate for MetaSchedule's cost model and database.
_FAILED_S = 1e10


# Trace, raw seconds and argument infos of a measured candidate.
Parent = tuple[Trace, Sequence[float], Sequence[ms.arg_info.ArgInfo]]
# A candidate and its median seconds, None for a failure.
Lesson = tuple[Candidate, float | None]


def runner_results(seconds: Sequence[Sequence[float] | None]) -> list[ms.runner.RunnerResult]:
    """Return raw seconds as MetaSchedule's search and cost model take them; None is a failure."""
    return [
        ms.runner.RunnerResult(list(values), None) if values else ms.runner.RunnerResult(None, "failed")
        for values in seconds
    ]


def _candidate(item: ms.MeasureCandidate) -> Candidate:
    return Candidate(Route.METASCHEDULE, trace_to_json(item.sch.trace), item.sch.mod, item)


class TaskSearch:
    """Proposes candidates of one task and learns from their results.

    A search has its own `space`, which keeps state; the searches of a run may share `cost_model`. `known` are
    MetaSchedule records of earlier runs, parents from the first round on. For the numbers see `TuningOptions`.
    """

    def __init__(
        self,
        mod: tvm.ir.IRModule,
        target: tvm.target.Target,
        space: ms.SpaceGenerator,
        cost_model: ms.CostModel,
        known: Sequence[ms.database.TuningRecord],
        *,
        name: str,
        seed: int,
        per_round: int,
        population: int,
        threads: int,
    ) -> None:
        self._mod = mod
        self._target = target
        self._space = space
        self._cost_model = cost_model
        self._name, self._seed = name, seed
        self._per_round, self._population, self._threads = per_round, population, threads
        self._begin([(record.trace, record.run_secs, record.args_info) for record in known])

    def _begin(self, parents: Sequence[Parent]) -> None:
        """Begin a search from the traces of some measured candidates."""
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=self._population,
            # Each round draws anew: more than half a round of fresh random schedules is of little use (stock: 50).
            init_min_unmeasured=min(max(1, self._per_round // 2), self._population),
            genetic_num_iters=_GENERATIONS,
        )
        # MetaSchedule takes seeds from 1 on.
        seed_from_one = 1 + self._seed % (2**31 - 2)
        self.context = QuietTuneContext(
            self._mod, self._target, self._space, strategy, name=self._name, seed=seed_from_one, threads=self._threads
        )
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._mod)
        for trace, run_secs, args_info in parents:
            self._database.commit_tuning_record(
                ms.database.TuningRecord(trace, self._workload, run_secs, self._target, args_info)
            )
        self.spaces = self.context.generate_design_space()
        # A task left to its template has no space (`schedules.search.space.find_refusal`).
        self._open = bool(self.spaces)
        if self._open:
            self.context.pre_tuning(_TRIALS_MAX, self._per_round, self.spaces, self._database, self._cost_model)
        self._learnt = 0

    def _renew(self) -> None:
        """Begin again from the best: MetaSchedule keeps the module of every candidate, and that is megabytes."""
        best = self._database.get_top_k(self._workload, _PARENTS)
        parents = [(record.trace, record.run_secs, record.args_info) for record in best]
        self.close()
        self._seed += 1
        self._begin(parents)

    def propose(self) -> list[Candidate]:
        """Return the candidates of the next round; none when the space is exhausted."""
        found = self.context.generate_measure_candidates() if self._open else None
        return [_candidate(item) for item in found or []]

    def adopt(self, decisions: Sequence[str]) -> list[Candidate]:
        """Return the candidates that traces of another shape give here; those that do not fit are left out.

        Tile sizes that do not divide an extent are replaced by TVM; the postprocessors run as for any candidate.
        """
        args_info = ms.arg_info.ArgInfo.from_entry_func(self.context.mod, False)
        forms = {form_of(design.mod["main"]) for design in self.spaces}
        found: dict[str, Candidate] = {}
        for decision in decisions:
            schedule = Schedule(self.context.mod, error_render_level="none")
            try:
                with self._target:
                    record = ms.database.TuningRecord.from_json(
                        [json.loads(decision), None, None, None], self._workload
                    )
                    record.trace.apply_to_schedule(schedule, remove_postproc=True)
                    schedule.enter_postproc()
                    fits = form_of(schedule.mod["main"]) in forms and all(
                        rule.apply(schedule) for rule in self.context.space_generator.postprocs
                    )
            except REPLAY_ERRORS:
                continue
            if fits:
                candidate = _candidate(ms.MeasureCandidate(schedule, args_info))
                found.setdefault(candidate.decision, candidate)
        return list(found.values())

    def learn(self, candidates: Sequence[Candidate], seconds: Sequence[Sequence[float] | None]) -> None:
        """Take in the raw seconds of a round's candidates; None for one that failed."""
        measured = [candidate.schedule for candidate in candidates if candidate.schedule is not None]
        results = runner_results(seconds)
        for item, values in zip(measured, seconds, strict=True):
            self._database.commit_tuning_record(
                ms.database.TuningRecord(
                    item.sch.trace,
                    self._workload,
                    list(values) if values else [_FAILED_S],
                    self._target,
                    item.args_info,
                )
            )
        self.context.notify_runner_results(measured, results)
        self._cost_model.update(self.context, measured, results)
        self._learnt += len(measured)
        if self._learnt >= _RENEW_AFTER:
            self._renew()
            return_freed_memory()

    def close(self) -> None:
        """End the search."""
        if self._open:
            self.context.post_tuning()
        self._open = False


@dataclass(frozen=True)
class SearchRequest:
    """A round of search for a task."""

    # The task, and how many of the candidates it will take.
    workload: str
    size: int
    begin: Callable[[], TaskSearch]  # Returns the task's search, which takes long the first time.
    lessons: Sequence[Lesson]  # Measured candidates to learn from first.
    # Traces of near shapes to try first, and the keys of decisions that are not worth a try.
    near: Sequence[str]
    decided: frozenset[str]


@dataclass(frozen=True)
class Proposal:
    """The answer to a request: candidates, or why the search failed; `near` has the traces that are not tried yet."""

    request: SearchRequest
    search: TaskSearch | None
    candidates: Sequence[Candidate]
    near: Sequence[str]
    seconds: float
    failure: str | None = None


class SearchPool:
    """Threads in which tasks are searched.

    `on_proposal` is called with each proposal, in a thread of the pool.
    """

    def __init__(self, threads: int, on_proposal: Callable[[Proposal], None]) -> None:
        self.threads = threads
        self.clock = BusyClock()
        #: Requests that are not answered yet, by workload.
        self.running: dict[str, SearchRequest] = {}
        self._on_proposal = on_proposal
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="relaxtune-search")

    @property
    def promised(self) -> int:
        """Candidates that the running searches will hand in."""
        return sum(request.size for request in self.running.values())

    def submit(self, request: SearchRequest) -> None:
        """Let a task's search learn and propose candidates; returns at once."""
        self.running[request.workload] = request
        future = self._executor.submit(self._search, request)
        future.add_done_callback(lambda done: None if done.cancelled() else self._on_proposal(done.result()))

    def close(self) -> None:
        """Wait for the running searches, which nothing can stop, and end the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _search(self, request: SearchRequest) -> Proposal:
        began = time.monotonic()
        search, failure, candidates, near = None, None, list[Candidate](), list(request.near)
        self.clock.enter()
        try:
            search = request.begin()
            if request.lessons:
                measured, seconds = zip(*request.lessons, strict=True)
                search.learn(measured, [None if one is None else [one] for one in seconds])
            while near and not candidates:
                tried, near = near[: request.size], near[request.size :]
                adopted = search.adopt(tried)
                if any(one.key not in request.decided for one in adopted):
                    candidates = adopted
            candidates = candidates or search.propose()
        except REPLAY_ERRORS as e:
            # A space that cannot be searched must not end the other tasks' run.
            lines = str(e).strip().splitlines()
            failure = lines[-1] if lines else type(e).__name__
            logger.warning("the search of workload %s failed: %s", request.workload, failure)
        finally:
            self.clock.leave()
        return Proposal(request, search, candidates, near, time.monotonic() - began, failure)
