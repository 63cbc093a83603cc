"""`tune`: search, build, measure, check and record, until the trials or the time are used up.

A run has one builder and one backend, whose processes start when there is something to measure and end with the run.
`pipeline.tuning.loop` has the loop. Every candidate's result is compared with a reference before its time counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from relaxtune.pipeline.codegen.cuda_libraries import offer_library
from relaxtune.pipeline.errors import NothingMeasuredError, UsageError
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.admission import Admission, Arrival, StillTrue, TaskFeed
from relaxtune.pipeline.tuning.candidates import Evaluator
from relaxtune.pipeline.tuning.local.backend import Machine, this_machine
from relaxtune.pipeline.tuning.local.devices import choose_devices
from relaxtune.pipeline.tuning.loop import TuningLoop
from relaxtune.pipeline.tuning.measure.stop import StopSignal, ctrl_c_requests
from relaxtune.pipeline.tuning.options import (
    FINALS_SHARE,
    TaskSummary,
    TuningOptions,
    TuningSummary,
    search_seconds,
)
from relaxtune.pipeline.tuning.progress import OnCandidate
from relaxtune.pipeline.tuning.tasks import TaskState
from relaxtune.schedules.libraries.vendors import VENDOR_LIBRARIES
from relaxtune.schedules.search.tensor_intrinsics import register_intrinsics
from relaxtune.schedules.search.tensor_tile import has_tensor_tiles
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Environment, Mode, Route, Status
from relaxtune.tuning_db.store import TuningDatabase

# Starts what builds and measures for one run, and ends it.
OpenMachine = Callable[
    [ResolvedTarget, Environment, TuningOptions, StopSignal], contextlib.AbstractContextManager[Machine]
]


def tune(
    tasks: Sequence[TuningTask],
    *,
    target: ResolvedTarget,
    database: TuningDatabase,
    environment: Environment,
    options: TuningOptions,
    job_id: str | None = None,
    progress: OnCandidate | None = None,
    still_true: StillTrue,
    machine: OpenMachine | None = None,
    feed: TaskFeed | None = None,
    stop: StopSignal | None = None,
) -> TuningSummary:
    """Tune tasks and return the summary; every candidate is in the database by then.

    Kernels are of `target`, measured in `environment`; the records belong to `job_id`, a job of the database.
    `still_true` leaves out stale records of earlier runs (`pipeline.choose.record_lookup`). `machine` starts another
    builder and backend than this machine's, such as a cluster's; the run ends them. `feed` gives more tasks while the
    run goes on, and candidates for them; `options.trials` then limits nothing. `stop` ends the run from another thread;
    the time budget becomes its deadline.

    Ctrl-C or SIGTERM ends the run at the next opportunity, within a second unless MetaSchedule is searching: what is
    finished is recorded, and the summary says `interrupted`. A second Ctrl-C raises KeyboardInterrupt.
    The processes started here end before this returns or raises.

    Raises `UsageError`: neither `trials` nor `time_budget_s` limits the run, or the mode is read-only.
    """
    if options.trials is None and options.time_budget_s is None:
        raise UsageError("A tuning run needs a limit: expected trials or time_budget_s, got neither.")
    if options.mode is Mode.READ_ONLY:
        raise UsageError("A tuning run records what it measures: expected mode tune or force, got read-only.")
    if machine is None:
        choose_devices(target, options.devices)
    if Route.LIBRARY in options.routes:
        for library in VENDOR_LIBRARIES:
            offer_library(library)
    began = time.monotonic()
    stop = stop or StopSignal()
    search_s = search_seconds(options)
    stop.deadline = None if search_s is None else began + search_s / (1 + FINALS_SHARE)
    admission = Admission(target, database, environment, options, job_id, still_true, feed)
    interrupted, restarts = False, 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(ctrl_c_requests(stop))

        def start() -> Machine:
            return stack.enter_context((machine or this_machine)(target, environment, options, stop))

        # Models are imported while the next seconds go by, and processes start while models are imported.
        arrivals = () if feed is None or stop.due else feed.take(idle=False)
        started = start() if feed is not None and feed.arriving and not stop.due else None
        if has_tensor_tiles(target.target):
            # Records of earlier runs name them.
            register_intrinsics()
        if feed is None:
            admission.admit(Arrival(tuple(tasks), options.trials))
        else:
            admission.admit_before(feed, arrivals)
        if admission.has_work or (feed is not None and admission.await_work(feed, lambda: stop.due)):
            started = started or start()
            overlap = options.overlap if options.overlap is not None else started.backend.undisturbed
            evaluator = Evaluator(started.builder, started.backend, target.target, exclusive=not overlap)
            try:
                TuningLoop(admission, evaluator, target, options, progress, stop, feed).run(began)
            except KeyboardInterrupt:
                if stop.requested:
                    raise
                stop.request()
                interrupted = True
            restarts = evaluator.restarts
    summaries = summarise(admission.tasks.states)
    admission.recorder.finish(summaries)
    return TuningSummary(
        tasks=summaries,
        seconds=time.monotonic() - began,
        seconds_by_phase=dict(admission.seconds),
        interrupted=interrupted or stop.requested,
        restarts=restarts,
    )


def summarise(states: Sequence[TaskState]) -> tuple[TaskSummary, ...]:
    """Return the summaries of all tasks, those that take most of the model's time first."""
    times = [state.task.weight * (state.best_us or 0.0) for state in states]
    total = sum(times)
    summaries = [
        TaskSummary(
            task=state.task,
            valid=state.valid,
            failed=state.failures.total(),
            failures=dict(sorted(state.failures.items())),
            known=state.known,
            before_us=None if state.before_us is None else state.before_us * state.slower,
            after_us=state.best_us,
            spread=state.best_spread,
            route=state.route,
            weight=state.task.weight,
            share=time / total if total else 0.0,
            seconds=state.seconds,
            skipped=state.skipped,
            ended=state.ended,
            last_error=state.last_error,
        )
        for state, time in zip(states, times, strict=True)
    ]
    return tuple(sorted(summaries, key=lambda summary: (-summary.share, summary.task.name)))


def require_valid(summary: TuningSummary) -> None:
    """Check that a run measured something valid, or found it in the database, or had no time to fail.

    Raises `NothingMeasuredError`: candidates were tried and none of any task was valid; the message has the failures by
    status and the last error.
    """
    if any(task.valid or task.known for task in summary.tasks):
        return
    if not any(task.failures or task.last_error for task in summary.tasks):
        return
    if summary.candidates == 0 and any(task.after_us is not None for task in summary.tasks):
        return
    failures = {status.value: 0 for status in Status}
    for task in summary.tasks:
        for status, count in task.failures.items():
            failures[status.value] += count
    counts = (
        ", ".join(f"{count} {status}" for status, count in failures.items() if count) or "no candidate was finished"
    )
    last = next((task.last_error for task in summary.tasks if task.last_error), "no error text")
    raise NothingMeasuredError(
        f"Nothing valid was measured for {len(summary.tasks)} tasks: {counts}, expected at least one valid candidate. "
        f"The last error was: {last.strip().splitlines()[-1]}. Run `relaxtune doctor`, give more --trials or a longer "
        "--time-budget, or look at the failed records with `relaxtune db query --status`."
    )
