"""`relaxtune batch`: many models, shapes, precisions and targets by one plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from relaxtune.pipeline.cli.batch_view import BatchView, final_table, status_of, status_rows
from relaxtune.pipeline.cli.db.batches import batch_data, cell_data
from relaxtune.pipeline.cli.db.common import open_for_reading
from relaxtune.pipeline.cli.options import DEFAULT_DATABASE, DatabaseOption, FormatOption
from relaxtune.pipeline.cli.output import (
    OutputFormat,
    emit,
    leave_out_details,
    print_json,
    print_table,
    stderr_console,
    stdout_console,
)
from relaxtune.pipeline.cli.report import write_page
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.printable import short
from relaxtune.pipeline.printed_tables import TableView
from relaxtune.tuning_db.urls import DatabaseUrl

if TYPE_CHECKING:
    from relaxtune.pipeline.batch.events import BatchResult
    from relaxtune.pipeline.batch.prediction import GroupPreview, Preview
    from relaxtune.tuning_db.cell_states import Batch, BatchCell

app = typer.Typer(help="Tune many models by one plan.", no_args_is_help=True)

# Of a plan, so many tasks are listed, those with the most arithmetic, with so much of their names.
_TASKS_SHOWN = 30
_PROGRESS_S = 5.0

PlanArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The plan: a TOML file, see docs/batch.md.")]


@app.command()
def plan(file: PlanArgument, output_format: FormatOption = OutputFormat.TABLE) -> None:
    """Show the cells of a plan, the tasks they share, their records, and the predicted time. Nothing is measured."""
    from relaxtune.pipeline.batch.plan import read_plan
    from relaxtune.pipeline.batch.prediction import preview
    from relaxtune.pipeline.batch.tasks import CellFault

    leave_out_details()
    shown = preview(read_plan(file), _progress())
    if output_format is OutputFormat.JSON:
        print_json(_preview_data(shown))
    else:
        _print_preview(shown)
    if any(isinstance(one, CellFault) for one in shown.cells):
        raise typer.Exit(1)


def _progress() -> Callable[[str], None]:
    """Return a listener that prints a line of progress on stderr, one in five seconds at most."""
    console, last = stderr_console(), time.monotonic()

    def show(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_S:
            console.print(line)
            last = time.monotonic()

    return show


FailFastOption = Annotated[
    bool, typer.Option("--fail-fast/--keep-going", help="Stop at the first cell that is not accepted, or continue.")
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="ADDRESS", help="Measure on this Ray cluster. Default: this machine.")
]
BatchArgument = Annotated[
    str | None,
    typer.Argument(metavar="[BATCH]", help="A plan's file, a batch's name or start of its id. Default: the newest."),
]


@app.command()
def run(
    file: PlanArgument,
    fail_fast: FailFastOption = False,
    cluster: ClusterOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Tune the tasks of a plan; compile, compare and validate each cell. --format json prints a line for each cell."""
    from relaxtune.pipeline.batch.cells import list_cells
    from relaxtune.pipeline.batch.driver import run_batch
    from relaxtune.pipeline.batch.plan import read_plan

    leave_out_details()
    read = read_plan(file)
    names = [cell.name for cell in list_cells(read, _progress())]
    with BatchView(stderr_console(), json_lines=output_format is OutputFormat.JSON, cells=names) as view:
        result = run_batch(read, fail_fast=fail_fast, on_event=view.take, cluster=cluster)
    _end(result, output_format)


