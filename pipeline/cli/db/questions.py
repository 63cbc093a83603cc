"""`relaxtune db history | failures | coverage | jobs | cost | regressions`: questions over time."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated

import typer

from relaxtune.pipeline.cli.db.common import (
    FilterOptions,
    TableOptions,
    app,
    as_utc,
    find_job,
    microseconds,
    minute,
    require_known,
)
from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.errors import UsageError


@app.command()
@takes_groups(without=("limit",))
def history(filters: FilterOptions, table: TableOptions) -> None:
    """Show tasks over time: a line for each day, version, driver and device, with the best latency so far."""
    from relaxtune.tuning_db.questions import insights

    with table.open() as database:
        points = insights.history(database, filters.select(database))
    columns = {
        "day": lambda point: point.day,
        "task": lambda point: point.name,
        "relaxtune": lambda point: point.code_version or "unknown",
        "TVM": lambda point: point.tvm_version,
        "device": lambda point: point.device_name,
        "driver": lambda point: point.driver,
        "valid/all": lambda point: f"{point.valid}/{point.candidates}",
        "best us": lambda point: microseconds(point.best_us),
        "route": lambda point: point.route and point.route.value,
        "best so far us": lambda point: microseconds(point.so_far_us),
    }
    table.emit("history", points, columns, asdict)


@app.command()
@takes_groups()
def failures(filters: FilterOptions, table: TableOptions) -> None:
    """List the causes of failed candidates, the most frequent first."""
    from relaxtune.tuning_db.questions import insights

    with table.open() as database:
        causes = insights.failures(database, filters.select(database), limit=table.limit)
    columns = {
        "count": lambda cause: cause.count,
        "status": lambda cause: cause.status.value,
        "cause": lambda cause: cause.cause,
        "tasks": lambda cause: cause.workloads,
        "example id": lambda cause: cause.example_id,
        "last (UTC)": lambda cause: minute(cause.last_at),
    }
    table.emit("failures by cause", causes, columns, asdict)


@app.command()
@takes_groups(without=("model", "limit"))
def coverage(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name in `relaxtune db jobs`.")],
    filters: FilterOptions,
    table: TableOptions,
) -> None:
    """List the tasks of a model with their best record on each device, and its age."""
    from relaxtune.tuning_db.questions import insights

    with table.open() as database:
        lines = insights.coverage(database, model, filters.select(database))
        known = sorted({job.model for job in database.list_jobs()})
    if not lines:
        raise UsageError(f"No job of this database tuned {model!r}; it knows {', '.join(known) or 'no model'}.")
    columns = {
        "task": lambda line: line.name,
        "family": lambda line: line.family,
        "runs": lambda line: line.weight,
        "device": lambda line: line.device_name or "no record",
        "arch": lambda line: line.arch,
        "valid/failed": lambda line: f"{line.valid}/{line.failed}",
        "best us": lambda line: microseconds(line.best_us),
        "age days": lambda line: None if line.age_days is None else f"{line.age_days:.1f}",
    }
    tasks = {line.workload_hash for line in lines}
    covered = {line.workload_hash for line in lines if line.covered}
    title = f"{model}: {len(covered)} of {len(tasks)} tasks have a record"
    table.emit(title, lines, columns, lambda line: {**asdict(line), "covered": line.covered})


@app.command()
@takes_groups()
def jobs(
    table: TableOptions, model: Annotated[str | None, typer.Option(help="Only jobs of this model.")] = None
) -> None:
    """List the jobs, the newest first."""
    with table.open() as database:
        require_known(database, model=model)
        found = database.list_jobs(model=model, limit=table.limit)
    columns = {
        "job": lambda job: job.id,
        "model": lambda job: job.model,
        "arch": lambda job: job.target.arch,
        "started (UTC)": lambda job: minute(job.started_at),
        "seconds": lambda job: job.finished_at and f"{(job.finished_at - job.started_at).total_seconds():.0f}",
        "outcome": lambda job: job.outcome,
    }
    table.emit("jobs", found, columns, asdict)


@app.command()
@takes_groups(without=("limit",))
def cost(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its start, from `relaxtune db jobs`.")],
    table: TableOptions,
) -> None:
    """Show the cost of a job: candidates, seconds, device seconds."""
    from relaxtune.tuning_db.questions import insights

    with table.open() as database:
        found = insights.job_cost(database, find_job(database, job))
    facts = {
        "model": found.job.model,
        "tasks": found.tasks,
        "candidates": found.candidates,
        **{status.value: count for status, count in found.by_status if count},
        "wall seconds": None if found.wall_s is None else f"{found.wall_s:.1f}",
        "seconds of tasks": f"{found.task_s:.1f}",
        "seconds of candidates": f"{found.candidate_s:.1f}",
        "device seconds, at least": f"{found.device_s:.4f}",
    }
    data = {**asdict(found), "by_status": {status.value: count for status, count in found.by_status}}
    table.emit_facts(f"cost of job {found.job.id}", facts, data)


@app.command()
@takes_groups(without=("tvm", "status", "since", "until", "limit"))
def regressions(
    filters: FilterOptions,
    table: TableOptions,
    split_at: datetime | None = option(None, "Compare records before this time (UTC) with records after it."),
    old_tvm: str | None = option(None, "Compare records of this TVM version with --new-tvm."),
    new_tvm: str | None = option(None, "The TVM version to compare with --old-tvm."),
    threshold: float = option(1.05, "List tasks that surely take more than this many times as long; 0: all tasks."),
    alpha: float = option(0.05, "Probability of a false alarm among all tasks."),
) -> None:
    """List tasks that surely became slower between two TVM versions or dates, the worst first.

    Records of the same task, device and route are compared: kernels measured on both sides, else the best records of
    finished jobs. The column `all kernels` shows how all kernels of the device changed together.
    """
    from relaxtune.pipeline.gate import history as judged

    if (split_at is None) == (old_tvm is None) or (old_tvm is None) != (new_tvm is None):
        raise UsageError("regressions needs --split-at DATE, or --old-tvm VERSION with --new-tvm VERSION")
    if not 0 < alpha < 1:
        raise UsageError(f"--alpha {alpha:g} is no probability; expected more than 0 and less than 1, such as 0.05")
    moment = as_utc(split_at)
    with table.open() as database:
        selected = filters.select(database)
        before = replace(selected, tvm_version=old_tvm, until=moment)
        after = replace(selected, tvm_version=new_tvm, since=moment)
        found = judged.regressions(database, before, after, threshold=threshold, alpha=alpha)
    columns = {
        "task": lambda one: one.name,
        "family": lambda one: one.family,
        "device": lambda one: one.device_name,
        "route": lambda one: one.route.value,
        "before us": lambda one: microseconds(one.before_us),
        "after us": lambda one: microseconds(one.after_us),
        "times": lambda one: f"{one.ratio:.2f}",
        "at least": lambda one: "" if one.least is None else f"{one.least:.2f}",
        "all kernels": lambda one: f"{one.device_ratio:.2f}",
        "pairs": lambda one: one.kernels,
    }
    table.emit("regressions", found, columns, asdict)
