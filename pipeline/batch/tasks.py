"""What the cells of a plan are made of: their tuning tasks, those that several cells have once."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from relaxtune.models.errors import ModelError
from relaxtune.pipeline.batch.cells import Cell
from relaxtune.pipeline.batch.plan import Plan
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.jobs import require_device
from relaxtune.pipeline.prepare import prepare_model
from relaxtune.pipeline.tasks.extract import unique_name
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuned_model import TuningJob
from relaxtune.pipeline.tuning.options import LEVELS, TuningOptions, options_for
from relaxtune.schedules.errors import ScheduleError
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Environment, TargetKey, content_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CellTasks:
    """A cell whose model was imported and lowered, for its tasks. The model is let go: all of a plan fill the memory.

    `note` is why nothing can be measured of it here, "" where it can.
    """

    cell: Cell
    model: str
    model_sha256: str
    target: ResolvedTarget
    environment: Environment
    tasks: tuple[TuningTask, ...]
    note: str = ""


@dataclass(frozen=True)
class CellFault:
    """A cell whose model cannot be loaded, imported or lowered."""

    cell: Cell
    error: Exception

    @property
    def note(self) -> str:
        """What stops it."""
        return str(self.error) or type(self.error).__name__


@dataclass(frozen=True)
class TaskGroup:
    """The cells of one target, and their tasks: each once, its weight summed over cells times their importance."""

    cells: tuple[CellTasks, ...]
    tasks: tuple[TuningTask, ...]

    @property
    def target(self) -> ResolvedTarget:
        """What all of them are compiled for."""
        return self.cells[0].target

    @property
    def key(self) -> TargetKey:
        """The target in the database."""
        return target_key(self.target)

    @property
    def can_run(self) -> bool:
        """Whether its tasks can be measured on this machine."""
        return not self.cells[0].note

    def job(self, plan: Plan) -> TuningJob:
        """Return the tuning job of the group."""
        return TuningJob(
            model=f"batch {plan.name}",
            model_sha256=content_key(sorted({one.model_sha256 for one in self.cells})),
            target=self.target,
            environment=self.cells[0].environment,
            asked={"source": str(plan.path), "target": self.cells[0].cell.target, "cells": len(self.cells)},
        )


def prepare_cell(cell: Cell) -> CellTasks | CellFault:
    """Return the tasks of a cell, or what stops it."""
    try:
        prepared = prepare_model(cell.request)
    except Exception as error:  # a cell's own: it must not end the others
        log_fault(cell, error)
        return CellFault(cell, error)
    note = ""
    try:
        require_device(prepared)
    except PipelineError as error:
        note = str(error)
    model, sha256 = prepared.model.name, prepared.lowered.graph.source_sha256
    return CellTasks(cell, model, sha256, prepared.target, prepared.environment, prepared.tasks, note)


def log_fault(cell: Cell, error: Exception) -> None:
    """Log what stopped a cell, with a traceback where it is a defect of ours."""
    expected = isinstance(error, PipelineError | ModelError | ScheduleError | OSError)
    logger.error("cell %s: %s", cell.name, error, exc_info=not expected or logger.isEnabledFor(logging.DEBUG))


def group_cells(cells: Sequence[CellTasks]) -> tuple[TaskGroup, ...]:
    """Return the cells by target, in their order, with their tasks merged."""
    groups: dict[TargetKey, list[CellTasks]] = {}
    for one in cells:
        groups.setdefault(target_key(one.target), []).append(one)
    return tuple(TaskGroup(tuple(group), merge_tasks(group)) for group in groups.values())


def merge_tasks(cells: Sequence[CellTasks]) -> tuple[TuningTask, ...]:
    """Return the tasks of several cells of one target, equal ones once, those with the most arithmetic first."""
    found: dict[str, TuningTask] = {}
    taken: set[str] = set()
    for one in cells:
        for task in one.tasks:
            functions = {one.cell.name: tuple(name for names in task.functions.values() for name in names)}
            weight = task.weight * one.cell.importance
            known = found.get(task.workload_hash)
            if known is None:
                name = unique_name(task.name, taken)
                taken.add(name)
                found[task.workload_hash] = replace(task, name=name, weight=weight, functions=functions)
            else:
                found[task.workload_hash] = replace(
                    known,
                    weight=known.weight + weight,
                    functions={**known.functions, **functions},
                    onnx_nodes=tuple(dict.fromkeys(known.onnx_nodes + task.onnx_nodes)),
                )
    return tuple(sorted(found.values(), key=lambda t: (-t.weight * t.flops, -t.weight * t.bytes, t.name)))


def share_budget(plan: Plan, groups: Sequence[TaskGroup]) -> tuple[TuningOptions, ...]:
    """Return the tuning options of each group; the plan's budget is shared by the number of tasks.

    Without a budget each cell has the candidates of the plan's effort, less the part of its tasks that cells before it
    have too. Norms are tuned in the form that the request or the newest record says, not in all forms.
    """
    budget, effort = plan.table.budget, plan.table.effort
    every = sum(len(group.tasks) for group in groups)
    made = []
    for group in groups:
        share = len(group.tasks) / every if every else 1.0
        trials = None if budget.candidates is None else max(1, round(budget.candidates * share))
        seconds = None if budget.seconds is None else budget.seconds * share
        if trials is None and seconds is None:
            trials = _trials_of(group, LEVELS[effort].trials or 0)
        made.append(replace(options_for(effort, trials, seconds), seed=plan.table.seed, norm_forms=False))
    return tuple(made)


def _trials_of(group: TaskGroup, trials: int) -> int:
    """Return how many candidates a group gets; a cell alone gets `trials`."""
    seen: set[str] = set()
    parts = 0.0
    for one in group.cells:
        hashes = {task.workload_hash for task in one.tasks}
        parts += len(hashes - seen) / max(1, len(hashes))
        seen |= hashes
    return max(1, math.ceil(trials * parts))
