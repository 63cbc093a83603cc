"""Earlier runs of the same job: a killed run goes on, and one that ended is not repeated."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relaxtune.pipeline.tuning.candidates import decision_key
from relaxtune.pipeline.tuning.options import SEARCHED_ROUTES, TuningOptions
from relaxtune.pipeline.tuning.tasks import TaskState
from relaxtune.tuning_db.jobs import Job
from relaxtune.tuning_db.records import Route, Status, TargetKey, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase

DONE = "done"
# Jobs of the model that are looked at, the newest first.
_JOBS_MAX = 50


@dataclass(frozen=True)
class EarlierRuns:
    """Jobs that tuned the same kernels of the same model for the same target."""

    # Ids of those that ended by themselves, with at least the budgets and the effort of this run.
    finished: frozenset[str] = frozenset()
    # Ids of those that were interrupted, killed or failed; what they recorded counts against the trials.
    broken_off: frozenset[str | None] = frozenset()


def find_runs(
    database: TuningDatabase,
    model: str,
    model_sha256: str,
    target: TargetKey,
    workload_hashes: Iterable[str],
    options: TuningOptions,
    *,
    but: str | None = None,
) -> EarlierRuns:
    """Return the jobs that did, or began, the work of a job of these kernels of a model; `but` is left out."""
    wanted = set(workload_hashes)
    finished: set[str] = set()
    broken_off: set[str | None] = set()
    for job in database.list_jobs(model=model, limit=_JOBS_MAX):
        if job.id == but or job.model_sha256 != model_sha256 or job.target != target:
            continue
        if not wanted <= {task.workload_hash for task in database.list_job_tasks(job.id)}:
            continue
        if job.outcome != DONE:
            broken_off.add(job.id)
        elif _allowed_as_much(job, options):
            finished.add(job.id)
    return EarlierRuns(frozenset(finished), frozenset(broken_off))


def measured_since(known: Sequence[TuningRecord], recorded: Sequence[TuningRecord]) -> bool:
    """Whether no record is stale, or one that holds is newer than all that are: else the task is not done yet.

    `known` are those of the `recorded` ones that still hold.
    """
    held = {id(record) for record in known}
    stale = [record.created_at for record in recorded if id(record) not in held]
    return not stale or any(record.created_at > max(stale) for record in known)


def take_known(state: TaskState, known: Sequence[TuningRecord], options: TuningOptions, runs: EarlierRuns) -> int:
    """Let a task start where earlier runs of it, on this device, left off.

    Return how many candidates runs of the same job recorded before they were broken off: they count against the trials.
    """
    newest: dict[tuple[Route, str], TuningRecord] = {}
    for record in known:
        newest[(record.route, record.decision)] = record
    for record in newest.values():
        latency_us = record.latency_us if record.status is Status.OK else None
        if latency_us is not None:
            state.offer(record.route, latency_us)
            if record.route is Route.FALLBACK:
                state.before_us = latency_us
        if record.route in SEARCHED_ROUTES:
            state.known += latency_us is not None
            state.decided[decision_key(record.decision)] = None if latency_us is None else latency_us / 1e6
    searched = sum(record.route is Route.METASCHEDULE for record in newest.values())
    state.progress = [state.best_us] * (searched // options.trials_per_iteration)
    if state.known >= options.enough_records:
        state.skipped = f"{state.known} valid records of it are known (--set mode=force measures again)"
    tried = {
        (record.route, record.decision)
        for record in known
        if record.route in SEARCHED_ROUTES and record.job_id in runs.broken_off
    }
    return len(tried)


def end_what_was_done(states: Sequence[TaskState], known: Iterable[TuningRecord], runs: EarlierRuns) -> None:
    """End all tasks when a run of the same job, on this device, ended by itself."""
    ended = next((record for record in known if record.job_id in runs.finished), None)
    if ended is not None:
        for state in states:
            state.ended = f"an earlier run did the same, job {ended.job_id} (--set mode=force measures again)"


def _allowed_as_much(job: Job, options: TuningOptions) -> bool:
    earlier = json.loads(job.options)
    for name in ("trials", "time_budget_s"):
        # None is no limit.
        limit, wanted = earlier.get(name, 0), getattr(options, name)
        if limit is not None and (wanted is None or limit < wanted):
            return False
    return (
        earlier.get("min_gain", 0.0) <= options.min_gain
        and set(earlier.get("routes", ())) >= {route.value for route in options.routes}
        and (earlier.get("all_templates", False) or not options.all_templates)
    )
