"""The cost of a batch before it runs, by the records of the database; nothing is measured or written.

A plan for another machine's GPU is predicted too, by the jobs that were run there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from relaxtune.pipeline.batch.cells import Cell, OnProgress, list_cells
from relaxtune.pipeline.batch.plan import Plan
from relaxtune.pipeline.batch.tasks import (
    CellFault,
    CellTasks,
    LoweredCell,
    TaskGroup,
    group_cells,
    group_job,
    group_targets,
    prepare_alike,
    share_budget,
)
from relaxtune.pipeline.batch.unchanged import LoweredBefore
from relaxtune.pipeline.batch.worker import WORKER_MODULE, LookWork
from relaxtune.pipeline.batch.workers import LocalWorkers
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.temporary import cache_folder
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.resume import DONE, find_runs
from relaxtune.pipeline.workers.fork_server import ForkServer
from relaxtune.schedules.targets.host import physical_cores
from relaxtune.tuning_db.layers import open_databases
from relaxtune.tuning_db.questions.insights import count_candidates
from relaxtune.tuning_db.records import Mode, RecordFilter
from relaxtune.tuning_db.sql.engine import parse_location
from relaxtune.tuning_db.store import TuningDatabase

# Jobs whose cost is looked at, the newest first.
_JOBS_MAX = 100
# Cells that take as long as the start of a process that lowers them.
_CELLS_EACH = 4


@dataclass(frozen=True)
class History:
    """The time of earlier jobs of one target; None where the database has none."""

    # Seconds of tuning for each candidate of a search, over all tuning jobs that ended.
    candidate_s: float | None = None
    cell_s: float | None = None  # Seconds in which a cell of a batch was compiled, compared and validated.
    jobs: int = 0  # How many jobs tell so.


@dataclass(frozen=True)
class GroupPreview:
    """The cells of one target before they are tuned."""

    group: TaskGroup
    options: TuningOptions
    records: Counter[str]  # Workload hash -> records of the task on this target.
    ended_by: str | None  # The job that did the same already, None without one: nothing will be measured.
    candidates: int | None  # How many will be measured at most; None where only time limits them.
    # Predicted seconds of tuning, and of compiling, comparing and validating the cells; None where the database has no
    # history that tells.
    tuning_s: float | None
    finishing_s: float | None
    history: History


@dataclass(frozen=True)
class Preview:
    """A plan before it is run: its cells, and its targets."""

    plan: Plan
    cells: tuple[LoweredCell | CellFault, ...]
    groups: tuple[GroupPreview, ...]


def preview(plan: Plan, on_progress: OnProgress = lambda _: None) -> Preview:
    """Return what a plan would do; models that were not before are imported and lowered, nothing is measured.

    `on_progress` is given lines of progress.

    Raises `PlanError`, `TuningDatabaseError`: the plan, or the database, cannot be had.
    """
    cells = lower_cells(list_cells(plan, on_progress), LoweredBefore(cache_folder("plans")), on_progress)
    groups = group_cells([one for one in cells if isinstance(one, LoweredCell)])
    path = parse_location(plan.database).path
    missing = path is not None and not path.exists()
    with nullcontext() if missing else open_databases([plan.database], mode=Mode.READ_ONLY, create=False) as database:
        shown = [
            _preview_group(plan, group, options, database)
            for group, options in zip(groups, share_budget(plan, groups), strict=True)
        ]
    return Preview(plan, tuple(cells), tuple(shown))


def lower_cells(
    cells: Sequence[Cell], before: LoweredBefore, on_progress: OnProgress = lambda _: None
) -> list[LoweredCell | CellFault]:
    """Return the tasks of cells, or the error of each; cells that were not lowered before are lowered and kept.

    A plan that is interrupted keeps what it came to.
    """
    known: dict[str, LoweredCell | None] = {}
    for cell in cells:
        known[cell.name] = before.find(cell)
        on_progress(f"cells looked up: {len(known)} of {len(cells)}")
    left = [cell for cell in cells if known[cell.name] is None]
    done = 0

    def keep(lowered: Sequence[LoweredCell]) -> None:
        nonlocal done
        before.keep(lowered)
        done += len(lowered)
        on_progress(f"cells lowered: {done} of {len(left)}")

    fresh = prepare_cells(left, keep)
    before.remove_old()
    found = {one.cell.name: one for one in (*known.values(), *fresh) if one is not None}
    return [found[cell.name] for cell in cells]


def prepare_cells(
    cells: Sequence[Cell], keep: Callable[[Sequence[LoweredCell]], None] = lambda _: None
) -> list[CellTasks | CellFault]:
    """Return the tasks of cells, or what stops each; `keep` is given those that were lowered, as they come.

    A model is imported once for all precisions and targets. Processes lower many cells side by side, one on each core.
    """
    found: dict[str, CellTasks | CellFault] = {}

    def take(answers: Sequence[CellTasks | CellFault]) -> None:
        keep([one for one in answers if isinstance(one, LoweredCell)])
        found.update({one.cell.name: one for one in answers})

    alike: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        alike.setdefault((cell.source, cell.shape, cell.buckets, cell.seed), []).append(cell)
    groups = list(alike.values())
    count = min(physical_cores(), len(cells) // _CELLS_EACH, len(groups))
    if count < 2 or not ForkServer.available():
        for group in groups:
            take(prepare_alike(group))
    else:
        with (
            closing(ForkServer([WORKER_MODULE])) as server,
            closing(LocalWorkers(["cpu:0"], Path(), server, count)) as workers,
        ):
            futures = [workers.submit(LookWork(tuple(group))) for group in groups]
            for group, future in zip(groups, futures, strict=True):
                try:
                    take(cast("list[CellTasks | CellFault]", future.result()))
                except PipelineError as error:
                    take([CellFault(cell, str(error)) for cell in group])
    return [found[cell.name] for cell in cells]


def _preview_group(
    plan: Plan, group: TaskGroup, options: TuningOptions, database: TuningDatabase | None
) -> GroupPreview:
    if database is None:
        return GroupPreview(group, options, Counter(), None, options.trials, options.time_budget_s, None, History())
    hashes = [task.workload_hash for task in group.tasks]
    place = RecordFilter(target_kind=group.key.kind, arch=group.key.arch)
    records = Counter(one.workload_hash for one in database.list_known(place, workload_hashes=hashes))
    # The job of a target is of all cells of the plan for it.
    own = next(found for target, found in group_targets(list_cells(plan)) if target_key(target) == group.key)
    job = group_job(plan, own, group.target, group.cells[0].environment)
    ended = find_runs(database, job.model, job.model_sha256, group.key, hashes, options).finished
    history = read_history(database, group)
    candidates = 0 if ended else options.trials
    cells = None if history.cell_s is None else history.cell_s * len(group.cells)
    by_rate = None if candidates is None or history.candidate_s is None else candidates * history.candidate_s
    limits = [0.0] if ended else [one for one in (by_rate, options.time_budget_s) if one is not None]
    seconds = min(limits, default=None)
    return GroupPreview(group, options, records, min(ended, default=None), candidates, seconds, cells, history)


def read_history(database: TuningDatabase, group: TaskGroup) -> History:
    """Return what earlier jobs of a group's target took."""
    jobs = [job for job in database.list_jobs(limit=_JOBS_MAX) if job.target == group.key and job.finished_at]
    cells = [job for job in jobs if "cell" in json.loads(job.options) and job.outcome == DONE]
    # A job's records are more than its candidates: defaults, and finals that measure the best again.
    counts = {job: count_candidates(database, job.id) for job in jobs if job not in cells}
    measured = [job for job, count in counts.items() if count]
    candidates = sum(counts.values())
    return History(
        sum(job.wall_s or 0.0 for job in measured) / candidates if candidates else None,
        sum(job.wall_s or 0.0 for job in cells) / len(cells) if cells else None,
        len(measured) + len(cells),
    )
