"""`tune`: search, build, measure, check and record, until the trials or the time are used up.

A run has one builder and one runner, whose processes live as long as the run; one cost model, which learns from all
tasks; and one search per task. A round asks the most promising task for candidates, builds them, measures them and
records every one. Every candidate's result is compared with a reference before its time counts.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
from tvm.s_tir import meta_schedule as ms

from pipeline.environment import target_key
from pipeline.errors import NothingMeasuredError, UsageError
from pipeline.tuning.baseline import measure_fallbacks
from pipeline.tuning.builder import BuilderLimits, PoolBuilder
from pipeline.tuning.cost_model import FastCostModel
from pipeline.tuning.evaluate import Evaluator, Job, Outcome
from pipeline.tuning.failure import StopSignal
from pipeline.tuning.measure_worker import MeasureOptions
from pipeline.tuning.note import CandidateNote
from pipeline.tuning.options import SEARCHED_ROUTES, TuningOptions, TuningSummary
from pipeline.tuning.progress import ProgressEvent, ProgressListener, SilentProgress, estimate_left
from pipeline.tuning.recorder import Recorder
from pipeline.tuning.runner import NO_REFERENCE, ProcessRunner
from pipeline.tuning.search import Candidate, TaskSearch
from pipeline.tuning.state import TaskState, choose_task, summarise
from pipeline.tuning.task import TuningTask
from pipeline.tuning.template_candidates import template_candidates
from schedules.host import physical_cores
from schedules.space import make_space
from schedules.targets import ResolvedTarget
from tuning_db.metaschedule import REPLAY_ERRORS, MetaScheduleAdapter
from tuning_db.records import Environment, Mode, Route, Status
from tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

# Parents of the first round, from the records of earlier runs.
_SEEDS = 64
# Rounds in which a task proposed nothing new, before it counts as exhausted.
_EMPTY_ROUNDS_MAX = 2
# The cost model's predictions are random until it has learnt from so many candidates.
_WARMUP_CANDIDATES = 32
_ROUND_MIN = 4


def tune(
    tasks: Sequence[TuningTask],
    *,
    target: ResolvedTarget,
    database: TuningDatabase,
    environment: Environment,
    options: TuningOptions,
    job_id: str | None = None,
    progress: ProgressListener | None = None,
    builder: ms.builder.Builder | None = None,
    runner: ms.runner.Runner | None = None,
) -> TuningSummary:
    """Return what came of tuning some tasks; every candidate is in the database by then.

    Parameters
    ----------
    tasks : sequence of TuningTask
        What to tune.
    target, environment : ResolvedTarget, Environment
        What is compiled for, and the machine that measures; records are stamped with both.
    database : TuningDatabase
        Where records are read and written.
    options : TuningOptions
        Limits, seeds and mode.
    job_id : str or None
        A job of the database, to which the records belong.
    progress : ProgressListener or None
        Told of every finished candidate.
    builder, runner : optional
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
    began = time.monotonic()
    stop = StopSignal(began + options.time_budget_s if options.time_budget_s is not None else None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ctrl_c_requests(stop))
        workers = options.workers or physical_cores()
        if builder is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relaxtune-")))
            limits = BuilderLimits(timeout_s=options.build_timeout_s)
            builder = stack.enter_context(contextlib.closing(PoolBuilder(workers, directory, limits, stop)))
        if runner is None:
            device = "cuda:0" if target.kind == "cuda" else "cpu:0"
            own = ProcessRunner(device, _measure_options(options, target), options.run_timeout_s, stop, options.seed)
            runner = stack.enter_context(contextlib.closing(own))
        session = _Session(tasks, target, database, environment, options, job_id, progress or SilentProgress(), stop)
        overlap = options.overlap if options.overlap is not None else target.kind == "cuda"
        evaluator = Evaluator(builder, runner, target.target, workers if overlap else None, session.seconds)
        return session.run(evaluator, workers, began)


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
    ) -> None:
        self.seconds = dict.fromkeys(("start", "search", "build", "measure", "database"), 0.0)
        self._target = target
        self._options = options
        self._progress = progress
        self._stop = stop
        self._tasks = list(tasks)
        self._states: list[TaskState] = []
        self._recorder = Recorder(
            database, target_key(target), environment, job_id=job_id, seed=options.seed, seconds=self.seconds
        )
        self._adapter = MetaScheduleAdapter(
            database, target_key(target), environment, tvm_target=target.target, commit_records=False
        )
        self._cost_model: ms.CostModel | None = None
        self._rounds_began = 0.0

    def run(self, evaluator: Evaluator, workers: int, began: float) -> TuningSummary:
        interrupted = False
        try:
            self._prepare()
            self.seconds["start"] += time.monotonic() - began
            measure_fallbacks(
                [state for state in self._states if state.skipped is None],
                evaluator,
                self._target,
                lambda state, decision, outcome: self._take(state, Route.FALLBACK, decision, outcome),
            )
            self._recorder.flush()
            self._rounds_began = time.monotonic()
            self._rounds(evaluator, workers)
        except KeyboardInterrupt:
            self._stop.request()
            interrupted = True
        finally:
            self._recorder.flush()
        summaries = summarise(self._states)
        self._recorder.finish(summaries)
        return TuningSummary(
            tasks=summaries,
            seconds=time.monotonic() - began,
            seconds_by_phase=dict(self.seconds),
            interrupted=interrupted or self._stop.asked,
        )

    def _prepare(self) -> None:
        """Record the workloads and take in what is known of each."""
        self._recorder.start(self._tasks)
        for task in self._tasks:
            state = TaskState(task, {})
            self._states.append(state)
            if self._options.mode is Mode.FORCE:
                continue
            for record in self._recorder.known(task):
                ok = record.status is Status.OK
                if ok and record.latency_us is not None:
                    state.offer(record.route, record.latency_us)
                    if record.route is Route.FALLBACK:
                        state.before_us = record.latency_us
                if record.route in SEARCHED_ROUTES:
                    state.known += ok
                    state.decided[record.decision] = tuple(v / 1e6 for v in record.latencies_us) if ok else None
            if state.known >= self._options.enough_records:
                state.skipped = f"{state.known} valid records of it are known (mode force measures again)"
        if Route.TEMPLATE in self._options.routes:
            for state in self._states:
                state.templates = template_candidates(state.task, self._target, state.decided)

    def _rounds(self, evaluator: Evaluator, workers: int) -> None:
        # Its random predictions of the first rounds come from NumPy's global generator.
        random_state = np.random.get_state()
        np.random.seed(self._options.seed % 2**32)
        try:
            while not self._stop.due and self._remaining() != 0:
                state = choose_task(self._states)
                if state is None:
                    return
                began = time.monotonic()
                self._round(state, evaluator, workers)
                state.seconds += time.monotonic() - began
        finally:
            np.random.set_state(random_state)

    def _round(self, state: TaskState, evaluator: Evaluator, workers: int) -> None:
        """Build, measure and record the next candidates of one task: those of templates first, then of the search."""
        if state.templates:
            self._template_round(state, evaluator)
        elif Route.METASCHEDULE in self._options.routes:
            self._search_round(state, evaluator, workers)
        else:
            state.exhausted = True

    def _template_round(self, state: TaskState, evaluator: Evaluator) -> None:
        remaining = self._remaining()
        size = self._round_size() if remaining is None else min(self._round_size(), remaining)
        batch, state.templates = state.templates[:size], state.templates[size:]
        note = self._note_of(state)
        args_info = ms.arg_info.ArgInfo.from_entry_func(state.task.mod, False)
        jobs = [Job(candidate.make(self._target), args_info, note) for candidate in batch]
        evaluator.evaluate(
            jobs, lambda index, outcome: self._take(state, Route.TEMPLATE, batch[index].decision, outcome)
        )
        self._recorder.flush()
        state.close_round()

    def _note_of(self, state: TaskState) -> CandidateNote:
        if state.note is None:
            raise UsageError(f"task {state.task.name} has no reference to compare candidates with.")
        return state.note

    def _search_round(self, state: TaskState, evaluator: Evaluator, workers: int) -> None:
        """Propose, build, measure and record candidates, and learn from them."""
        proposed = self._propose(state, workers)
        if not proposed:
            state.exhausted = True
            return
        fresh = [candidate for candidate in proposed if candidate.decision not in state.decided]
        state.empty_rounds = 0 if fresh else state.empty_rounds + 1
        state.exhausted = state.empty_rounds >= _EMPTY_ROUNDS_MAX
        remaining = self._remaining()
        fresh = fresh if remaining is None else fresh[:remaining]
        note = self._note_of(state)

        def take(index: int, outcome: Outcome) -> None:
            decision = fresh[index].decision
            state.decided[decision] = outcome.seconds if outcome.status is Status.OK else None
            self._take(state, Route.METASCHEDULE, decision, outcome)

        evaluator.evaluate([Job(c.measure.sch.mod, c.measure.args_info, note) for c in fresh], take)
        self._recorder.flush()
        state.close_round()
        self._learn(state, [candidate for candidate in proposed if candidate.decision in state.decided])

    def _propose(self, state: TaskState, workers: int) -> list[Candidate]:
        began = time.monotonic()
        try:
            if state.search is None:
                state.search = self._new_search(state, workers)
            return state.search.propose()
        except REPLAY_ERRORS as e:
            # A space that cannot be searched must not end the other tasks' run.
            logger.warning("the search of task %s failed: %s", state.task.name, e)
            state.skipped = f"its search failed: {_last_line(e)}"
            return []
        finally:
            self.seconds["search"] += time.monotonic() - began

    def _new_search(self, state: TaskState, workers: int) -> TaskSearch:
        if self._cost_model is None:
            self._cost_model = FastCostModel(_WARMUP_CANDIDATES, self._options.seed)
        seeds = (
            []
            if self._options.mode is Mode.FORCE
            else self._adapter.get_top_k(ms.database.Workload(state.task.mod), _SEEDS)
        )
        return TaskSearch(
            state.task.mod,
            self._target.target,
            make_space(self._target.target),
            self._cost_model,
            seeds,
            name=state.task.name,
            seed=self._options.seed,
            per_round=self._round_size(),
            population=self._options.population,
            threads=workers,
        )

    def _learn(self, state: TaskState, candidates: list[Candidate]) -> None:
        if state.search is None or not candidates:
            return
        began = time.monotonic()
        state.search.learn(candidates, [state.decided[candidate.decision] for candidate in candidates])
        self.seconds["search"] += time.monotonic() - began

    def _round_size(self) -> int:
        """Return the candidates of a round: fewer when the trials would not give every task one."""
        size = self._options.trials_per_iteration
        if self._options.trials is None:
            return size
        return max(1, min(size, max(_ROUND_MIN, self._options.trials // max(1, len(self._states)))))

    def _take(self, state: TaskState, route: Route, decision: str, outcome: Outcome) -> None:
        self._recorder.add(state.task, route, decision, outcome)
        state.take(route, outcome)
        if route is Route.FALLBACK:
            if outcome.error is not None and outcome.error.startswith(NO_REFERENCE):
                state.skipped = NO_REFERENCE
            return
        now = time.monotonic()
        budget_left = None if self._stop.deadline is None else max(0.0, self._stop.deadline - now)
        valid, failed = sum(s.valid for s in self._states), sum(s.failed for s in self._states)
        left = estimate_left(valid + failed, self._options.trials, now - self._rounds_began, budget_left)
        self._progress.candidate_measured(
            ProgressEvent(state.task.name, valid + failed, self._options.trials, valid, failed, state.best_us, left)
        )

    def _remaining(self) -> int | None:
        if self._options.trials is None:
            return None
        return max(0, self._options.trials - sum(state.valid + state.failed for state in self._states))


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _check(options: TuningOptions) -> None:
    if options.trials is None and options.time_budget_s is None:
        raise UsageError("A tuning run needs a limit: expected trials or time_budget_s, got neither.")
    if options.mode is Mode.READ_ONLY:
        raise UsageError("A tuning run records what it measures: expected mode tune or force, got read-only.")


def _measure_options(options: TuningOptions, target: ResolvedTarget) -> MeasureOptions:
    cores = getattr(target.limits, "cores", None)
    return options.measure if options.measure.threads is not None else replace(options.measure, threads=cores)


@contextlib.contextmanager
def _ctrl_c_requests(stop: StopSignal) -> Iterator[None]:
    """Let the first Ctrl-C ask for the end and the second raise; only the main thread may change that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        logger.warning("stopping: what is finished is kept; press Ctrl-C again to stop at once")
        stop.request()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