@app.command()
def resume(
    batch: BatchArgument = None,
    db: DatabaseOption = DEFAULT_DATABASE,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat failed, rejected and cancelled cells.")] = False,
    fail_fast: FailFastOption = False,
    cluster: ClusterOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Continue a batch whose driver is gone. Recorded candidates are not measured again."""
    from relaxtune.pipeline.batch.driver import resume_batch

    leave_out_details()
    place, start = _place(batch, db)
    with BatchView(stderr_console(), json_lines=output_format is OutputFormat.JSON) as view:
        result = resume_batch(place, start, retry=retry, fail_fast=fail_fast, on_event=view.take, cluster=cluster)
    _end(result, output_format)


@app.command()
def status(
    batch: BatchArgument = None, db: DatabaseOption = DEFAULT_DATABASE, output_format: FormatOption = OutputFormat.TABLE
) -> None:
    """Show the state of each cell of a batch. Cells are `dead` if their driver is gone."""
    from relaxtune.tuning_db.batches import get_batch, list_cells

    place, start = _place(batch, db)
    with open_for_reading(place) as database:
        found = get_batch(database, start)
        cells = list_cells(database, found.id)
    data = {**batch_data(found), "cells": [cell_data(cell) for cell in cells]}
    emit(output_format, data, final_table(_title(found, cells), status_rows(cells)))


@app.command()
def watch(
    batch: BatchArgument = None,
    db: DatabaseOption = DEFAULT_DATABASE,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes.")] = 2.0,
) -> None:
    """Show the cells of a batch until it is over, or its driver is gone."""
    from relaxtune.tuning_db.batches import get_batch, list_cells

    place, start = _place(batch, db)
    console = stdout_console()
    shown: dict[str, str] = {}
    with open_for_reading(place) as database, Live(console=console, auto_refresh=False) as live:
        while True:
            found = get_batch(database, start)
            start, cells = found.id, list_cells(database, found.id)
            if console.is_terminal:
                live.update(final_table(_title(found, cells), status_rows(cells)), refresh=True)
            else:
                for cell in cells:
                    if shown.get(cell.spec.name) != (now := status_of(cell)):
                        shown[cell.spec.name] = now
                        typer.echo(f"{cell.spec.name}: {now}")
            if not found.held:
                break
            time.sleep(every)
    if not console.is_terminal:
        typer.echo(_title(found, cells))


@app.command()
def report(
    batch: BatchArgument = None,
    db: DatabaseOption = DEFAULT_DATABASE,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The page. Default: NAME.html, by the batch's name.")
    ] = None,
) -> None:
    """Write a page about a batch: cells before and after, attempts, and the time of each model by kernel."""
    from relaxtune.pipeline.batch.report import render_batch
    from relaxtune.tuning_db.batches import get_batch

    place, start = _place(batch, db)
    with open_for_reading(place) as database:
        found = get_batch(database, start)
        write_page(render_batch(database, found), out or Path(f"{found.name}.html"))


@app.command()
def cancel(
    cell: Annotated[str, typer.Argument(metavar="CELL", help="The cell's name, from `relaxtune batch status`.")],
    batch: BatchArgument = None,
    db: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Remove a cell from a running batch, within seconds."""
    from relaxtune.tuning_db.batches import cancel_cell, get_batch
    from relaxtune.tuning_db.store import TuningDatabase

    place, start = _place(batch, db)
    with TuningDatabase.open(place, create=False) as database:
        found = get_batch(database, start)
        cancel_cell(database, found.id, cell)
    typer.echo(f"{cell} of {found.name} is cancelled")


def _place(batch: str | None, db: DatabaseUrl) -> tuple[DatabaseUrl, str | None]:
    """Return the database of a batch and how it is called there; a plan's file says both."""
    if batch is None or not batch.endswith(".toml"):
        return db, batch
    from relaxtune.pipeline.batch.plan import read_plan
    from relaxtune.tuning_db.sql.engine import parse_location

    plan = read_plan(batch)
    path = parse_location(plan.database).path
    if path is not None and not path.exists():
        raise UsageError(f"{batch} was not run yet: {path} is not there. Begin with: relaxtune batch run {batch}")
    return plan.database, plan.name


def _end(result: BatchResult, output_format: OutputFormat) -> None:
    """Print the table of all cells, unless each was printed as JSON, and exit with the code of the batch."""
    if output_format is OutputFormat.TABLE:
        tuned = sum(summary.candidates for summary in result.tuning)
        seconds = sum(summary.seconds for summary in result.tuning)
        title = (
            f"{result.plan.name}: {result.accepted} of {len(result.cells)} cells accepted; "
            f"{tuned} candidates in {seconds:.1f} s"
        )
        rows = [(one.cell.name, one.state.value, one.facts) for one in result.cells]
        print_table(final_table(title, rows))
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _title(batch: Batch, cells: Sequence[BatchCell]) -> str:
    states = [status_of(cell) for cell in cells]
    counts = ", ".join(f"{states.count(one)} {one}" for one in dict.fromkeys(states))
    how = batch.outcome or ("going on" if batch.held else "its driver is gone: relaxtune batch resume")
    return f"{batch.name} ({batch.id[:8]}) on {batch.driver.host}, process {batch.driver.pid}: {how}; {counts}"


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
        _print_group(group)


def _print_group(group: GroupPreview) -> None:
    columns = {
        "task": lambda task: short(task.name),
        "family": lambda task: task.family,
        "weight": lambda task: task.weight,
        "cells": lambda task: len(task.functions),
        "records": lambda task: group.records[task.workload_hash],
    }
    print_table(TableView.of(_headline(group), group.group.tasks[:_TASKS_SHOWN], columns))
    if len(group.group.tasks) > _TASKS_SHOWN:
        typer.echo(f"and {len(group.group.tasks) - _TASKS_SHOWN} smaller tasks; --format json has all of them")


def _headline(group: GroupPreview) -> str:
    alone = sum(len(one.tasks) for one in group.group.cells)
    most = "as many as time allows" if group.candidates is None else f"at most {group.candidates}"
    if group.ended_by is not None:
        most = f"none, job {group.ended_by[:8]} did the same"
    costs = [
        f"{what} {'unknown' if seconds is None else f'{seconds:.0f} s'}"
        for what, seconds in (("tuning", group.tuning_s), ("finishing", group.finishing_s))
    ]
    by = f"by {group.history.jobs} earlier jobs" if group.history.jobs else "the database has no earlier job of it"
    return (
        f"{group.group.target.arch}: {len(group.group.tasks)} tasks, {alone} before merging; candidates: {most}; "
        f"predicted: {', '.join(costs)} ({by})"
    )


def _preview_data(shown: Preview) -> dict[str, object]:
    return {
        "plan": shown.plan.name,
        "cells": [
            {
                "cell": one.cell.name,
                **{name: getattr(one.cell, name) for name in ("source", "shape", "precision", "target", "importance")},
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
        "history": {name: getattr(group.history, name) for name in ("candidate_s", "cell_s", "jobs")},
    }
