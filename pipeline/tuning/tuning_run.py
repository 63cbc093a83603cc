"""One tuning run: its tasks, what is known of each from earlier runs, and what came of it.

A run has one cost model, which learns from all tasks, and one search per task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.spans import span
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.measure.evaluate import Evaluator
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.options import TuningOptions, TuningSummary
from relaxtune.pipeline.tuning.plan.feed import Arrival, TaskFeed
from relaxtune.pipeline.tuning.plan.recorder import Recorder
from relaxtune.pipeline.tuning.plan.resume import (
    EarlierRuns,
    end_what_was_done,
    find_earlier_runs,
    measured_since,
    take_known,
)
from relaxtune.pipeline.tuning.plan.rounds import Admitted, Rounds
from relaxtune.pipeline.tuning.plan.search_pool import SearchPool
from relaxtune.pipeline.tuning.plan.state import TaskState, summarise
from relaxtune.pipeline.tuning.plan.task_start import TaskStart
from relaxtune.pipeline.tuning.plan.warm_start import WarmStart
from relaxtune.pipeline.tuning.progress import ProgressListener
from relaxtune.pipeline.tuning.search.cost_model import WARMUP_CANDIDATES, FastCostModel
from relaxtune.pipeline.tuning.search.evolution import TaskSearch
from relaxtune.pipeline.tuning.search.freed_memory import return_freed_memory
from relaxtune.pipeline.tuning.search.template_candidates import OFFERED_ROUTES
from relaxtune.pipeline.tuning.search.template_search import TemplateSearch
from relaxtune.schedules.search.space import make_space
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.targets.host import physical_cores
from relaxtune.tuning_db.metaschedule import top_records
from relaxtune.tuning_db.records import Environment, Mode, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase

# Parents of the first round, from the records of earlier runs.
_SEEDS = 64
# Tasks searched at the same time, where that disturbs no measurement.
_SEARCHES_MAX = 4
_FEED_WAIT_S = 0.2
# Freed memory is given back after so many new tasks: a cell comes as bytes, then as objects, and much of both is freed.
_RETURN_EVERY = 256

# Returns those of a task's records that are still true of the kernels that this version makes.
StillTrue = Callable[[TuningTask, Sequence[TuningRecord]], Sequence[TuningRecord]]


@dataclass(eq=False)
class TuningRun:
    """One run; the fields are the parameters of `tune`."""

    tasks: list[TuningTask]
    target: ResolvedTarget
    database: TuningDatabase
    environment: Environment
    options: TuningOptions
    job_id: str | None
    progress: ProgressListener
    stop: StopSignal
    still_true: StillTrue
    feed: TaskFeed | None

    def __post_init__(self) -> None:
        """Begin without a task."""
        self.seconds = dict.fromkeys(("start", "search", "build", "queue", "measure", "database"), 0.0)
        self._states: list[TaskState] = []
        self._by_hash: dict[str, TaskState] = {}
        self._known: dict[int, Sequence[TuningRecord]] = {}
        self._models = 0
        # A feed gives candidates with every model.
        self._trials = self.options.trials if self.feed is None else 0
        key, seed = target_key(self.target), self.options.seed
        self._recorder = Recorder(
            self.database, key, self.environment, job_id=self.job_id, seed=seed, seconds=self.seconds
        )
        self._cost_model = FastCostModel(WARMUP_CANDIDATES, seed)
        self._warm_start = WarmStart(self._cost_model, self.database, self.target, self.environment, self.options)
        self._spent = 0
        self._interrupted = False
        self._restarts = 0
        self._returned_at = 0

    def listen(self, arrivals: Sequence[Arrival]) -> bool:
        """Take in what the feed had already; return whether more tasks are on their way."""
        if self.feed is None or self.stop.due:
            return False
        self._admit_all(self.feed, arrivals)
        return self.feed.arriving and not self._has_work()

    def prepare(self) -> bool:
        """Record the workloads and take in what is known of each; return whether there is anything to measure."""
        if self.feed is None:
            self._admit(Arrival(tuple(self.tasks), self.options.trials))
            return self._has_work()
        while not self.stop.due:
            arrivals = self.feed.take(idle=True)
            self._admit_all(self.feed, arrivals)
            if self._has_work():
                return True
            if not arrivals and not self.feed.arriving:
                break
            if not arrivals:
                with span("driver: wait for cells"):
                    self.feed.wait(_FEED_WAIT_S)
        return False

    def _admit_all(self, feed: TaskFeed, arrivals: Sequence[Arrival]) -> None:
        """Take in what a feed gave, before anything is measured."""
        for arrival in arrivals:
            with span("driver: admit"):
                admitted = self._admit(arrival)
            told = [*admitted.new, *admitted.heavier]
            feed.settled([one.task.workload_hash for one in told if one.skipped or one.ended])

    def _has_work(self) -> bool:
        to_do = self._to_do()
        begun = any(state.before_us is None for state in to_do)
        return begun or bool(to_do and (self._trials is None or self._spent < self._trials))

    def _admit(self, arrival: Arrival) -> Admitted:
        """Take in tasks: record new ones, and let them begin with what is known; known ones get more weight."""
        options = self.options
        heavier: list[TaskState] = []
        fresh: list[TuningTask] = []
        for task in arrival.tasks:
            known_state = self._by_hash.get(task.workload_hash)
            if known_state is None:
                fresh.append(task)
            else:
                known_state.task = known_state.task.joined(task)
                heavier.append(known_state)
        self._recorder.start([*fresh, *(state.task for state in heavier)])
        records: list[TuningRecord] = []
        holding: list[TaskState] = []
        new: list[TaskState] = []
        forced = options.mode is Mode.FORCE
        hashes = [task.workload_hash for task in fresh]
        runs = EarlierRuns() if forced else find_earlier_runs(self.database, self.job_id, hashes, options)
        for task in fresh:
            begins = arrival.starts.get(task.workload_hash)
            if begins is None or begins.routes != options.routes:
                begins = TaskStart(task, self.target, options.routes)
            state = self._by_hash[task.workload_hash] = TaskState(task, begins=begins)
            new.append(state)
            recorded = [] if forced else self._recorder.known(task)
            known = self.still_true(task, recorded)
            records += known
            if measured_since(known, recorded):
                holding.append(state)
            self._spent += take_known(state, known, options, runs)
            self._known[id(state)] = known
        end_what_was_done(holding, records, runs)
        self._states += new
        self._models += bool(arrival.tasks)
        if self.feed is not None:
            self._trials = (
                None if None in (self._trials, arrival.trials) else (self._trials or 0) + (arrival.trials or 0)
            )
        for state in new:
            if self.feed is not None and state.best_us is not None:
                self.feed.improved(state.task.workload_hash, state.best_us)
        dropped = [self._by_hash[one] for one in sorted(arrival.dropped & self._by_hash.keys())]
        return Admitted(new, heavier, dropped, self._trials, self._spent, max(1, self._models))

    def _admit_more(self, arrival: Arrival) -> Admitted:
        """Take in tasks while the run goes on."""
        admitted = self._admit(arrival)
        self._begin(admitted.new)
        if len(self._states) - self._returned_at >= _RETURN_EVERY:
            self._returned_at = len(self._states)
            return_freed_memory()
        return admitted

    def _begin(self, states: Sequence[TaskState]) -> None:
        """Give new tasks what templates offer, and what is known of near shapes."""
        to_do = [state for state in states if state.skipped is None and state.ended is None]
        for state in to_do:
            state.templates = self._templates(state, self._known[id(state)])
        if self.options.warm_start_s and self.options.mode is not Mode.FORCE and to_do:
            since = time.monotonic()
            self._warm_start.begin(to_do)
            self.seconds["search"] += time.monotonic() - since

    def _to_do(self) -> list[TaskState]:
        return [state for state in self._states if state.skipped is None and state.ended is None]

    def run(self, evaluator: Evaluator, began: float) -> None:
        """Measure; what was finished is recorded when this returns or raises."""
        workers = self.options.workers or physical_cores()
        threads = 1 if evaluator.exclusive else max(1, min(_SEARCHES_MAX, workers // 2))
        searches = SearchPool(
            threads, lambda state: self._new_search(state, max(1, workers // threads)), evaluator.wake
        )
        rounds = Rounds(
            self._states,
            evaluator,
            self._recorder,
            self.target,
            self.options,
            self.progress,
            self.stop,
            workers=evaluator.builder.capacity,
            spent=self._spent,
            searches=searches,
            feed=self.feed,
            admit=self._admit_more,
        )
        try:
            # The processes start meanwhile.
            with span("driver: begin"):
                self._begin(self._states)
            rounds.take(Admitted((), (), (), self._trials, self._spent, max(1, self._models)))
            with span("driver: begin tasks"):
                rounds.begin(self._states)
            self.seconds["start"] += time.monotonic() - began
            rounds.run()
        except KeyboardInterrupt:
            if self.stop.asked:
                raise
            self.stop.request()
            self._interrupted = True
        finally:
            self._recorder.close()
            searches.close()
            self.seconds.update(evaluator.seconds)
            self.seconds["search"] += searches.clock.seconds
            self._restarts = evaluator.restarts

    def summary(self, began: float) -> TuningSummary:
        """Return what came of the run, and record what each task took."""
        summaries = summarise(self._states)
        self._recorder.finish(summaries)
        return TuningSummary(
            tasks=summaries,
            seconds=time.monotonic() - began,
            seconds_by_phase=dict(self.seconds),
            interrupted=self._interrupted or self.stop.asked,
            restarts=self._restarts,
        )

    def _templates(self, state: TaskState, known: Sequence[TuningRecord]) -> TemplateSearch | None:
        candidates = state.start.offers
        if not candidates:
            return None
        known_us = {record.decision: record.latency_us for record in known if record.route in OFFERED_ROUTES}
        return TemplateSearch(candidates, known_us, thorough=self.options.all_templates)

    def _new_search(self, state: TaskState, workers: int) -> TaskSearch:
        forced = self.options.mode is Mode.FORCE
        mod = state.task.mod
        place = (target_key(self.target), self.environment)
        seeds = [] if forced else top_records(self.database, mod, *place, _SEEDS, tvm_target=self.target.target)
        return TaskSearch(
            mod,
            self.target.target,
            make_space(self.target.target, mod),
            self._cost_model,
            seeds,
            name=state.task.name,
            seed=self.options.seed,
            per_round=self.options.trials_per_iteration,
            # On a GPU most schedules drawn at random are refused, and drawing them is most of a search's time.
            population=self.options.population // (2 if self.target.kind == "cuda" else 1),
            threads=workers,
        )
