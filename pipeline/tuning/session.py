"""`tune`: search, build, measure, check and record, until the trials or the time are used up.

A run has one builder and one backend, whose processes start when there is something to measure and end with the run.
It has one cost model, which learns from all tasks, and one search per task. `pipeline.tuning.plan.rounds` has the loop.
Every candidate's result is compared with a reference before its time counts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.codegen.cuda_libraries import offer_library
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.errors import NothingMeasuredError, UsageError
from relaxtune.pipeline.spans import span
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.local.devices import choose_devices
from relaxtune.pipeline.tuning.local.machine import Machine, this_machine
from relaxtune.pipeline.tuning.measure.backend import Builder, MeasureBackend
from relaxtune.pipeline.tuning.measure.evaluate import Evaluator
from relaxtune.pipeline.tuning.measure.stop import StopSignal, ctrl_c_requests
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
from relaxtune.pipeline.tuning.progress import ProgressListener, SilentProgress
from relaxtune.pipeline.tuning.search.cost_model import WARMUP_CANDIDATES, FastCostModel
from relaxtune.pipeline.tuning.search.evolution import TaskSearch
from relaxtune.pipeline.tuning.search.template_candidates import OFFERED_ROUTES
from relaxtune.pipeline.tuning.search.template_search import TemplateSearch
from relaxtune.schedules.libraries.vendors import VENDOR_LIBRARIES
from relaxtune.schedules.search.space import make_space
from relaxtune.schedules.search.tensor_intrinsics import register_intrinsics
from relaxtune.schedules.search.tensor_tile import has_tensor_tiles
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.targets.host import physical_cores
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.metaschedule import MetaScheduleAdapter
from relaxtune.tuning_db.records import Environment, Mode, Route, Status, TuningRecord

logger = logging.getLogger(__name__)

# Parents of the first round, from the records of earlier runs.
_SEEDS = 64
# Tasks searched at the same time, where that disturbs no measurement.
_SEARCHES_MAX = 4
_FEED_WAIT_S = 0.2

# Starts what builds and measures for one run, and ends it.
OpenMachine = Callable[
    [ResolvedTarget, Environment, TuningOptions, StopSignal], contextlib.AbstractContextManager[Machine]
]
# Returns those of a task's records that are still true of the kernels that this version makes.
StillTrue = Callable[[TuningTask, Sequence[TuningRecord]], Sequence[TuningRecord]]


def tune(
    tasks: Sequence[TuningTask],
    *,
    target: ResolvedTarget,
    database: TuningDatabase,
    environment: Environment,
    options: TuningOptions,
    job_id: str | None = None,
    progress: ProgressListener | None = None,
    still_true: StillTrue,
    builder: Builder | None = None,
    backend: MeasureBackend | None = None,
    machine: OpenMachine | None = None,
    feed: TaskFeed | None = None,
    stop: StopSignal | None = None,
) -> TuningSummary:
    """Return what came of tuning some tasks; every candidate is in the database by then.

    Parameters
    ----------
    tasks : sequence of TuningTask
        What to tune.
    target, environment : ResolvedTarget, Environment
        What is compiled for, and the machine that measures.
    database : TuningDatabase
        Where records are read and written.
    options : TuningOptions
        Limits, seeds and mode.
    job_id : str or None
        A job of the database, to which the records belong.
    progress : ProgressListener or None
        Told of every finished candidate.
    still_true : callable
        Leaves out stale records of earlier runs: `pipeline.choose.stale_records.still_true_in`.
    builder, backend : optional
        Others than the processes of this machine, for example of a cluster; they are not closed here.
    machine : callable or None
        Starts another builder and backend than this machine's; the run ends them.
    feed : TaskFeed or None
        Gives more tasks while the run goes on, and candidates for them; `options.trials` then limits nothing.
    stop : StopSignal or None
        Ends the run from another thread; the time budget becomes its deadline.

    Notes
    -----
    Ctrl-C or SIGTERM ends the run at the next opportunity, within a second unless MetaSchedule is searching: what is
    finished is recorded, and the summary says `interrupted`. A second Ctrl-C raises KeyboardInterrupt.
    The processes started here end before this returns or raises.

    Raises
    ------
    UsageError
        Neither `trials` nor `time_budget_s` limits the run, or the mode is read-only.
    """
    _check(options)
    if backend is None and machine is None:
        choose_devices(target, options.devices)
    if Route.LIBRARY in options.routes:
        for library in VENDOR_LIBRARIES:
            offer_library(library)
    began = time.monotonic()
    stop = stop or StopSignal()
    stop.deadline = began + options.time_budget_s if options.time_budget_s is not None else None
    listener = progress or SilentProgress()
    session = _Session(list(tasks), target, database, environment, options, job_id, listener, stop, still_true, feed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ctrl_c_requests(stop))

        def opened() -> Machine:
            if builder is not None and backend is not None:
                return Machine(builder, backend)
            if machine is not None:
                return stack.enter_context(machine(target, environment, options, stop))
            return stack.enter_context(this_machine(target, environment, options, stop, builder, backend))

        started = None
        # Models are imported while the next second goes by.
        arrivals = () if feed is None or stop.due else feed.take(idle=False)
        if has_tensor_tiles(target.target):
            # Records of earlier runs name them.
            register_intrinsics()
        if session.listen(arrivals):
            # Its processes start while models are imported.
            started = opened()
        if session.prepare():
            started = started or opened()
            builder, backend = started.builder, started.backend
            overlap = options.overlap if options.overlap is not None else backend.capabilities.undisturbed
            session.run(Evaluator(builder, backend, target.target, exclusive=not overlap), began)
        return session.summary(began)


def require_valid(summary: TuningSummary) -> None:
    """Check that a run measured something valid, or found it in the database.

    Raises
    ------
    NothingMeasuredError
        No candidate of any task was valid; the message has the failures by status and the last error.
    """
    if not summary.tasks or any(task.valid or task.known for task in summary.tasks):
        return
    if summary.candidates == 0 and any(task.after_us is not None for task in summary.tasks):
        return
    failures = {status.value: 0 for status in Status}
    for task in summary.tasks:
        for status, count in task.failures.items():
            failures[status.value] += count
    told = ", ".join(f"{count} {status}" for status, count in failures.items() if count) or "no candidate was finished"
    last = next((task.last_error for task in summary.tasks if task.last_error), "no error text")
    raise NothingMeasuredError(
        f"Nothing valid was measured for {len(summary.tasks)} tasks: {told}, expected at least one valid candidate. "
        f"The last error was: {last.strip().splitlines()[-1]}. Run `relaxtune doctor`, give more --trials or a longer "
        "--time-budget, or look at the failed records with `relaxtune db query --status`."
    )


@dataclass(eq=False)
class _Session:
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
        self._adapter = MetaScheduleAdapter(
            self.database, key, self.environment, tvm_target=self.target.target, commit_records=False
        )
        self._cost_model = FastCostModel(WARMUP_CANDIDATES, seed)
        self._warm_start = WarmStart(self._cost_model, self.database, self.target, self.environment, self.options)
        self._spent = 0
        self._interrupted = False
        self._restarts = 0

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
        seeds = [] if forced else self._adapter.get_top_k(ms.database.Workload(state.task.mod), _SEEDS)
        return TaskSearch(
            state.task.mod,
            self.target.target,
            make_space(self.target.target, state.task.mod),
            self._cost_model,
            seeds,
            name=state.task.name,
            seed=self.options.seed,
            per_round=self.options.trials_per_iteration,
            # On a GPU most schedules drawn at random are refused, and drawing them is most of a search's time.
            population=self.options.population // (2 if self.target.kind == "cuda" else 1),
            threads=workers,
        )


def _check(options: TuningOptions) -> None:
    if options.trials is None and options.time_budget_s is None:
        raise UsageError("A tuning run needs a limit: expected trials or time_budget_s, got neither.")
    if options.mode is Mode.READ_ONLY:
        raise UsageError("A tuning run records what it measures: expected mode tune or force, got read-only.")
