"""`tune`: search, build, measure, check and record, until the trials or the time are used up.

A run has one builder and one runner, whose processes live as long as the run and are started when there is something to
measure; one cost model, which learns from all tasks; and one search per task. `pipeline.tuning.plan.rounds` has the
loop. Every candidate's result is compared with a reference before its time counts.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.codegen.cuda_libraries import offer_library
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.errors import NothingMeasuredError, UsageError
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.local.backend import LocalBackend
from relaxtune.pipeline.tuning.local.build_pool import BUILD_MODULE, BuilderLimits, BuildPool
from relaxtune.pipeline.tuning.local.devices import choose_devices
from relaxtune.pipeline.tuning.local.measuring_process import MEASURE_MODULE
from relaxtune.pipeline.tuning.local.process import ForkServer
from relaxtune.pipeline.tuning.measure.backend import Builder, MeasureBackend
from relaxtune.pipeline.tuning.measure.evaluate import Evaluator
from relaxtune.pipeline.tuning.measure.stop import StopSignal, ctrl_c_requests
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.options import TuningOptions, TuningSummary
from relaxtune.pipeline.tuning.plan.finals import hold_finals
from relaxtune.pipeline.tuning.plan.recorder import Recorder
from relaxtune.pipeline.tuning.plan.resume import (
    EarlierRuns,
    end_what_was_done,
    find_earlier_runs,
    measured_since,
    take_known,
)
from relaxtune.pipeline.tuning.plan.rounds import Rounds
from relaxtune.pipeline.tuning.plan.search_pool import SearchPool
from relaxtune.pipeline.tuning.plan.state import TaskState, summarise
from relaxtune.pipeline.tuning.plan.warm_start import begin_with_records
from relaxtune.pipeline.tuning.progress import ProgressListener, SilentProgress
from relaxtune.pipeline.tuning.search.cost_model import WARMUP_CANDIDATES, FastCostModel
from relaxtune.pipeline.tuning.search.evolution import TaskSearch
from relaxtune.pipeline.tuning.search.template_candidates import OFFERED_ROUTES, template_candidates
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
    still_true: StillTrue | None = None,
    builder: Builder | None = None,
    backend: MeasureBackend | None = None,
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
    still_true : callable or None
        Leaves out stale records (`pipeline.choose.stale.without_stale`); None takes all records of earlier runs.
    builder, backend : optional
        Others than the processes of this machine, for example of a cluster; they are not closed here.

    Notes
    -----
    Ctrl-C ends the run at the next opportunity, within a second unless MetaSchedule is searching: what is finished is
    recorded, and the summary says `interrupted`. A second Ctrl-C raises KeyboardInterrupt. The processes started here
    end before this returns or raises.

    Raises
    ------
    UsageError
        Neither `trials` nor `time_budget_s` limits the run, or the mode is read-only.
    """
    _check(options)
    if Route.LIBRARY in options.routes:
        for library in VENDOR_LIBRARIES:
            offer_library(library)
    if has_tensor_tiles(target.target):
        # Records of earlier runs name them.
        register_intrinsics()
    began = time.monotonic()
    stop = StopSignal(began + options.time_budget_s if options.time_budget_s is not None else None)
    session = _Session(
        tasks, target, database, environment, options, job_id, progress or SilentProgress(), stop, still_true
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(ctrl_c_requests(stop))
        if session.prepare():
            evaluator, workers = _start_processes(stack, target, environment, options, stop, builder, backend)
            session.run(evaluator, workers, began)
        return session.summary(began)


def _start_processes(
    stack: contextlib.ExitStack,
    target: ResolvedTarget,
    environment: Environment,
    options: TuningOptions,
    stop: StopSignal,
    builder: Builder | None,
    backend: MeasureBackend | None,
) -> tuple[Evaluator, int]:
    """Return what builds and measures, and how many build processes there are; the stack ends what is started."""
    workers = options.workers or physical_cores()
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relaxtune-")))
    overlap = options.overlap if options.overlap is not None else target.kind == "cuda"
    devices = choose_devices(target, options.devices) if backend is None else ()
    server = None
    if options.fork and ForkServer.available() and (backend is None or builder is None):
        server = stack.enter_context(contextlib.closing(ForkServer([BUILD_MODULE, MEASURE_MODULE])))
    if backend is None:
        measure = _measure_options(options, target)
        # CUDA, which TVM initialises in the server, works in no process forked from it.
        forks = server if target.kind != "cuda" else None
        own = LocalBackend(devices, environment, measure, options.run_timeout_s, stop, options.seed, forks)
        backend = stack.enter_context(contextlib.closing(own))
    if builder is None:
        # Started last and so ended first: what it builds goes to the backend.
        limits = BuilderLimits(timeout_s=options.build_timeout_s)
        builder = stack.enter_context(contextlib.closing(BuildPool(workers, directory, limits, stop, server)))
    return Evaluator(builder, backend, target.target, exclusive=not overlap), workers


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


class _Session:
    def __init__(
        self,
        tasks: Sequence[TuningTask],
        target: ResolvedTarget,
        database: TuningDatabase,
        environment: Environment,
        options: TuningOptions,
        job_id: str | None,
        progress: ProgressListener,
        stop: StopSignal,
        still_true: StillTrue | None,
    ) -> None:
        self.seconds = dict.fromkeys(("start", "search", "build", "queue", "measure", "database"), 0.0)
        self._database = database
        self._environment = environment
        self._target = target
        self._options = options
        self._progress = progress
        self._stop = stop
        self._still_true = still_true
        self._tasks = list(tasks)
        self._states: list[TaskState] = []
        self._known: list[Sequence[TuningRecord]] = []
        self._recorder = Recorder(
            database, target_key(target), environment, job_id=job_id, seed=options.seed, seconds=self.seconds
        )
        self._adapter = MetaScheduleAdapter(
            database, target_key(target), environment, tvm_target=target.target, commit_records=False
        )
        self._cost_model = FastCostModel(WARMUP_CANDIDATES, options.seed)
        self._job_id = job_id
        self._spent = 0
        self._interrupted = False
        self._restarts = 0

    def prepare(self) -> bool:
        """Record the workloads and take in what is known of each; return whether there is anything to measure."""
        self._recorder.start(self._tasks)
        options = self._options
        records: list[TuningRecord] = []
        holding: list[TaskState] = []
        forced = options.mode is Mode.FORCE
        hashes = [task.workload_hash for task in self._tasks]
        runs = EarlierRuns() if forced else find_earlier_runs(self._database, self._job_id, hashes, options)
        for task in self._tasks:
            state = TaskState(task)
            self._states.append(state)
            recorded = [] if forced else self._recorder.known(task)
            known = recorded if self._still_true is None else self._still_true(task, recorded)
            records += known
            if measured_since(known, recorded):
                holding.append(state)
            self._spent += take_known(state, known, options, runs)
            self._known.append(known)
        end_what_was_done(holding, records, runs)
        begun = any(state.before_us is None for state in self._to_do())
        return begun or bool(self._to_do() and (options.trials is None or self._spent < options.trials))

    def _to_do(self) -> list[TaskState]:
        return [state for state in self._states if state.skipped is None and state.ended is None]

    def run(self, evaluator: Evaluator, workers: int, began: float) -> None:
        """Measure; what was finished is recorded when this returns or raises."""
        if self._options.routes & OFFERED_ROUTES:
            # Here and not before, since the processes start meanwhile.
            for state, known in zip(self._states, self._known, strict=True):
                state.templates = self._templates(state, known)
        threads = 1 if evaluator.exclusive else max(1, min(_SEARCHES_MAX, workers // 2))
        searches = SearchPool(
            threads, lambda state: self._new_search(state, max(1, workers // threads)), evaluator.wake
        )
        rounds = Rounds(
            self._states,
            evaluator,
            self._recorder,
            self._target,
            self._options,
            self._progress,
            self._stop,
            workers=workers,
            spent=self._spent,
            searches=searches,
        )
        try:
            if self._options.warm_start_s and self._options.mode is not Mode.FORCE:
                # It goes on while the processes start.
                with self._timed("search"):
                    begin_with_records(
                        self._cost_model,
                        self._to_do(),
                        self._database,
                        self._target,
                        self._environment,
                        self._options,
                    )
            rounds.begin()
            self.seconds["start"] += time.monotonic() - began
            rounds.run()
            self._hold_finals(evaluator)
        except KeyboardInterrupt:
            self._stop.request()
            self._interrupted = True
        finally:
            self._recorder.flush()
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
            interrupted=self._interrupted or self._stop.asked,
            restarts=self._restarts,
        )

    def _hold_finals(self, evaluator: Evaluator) -> None:
        if self._options.finals and evaluator.backend.capabilities.compares:
            hold_finals(self._states, evaluator.backend, self._recorder, self._stop, rounds=self._options.finals)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - began

    def _templates(self, state: TaskState, known: Sequence[TuningRecord]) -> TemplateSearch | None:
        candidates = template_candidates(state.task, self._target, routes=self._options.routes)
        if not candidates:
            return None
        known_us = {record.decision: record.latency_us for record in known if record.route in OFFERED_ROUTES}
        return TemplateSearch(candidates, known_us, thorough=self._options.all_templates)

    def _new_search(self, state: TaskState, workers: int) -> TaskSearch:
        seeds = (
            []
            if self._options.mode is Mode.FORCE
            else self._adapter.get_top_k(ms.database.Workload(state.task.mod), _SEEDS)
        )
        return TaskSearch(
            state.task.mod,
            self._target.target,
            make_space(self._target.target, state.task.mod),
            self._cost_model,
            seeds,
            name=state.task.name,
            seed=self._options.seed,
            per_round=self._options.trials_per_iteration,
            # On a GPU most schedules drawn at random are refused, and drawing them is most of a search's time.
            population=self._options.population // (2 if self._target.kind == "cuda" else 1),
            threads=workers,
        )


def _check(options: TuningOptions) -> None:
    if options.trials is None and options.time_budget_s is None:
        raise UsageError("A tuning run needs a limit: expected trials or time_budget_s, got neither.")
    if options.mode is Mode.READ_ONLY:
        raise UsageError("A tuning run records what it measures: expected mode tune or force, got read-only.")


def _measure_options(options: TuningOptions, target: ResolvedTarget) -> MeasureOptions:
    cores = getattr(target.limits, "cores", None)
    return options.measure if options.measure.threads is not None else replace(options.measure, threads=cores)
