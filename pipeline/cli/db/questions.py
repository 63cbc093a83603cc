"""`relaxtune db history | failures | coverage | jobs | cost | regressions`: questions over time."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated

import typer

from relaxtune.pipeline.cli.db.common import (
    DEFAULT_LIMIT,
    DataFormatOption,
    LimitOption,
    app,
    microseconds,
    open_for_reading,
)
from relaxtune.pipeline.cli.db.filters import as_utc, takes_filters
from relaxtune.pipeline.cli.options import DEFAULT_DATABASE, DatabaseOption
from relaxtune.pipeline.cli.output import DataFormat, TableView, emit
from relaxtune.pipeline.errors import UsageError
from relaxtune.tuning_db.records import Job, RecordFilter


@app.command()
@takes_filters()
def history(
    db: DatabaseOption = DEFAULT_DATABASE,
    output_format: DataFormatOption = DataFormat.TABLE,
    *,
    filters: RecordFilter,
) -> None:
    """Show tasks over time: each day, TVM version and device, and the best so far."""
    from relaxtune.tuning_db.questions import insights

    with open_for_reading(db) as database:
        points = insights.history(database, filters)
    rows = tuple(
        (
            str(p.day),
            p.name,
            p.tvm_version,
            p.device_name,
            f"{p.valid}/{p.candidates}",
            microseconds(p.best_us),
            "" if p.route is None else p.route.value,
            microseconds(p.so_far_us),
        )
        for p in points
    )
    columns = ("day", "task", "TVM", "device", "valid/all", "best us", "route", "best so far us")
    emit(output_format, [asdict(point) for point in points], TableView("history", columns, rows))


@app.command()
@takes_filters()
def failures(
    db: DatabaseOption = DEFAULT_DATABASE,
    limit: LimitOption = DEFAULT_LIMIT,
    output_format: DataFormatOption = DataFormat.TABLE,
    *,
    filters: RecordFilter,
) -> None:
    """Say why candidates failed, the most frequent cause first."""
    from relaxtune.tuning_db.questions import insights

    with open_for_reading(db) as database:
        causes = insights.failures(database, filters, limit=limit)
    rows = tuple(
        (str(c.count), c.status.value, c.cause, str(c.workloads), str(c.example_id), f"{c.last_at:%Y-%m-%d %H:%M}")
        for c in causes
    )
    columns = ("count", "status", "cause", "tasks", "example id", "last (UTC)")
    emit(output_format, [asdict(cause) for cause in causes], TableView("failures by cause", columns, rows))


@app.command()
@takes_filters(without=("model",))
def coverage(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name, as its jobs recorded it.")],
    db: DatabaseOption = DEFAULT_DATABASE,
    output_format: DataFormatOption = DataFormat.TABLE,
    *,
    filters: RecordFilter,
) -> None:
    """Say which tasks of a model have records, how old they are, and where they were measured."""
    from relaxtune.tuning_db.questions import insights

    with open_for_reading(db) as database:
        lines = insights.coverage(database, model, filters)
        known = sorted({job.model for job in database.list_jobs()})
    if not lines:
        raise UsageError(f"No job of this database tuned {model!r}; it knows {', '.join(known) or 'no model'}.")
    rows = tuple(
        (
            line.name,
            line.family,
            str(line.weight),
            line.device_name or "no record",
            line.arch or "",
            f"{line.valid}/{line.failed}",
            microseconds(line.best_us),
            "" if line.age_days is None else f"{line.age_days:.1f}",
        )
        for line in lines
    )
    columns = ("task", "family", "runs", "device", "arch", "valid/failed", "best us", "age days")
    data = [{**asdict(line), "covered": line.covered} for line in lines]
    tasks = {line.workload_hash for line in lines}
    covered = {line.workload_hash for line in lines if line.covered}
    emit(output_format, data, TableView(f"{model}: {len(covered)} of {len(tasks)} tasks have a record", columns, rows))


@app.command()
def jobs(
    db: DatabaseOption = DEFAULT_DATABASE,
    model: Annotated[str | None, typer.Option("--model", help="Only jobs of this model.")] = None,
    limit: LimitOption = DEFAULT_LIMIT,
    output_format: DataFormatOption = DataFormat.TABLE,
) -> None:
    """List the jobs, the newest first."""
    with open_for_reading(db) as database:
        found = database.list_jobs(model=model, limit=limit)
    rows = tuple(
        (job.id, job.model, job.target.arch, f"{job.started_at:%Y-%m-%d %H:%M}", _duration(job), job.outcome or "")
        for job in found
    )
    columns = ("job", "model", "arch", "started (UTC)", "seconds", "outcome")
    emit(output_format, [asdict(job) for job in found], TableView("jobs", columns, rows))


def _duration(job: Job) -> str:
    return "" if job.finished_at is None else f"{(job.finished_at - job.started_at).total_seconds():.0f}"


@app.command()
def cost(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The id of a job, from `relaxtune db jobs`.")],
    db: DatabaseOption = DEFAULT_DATABASE,
    output_format: DataFormatOption = DataFormat.TABLE,
) -> None:
    """Say what a job took: candidates, seconds, device seconds."""
    from relaxtune.tuning_db.questions import insights

    with open_for_reading(db) as database:
        found = insights.job_cost(database, job)
    rows = [
        ("model", found.job.model),
        ("tasks", str(found.tasks)),
        ("candidates", str(found.candidates)),
        *((status.value, str(count)) for status, count in found.by_status if count),
        ("wall seconds", "" if found.wall_s is None else f"{found.wall_s:.1f}"),
        ("seconds of tasks", f"{found.task_s:.1f}"),
        ("seconds of candidates", f"{found.candidate_s:.1f}"),
        ("device seconds, at least", f"{found.device_s:.4f}"),
    ]
    data = {**asdict(found), "by_status": {status.value: count for status, count in found.by_status}}
    emit(output_format, data, TableView(f"cost of job {job}", ("what", "value"), tuple(rows)))


@app.command()
@takes_filters(without=("tvm", "status", "since", "until"))
def regressions(
    db: DatabaseOption = DEFAULT_DATABASE,
    split_at: Annotated[
        datetime | None, typer.Option("--split-at", help="Compare what was measured before this time (UTC) with after.")
    ] = None,
    old_tvm: Annotated[str | None, typer.Option("--old-tvm", help="Compare this TVM version ...")] = None,
    new_tvm: Annotated[str | None, typer.Option("--new-tvm", help="... with this one.")] = None,
    threshold: Annotated[float, typer.Option(help="Show tasks that take more than this many times as long.")] = 1.05,
    output_format: DataFormatOption = DataFormat.TABLE,
    *,
    filters: RecordFilter,
) -> None:
    """List the tasks whose best got slower between two TVM versions or dates, the worst first."""
    from relaxtune.tuning_db.questions import insights

    if (split_at is None) == (old_tvm is None) or (old_tvm is None) != (new_tvm is None):
        raise UsageError("regressions needs --split-at DATE, or --old-tvm VERSION with --new-tvm VERSION")
    moment = as_utc(split_at)
    with open_for_reading(db) as database:
        found = insights.regressions(
            database,
            replace(filters, tvm_version=old_tvm, until=moment),
            replace(filters, tvm_version=new_tvm, since=moment),
            threshold=threshold,
        )
    rows = tuple(
        (r.name, r.family, r.device_name, microseconds(r.before_us), microseconds(r.after_us), f"{r.ratio:.2f}")
        for r in found
    )
    columns = ("task", "family", "device", "before us", "after us", "times")
    data = [{**asdict(regression), "ratio": regression.ratio} for regression in found]
    emit(output_format, data, TableView("regressions", columns, rows))
