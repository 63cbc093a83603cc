"""`relaxtune batch`: many models, shapes, precisions and targets by one plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaxtune.pipeline.cli.options import FormatOption
from relaxtune.pipeline.cli.output import OutputFormat, TableView, print_json, print_table, stderr_console

if TYPE_CHECKING:
    from relaxtune.pipeline.batch.prediction import GroupPreview, Preview
    from relaxtune.pipeline.batch.run import BatchResult, CellResult
    from relaxtune.pipeline.tasks.task import TuningTask

app = typer.Typer(help="Tune many models by one plan.", no_args_is_help=True)

PlanArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The plan: a TOML file, see docs/batch.md.")]


@app.command()
def plan(file: PlanArgument, output_format: FormatOption = OutputFormat.TABLE) -> None:
    """Show the cells of a plan, the tasks they share, what is known of them and what tuning will take."""
    from relaxtune.pipeline.batch.plan import read_plan
    from relaxtune.pipeline.batch.prediction import preview
    from relaxtune.pipeline.batch.tasks import CellFault

    shown = preview(read_plan(file))
    if output_format is OutputFormat.JSON:
        print_json(_preview_data(shown))
    else:
        _print_preview(shown)
    if any(isinstance(one, CellFault) for one in shown.cells):
        raise typer.Exit(1)


@app.command()
def run(
    file: PlanArgument,
    fail_fast: Annotated[
        bool,
        typer.Option("--fail-fast/--keep-going", help="End at the first cell that is not accepted, or do the others."),
    ] = False,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Tune the tasks of a plan, then compile, compare and validate each cell. JSON is a line for each cell."""
    from relaxtune.pipeline.batch.plan import read_plan
    from relaxtune.pipeline.batch.run import run_batch
    from relaxtune.pipeline.tuning.progress import ConsoleProgress

    def told(result: CellResult) -> None:
        if output_format is OutputFormat.JSON:
            sys.stdout.write(json.dumps(result.to_json()) + "\n")
            sys.stdout.flush()
        stderr_console().print(f"{result.cell.name}: {result.status.value}", markup=False, soft_wrap=True)

    with ConsoleProgress(stderr_console()) as progress:
        result = run_batch(read_plan(file), fail_fast=fail_fast, on_cell=told, progress=progress)
    if output_format is OutputFormat.TABLE:
        _print_result(result)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _print_result(result: BatchResult) -> None:
    columns = {
        "cell": lambda one: one.cell.name,
        "status": lambda one: one.status.value,
        "validated": lambda one: None if one.validated is None else "yes" if one.validated else "NO",
        "ms untuned": lambda one: _number(one.untuned_ms, ".4g"),
        "ms shipped": lambda one: _number(one.shipped_ms, ".4g"),
        "artifact": lambda one: one.artifact,
        "why": lambda one: one.reason,
    }
    tuned = sum(summary.candidates for summary in result.tuning)
    seconds = sum(summary.seconds for summary in result.tuning)
    done = sum(one.status.value == "done" for one in result.cells)
    title = f"{result.plan.name}: {done} of {len(result.cells)} cells done; {tuned} candidates in {seconds:.1f} s"
    print_table(TableView.of(title, result.cells, columns))


def _print_preview(shown: Preview) -> None:
    columns = {
        "cell": lambda one: one.cell.name,
        "target": lambda one: one.cell.target,
        "tasks": lambda one: len(getattr(one, "tasks", ())),
        "importance": lambda one: one.cell.importance,
        "note": lambda one: one.note,
    }
    print_table(TableView.of(f"cells of {shown.plan.name}", shown.cells, columns))
    for group in shown.groups:
        tasks: dict[str, Callable[[TuningTask], object]] = {
            "task": lambda task: task.name,
            "family": lambda task: task.family,
            "weight": lambda task: task.weight,
            "cells": lambda task: len(task.functions),
            "records": partial(_records, group),
        }
        print_table(TableView.of(_headline(group), group.group.tasks, tasks))


def _records(group: GroupPreview, task: TuningTask) -> int:
    return group.records[task.workload_hash]


def _headline(group: GroupPreview) -> str:
    alone = sum(len(one.tasks) for one in group.group.cells)
    most = "as many as time allows" if group.candidates is None else f"at most {group.candidates}"
    if group.ended_by is not None:
        most = f"none, job {group.ended_by} did the same"
    costs = [
        f"{what} {'unknown' if seconds is None else f'{seconds:.0f} s'}"
        for what, seconds in (("tuning", group.tuning_s), ("finishing", group.finishing_s))
    ]
    return (
        f"{group.group.target.arch}: {len(group.group.tasks)} tasks, {alone} before merging; candidates: {most}; "
        f"predicted: {', '.join(costs)} (by {group.history.jobs} earlier jobs)"
    )


def _preview_data(shown: Preview) -> dict[str, object]:
    return {
        "plan": shown.plan.name,
        "cells": [
            {
                "cell": one.cell.name,
                "source": one.cell.source,
                "shape": one.cell.shape,
                "precision": one.cell.precision,
                "target": one.cell.target,
                "importance": one.cell.importance,
                "tags": list(one.cell.tags),
                "tasks": len(getattr(one, "tasks", ())),
                "note": one.note,
            }
            for one in shown.cells
        ],
        "targets": [_group_data(group) for group in shown.groups],
    }


def _group_data(group: GroupPreview) -> dict[str, object]:
    tasks = [
        {
            "task": task.name,
            "workload_hash": task.workload_hash,
            "family": task.family,
            "weight": task.weight,
            "cells": list(task.functions),
            "records": group.records[task.workload_hash],
        }
        for task in group.group.tasks
    ]
    return {
        "arch": group.group.target.arch,
        "tasks_before_merging": sum(len(one.tasks) for one in group.group.cells),
        "tasks": tasks,
        "candidates": group.candidates,
        "ended_by": group.ended_by,
        "predicted_tuning_s": group.tuning_s,
        "predicted_finishing_s": group.finishing_s,
        "history": {
            "candidate_s": group.history.candidate_s,
            "cell_s": group.history.cell_s,
            "jobs": group.history.jobs,
        },
    }


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"
