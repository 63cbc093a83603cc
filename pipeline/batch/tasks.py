"""The tuning tasks of the cells of a plan, each once for all cells that have it."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from relaxtune.models.errors import ModelError
from relaxtune.pipeline.batch.cells import Cell, source_key
from relaxtune.pipeline.batch.plan import Plan
from relaxtune.pipeline.environment import UNKNOWN_DEVICE, target_key
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.jobs.compile_and_tune import not_here
from relaxtune.pipeline.jobs.tuned_model import TuningJob
from relaxtune.pipeline.prepare import Imported, ModelRequest, PreparedModel, import_request, prepare_model
from relaxtune.pipeline.tasks.extract import unique_name
from relaxtune.pipeline.tasks.task import TaskFacts, TuningTask
from relaxtune.pipeline.tuning.local.devices import choose_devices
from relaxtune.pipeline.tuning.options import LEVELS, TuningOptions, options_for
from relaxtune.pipeline.tuning.task_start import TaskStart
from relaxtune.schedules.errors import ScheduleError
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.tuning_db.records import Environment, TargetKey, content_key

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=TaskFacts)


@dataclass(frozen=True)
class LoweredCell:
    """A cell whose model was imported and lowered, for what is known of its tasks.

    `note` is why nothing can be measured of it here, "" where it can.
    """

    cell: Cell
    model: str
    model_sha256: str
    target: ResolvedTarget
    environment: Environment
    tasks: tuple[TaskFacts, ...]
    note: str = ""


@dataclass(frozen=True)
class CellTasks(LoweredCell):
    """A cell with its tasks, to be tuned. The model is let go: all of a plan fill the memory.

    `starts` has what tasks begin with, by workload hash, where that was found already (`with_starts`).
    """

    tasks: tuple[TuningTask, ...]
    starts: Mapping[str, TaskStart] = field(default_factory=dict)

    def with_starts(self) -> CellTasks:
        """Return the cell with what its tasks begin with, where the default routes are tried."""
        routes = TuningOptions().routes
        found = {task.workload_hash: TaskStart(task, self.target, routes).find_all() for task in self.tasks}
        return replace(self, starts=found)


@dataclass(frozen=True)
class CellFault:
    """A cell whose model cannot be loaded, imported or lowered."""

    cell: Cell
    note: str  # The message of the error.


@dataclass(frozen=True)
class TaskGroup:
    """The cells of one target, and their tasks: each once, its weight summed over cells times their importance."""

    cells: tuple[LoweredCell, ...]
    tasks: tuple[TaskFacts, ...]

    @property
    def target(self) -> ResolvedTarget:
        """The target of all cells."""
        return self.cells[0].target

    @property
    def key(self) -> TargetKey:
        """The target in the database."""
        return target_key(self.target)


def prepare_alike(cells: Sequence[Cell]) -> list[CellTasks | CellFault]:
    """Return the tasks of cells of one model in one shape, which is imported once."""
    found: list[Imported] = []

    def importing(request: ModelRequest) -> Imported:
        if not found:
            found.append(import_request(request))
        return found[0]

    return [prepare_cell(cell, importing=importing) for cell in cells]


def prepare_cell(
    cell: Cell,
    keep: Callable[[PreparedModel], None] | None = None,
    importing: Callable[[ModelRequest], Imported] = import_request,
) -> CellTasks | CellFault:
    """Return the tasks of a cell, or what stops it; `keep` is given the model, which is else let go."""
    try:
        prepared = prepare_model(cell.request, importing)
    except Exception as error:  # a cell's own: it must not end the others
        log_fault(cell, error)
        return CellFault(cell, str(error) or type(error).__name__)
    if keep is not None:
        keep(prepared)
    note = note_of(prepared.target, prepared.environment)
    model, sha256 = prepared.model.name, prepared.lowered.graph.source_sha256
    return CellTasks(cell, model, sha256, prepared.target, prepared.environment, prepared.tasks, note)


def note_of(target: ResolvedTarget, environment: Environment) -> str:
    """Return why nothing can be measured here for a target, "" where it can."""
    return not_here(target) if environment.device_name == UNKNOWN_DEVICE else ""


def log_fault(cell: Cell, error: Exception) -> None:
    """Log what stopped a cell, with a traceback where it is a defect of ours."""
    expected = isinstance(error, PipelineError | ModelError | ScheduleError | OSError)
    logger.error("cell %s: %s", cell.name, error, exc_info=not expected or logger.isEnabledFor(logging.DEBUG))


def group_targets(cells: Sequence[Cell]) -> list[tuple[ResolvedTarget, list[Cell]]]:
    """Return cells by target, in their order."""
    groups: dict[TargetKey, tuple[ResolvedTarget, list[Cell]]] = {}
    for cell in cells:
        target = resolve_target(cell.target)
        groups.setdefault(target_key(target), (target, []))[1].append(cell)
    return list(groups.values())


def group_cells(cells: Sequence[LoweredCell]) -> tuple[TaskGroup, ...]:
    """Return the cells by target, in their order, with their tasks merged."""
    groups: defaultdict[TargetKey, list[LoweredCell]] = defaultdict(list)
    for one in cells:
        groups[target_key(one.target)].append(one)
    return tuple(TaskGroup(tuple(group), merge_tasks(group)) for group in groups.values())


def merge_tasks(cells: Sequence[LoweredCell]) -> tuple[TaskFacts, ...]:
    """Return the tasks of several cells of one target, equal ones once, those with the most arithmetic first."""
    found: dict[str, TaskFacts] = {}
    taken: set[str] = set()
    for one in cells:
        for task in one.tasks:
            of_cell = weighted(task, one.cell)
            known = found.get(task.workload_hash)
            if known is None:
                name = unique_name(task.name, taken)
                taken.add(name)
                found[task.workload_hash] = replace(of_cell, name=name)
            else:
                found[task.workload_hash] = known.joined(of_cell)
    return tuple(sorted(found.values(), key=lambda t: (-t.weight * t.flops, -t.weight * t.bytes, t.name)))


def weighted(task: T, cell: Cell) -> T:
    """Return a task as a cell has it: its weight times the cell's importance, and its functions by the cell's name."""
    functions = {cell.name: tuple(name for names in task.functions.values() for name in names)}
    return replace(task, weight=task.weight * cell.importance, functions=functions)


def group_options(plan: Plan, cells: int, every: int, devices: int = 1) -> TuningOptions:
    """Return the tuning options of a target with so many of every cell; the plan's budget is shared by cells.

    Its hours of GPUs are shared by the target's devices.

    Without a budget each cell has the candidates of the plan's effort, less the part of its tasks that cells before it
    have too. The graph is as the request or the newest record says; it is not searched.
    """
    budget, effort = plan.table.budget, plan.table.effort
    share = cells / every
    trials = None if budget.candidates is None else max(1, round(budget.candidates * share))
    limit_s = budget.seconds_on(devices)
    seconds = None if limit_s is None else limit_s * share
    if trials is None and seconds is None:
        trials = cells * (LEVELS[effort].trials or 0)
    return replace(options_for(effort, trials, seconds), seed=plan.table.seed, graph_s=0.0)


def trials_of(plan: Plan, every: int) -> Callable[[Cell, float], int | None]:
    """Return what tells how many candidates a cell may add to a run.

    The callable is given the cell and the part of its tasks that no cell before it has.
    """
    budget, level = plan.table.budget, LEVELS[plan.table.effort].trials or 0
    given = 0

    def trials(cell: Cell, part: float) -> int | None:
        nonlocal given
        if budget.candidates is not None:
            given += 1
            return round(budget.candidates * given / every) - round(budget.candidates * (given - 1) / every)
        return math.ceil(level * part) if budget.seconds_on(1) is None else None

    return trials


def share_budget(plan: Plan, groups: Sequence[TaskGroup]) -> tuple[TuningOptions, ...]:
    """Return the tuning options of each group, and with them how many candidates its cells bring at most.

    Hours of GPUs are those of this machine's, or of one where it has none for a target.
    """
    every = sum(len(group.cells) for group in groups)
    trials = trials_of(plan, every)
    shares = []
    for group in groups:
        devices = len(choose_devices(group.target)) if not group.cells[0].note else 1
        options = group_options(plan, len(group.cells), every, devices)
        seen: set[str] = set()
        most: int | None = 0
        for one in group.cells:
            hashes = {task.workload_hash for task in one.tasks}
            more = trials(one.cell, len(hashes - seen) / max(1, len(hashes)))
            most = None if more is None or most is None else most + more
            seen |= hashes
        shares.append(replace(options, trials=most))
    return tuple(shares)


def group_job(plan: Plan, cells: Sequence[Cell], target: ResolvedTarget, environment: Environment) -> TuningJob:
    """Return the tuning job of a target's cells: all of the plan, so that a resumed batch goes on with the same."""
    models = [[source_key(cell.source), cell.shape, list(cell.buckets), cell.precision, cell.seed] for cell in cells]
    return TuningJob(
        model=f"batch {plan.name}",
        model_sha256=content_key(sorted(models, key=str)),
        target=target,
        environment=environment,
        request={"source": str(plan.path), "target": cells[0].target, "cells": len(cells)},
    )
