"""What the pages show: each function asks the database and returns a title and HTML, every text in it escaped."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from relaxtune.pipeline.batch.report import batch_body
from relaxtune.pipeline.dashboard.curve import step_curve
from relaxtune.pipeline.report.html import number, percent, section, table, tiles
from relaxtune.pipeline.report.kernel import KernelRow
from relaxtune.pipeline.report.report import Report, report_artifact
from relaxtune.tuning_db.batches import get_batch, list_batches, list_cells
from relaxtune.tuning_db.cell_states import Batch
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.jobs import Job
from relaxtune.tuning_db.questions.artifacts import ArtifactSummary, artifacts
from relaxtune.tuning_db.questions.insights import coverage, failures, history, job_cost
from relaxtune.tuning_db.questions.progress import job_progress
from relaxtune.tuning_db.records import RecordFilter, Status
from relaxtune.tuning_db.tags import TagMove, list_moves, stood_at

LISTED = 25
Html = str


@dataclass(frozen=True)
class Page:
    """A title, and the HTML between the navigation and the foot. `live` pages are read anew every few seconds."""

    title: str
    body: Html
    live: bool = False


def overview(database: TuningDatabase, counts: Mapping[Status, int] | None) -> Page:
    """Return the first page: records by status (None: not counted yet), and the newest batches, jobs and artifacts."""
    told = "being counted" if counts is None else "none yet: `relaxtune tune` or `relaxtune batch run` makes them"
    known = counts or {}
    facts = [(f"records {status.value}", f"{known[status]:,}") for status in Status if known.get(status)]
    parts = [
        f"<h1>{_text(database.url)}</h1>",
        tiles(facts or [("records", told)]),
        "<h2>Batches</h2>",
        _batches(database, list_batches(database, limit=LISTED)),
        "<h2>Jobs</h2>",
        _jobs(database.list_jobs(limit=LISTED)),
        "<h2>Artifacts</h2>",
        _artifacts(database, artifacts(database, limit=LISTED)),
    ]
    return Page("overview", "".join(parts), live=True)


def batch(database: TuningDatabase, batch_id: str) -> Page:
    """Return the cells of a batch and the attempts at them."""
    found = get_batch(database, batch_id)
    return Page(f"batch {found.name}", batch_body(database, found), live=found.held)


def job(database: TuningDatabase, job_id: str) -> Page:
    """Return what a job measured: how the model got faster, its tasks, why candidates failed, and what it took."""
    found, progress = database.get_job(job_id), job_progress(database, job_id)
    took = None if found.finished_at is None else (found.finished_at - found.started_at).total_seconds()
    timed = [task for task in progress.tasks if task.best_us is not None]
    total = sum(task.weight * (task.best_us or 0.0) for task in timed)
    facts = [
        *((f"candidates {status.value}", f"{count:,}") for status, count in progress.by_status.items()),
        ("tasks with a time", f"{len(timed)} of {len(progress.tasks)}"),
        *([("seconds from start to end", number(took))] if took is not None else []),
        ("seconds of building and measuring", number(progress.candidate_s)),
    ]
    points = [(seconds, us / 1e3) for seconds, us in progress.curve]
    rows = [
        _row(
            _link(f"/tasks/{quote(task.workload_hash)}", task.name),
            task.family,
            task.weight,
            number(task.best_us),
            number(task.best_us and task.weight * task.best_us),
            percent(task.best_us and total and task.weight * task.best_us / total),
            task.valid,
            task.failed,
            number(task.seconds),
        )
        for task in progress.tasks
    ]
    causes = [
        _row(cause.status.value, cause.cause, cause.count, cause.workloads, cause.example_id)
        for cause in failures(database, RecordFilter(job_id=job_id), limit=LISTED)
    ]
    parts = [
        f"<h1>{_text(found.model)}</h1>",
        f"<p>Job {_text(found.id)}, {_text(found.target.kind)} {_text(found.target.arch)}, began"
        f" {_minute(found.started_at)} UTC: {_text(found.outcome or 'not over, or killed')}.</p>",
        tiles(facts),
        "<h2>Best so far</h2>",
        _plot(step_curve(points, "seconds", "ms")) or "<p>Fewer than two improvements were measured.</p>",
        "<p>All calls of all kernels, in ms, each timed alone.</p>",
        "<h2>Tasks</h2>",
        table(
            ("task", "family", "calls", "us a call", "us", "share", "valid", "failed", "seconds"),
            rows,
            {"task", "family"},
        ),
        "<h2>Why candidates failed</h2>",
        table(("status", "cause", "candidates", "tasks", "record"), causes, {"status", "cause"}) if causes else _NONE,
    ]
    return Page(f"job {found.model}", "".join(parts), live=found.finished_at is None)


def task(database: TuningDatabase, workload_hash: str) -> Page:
    """Return the days of a task: each TVM version and device, and the best so far."""
    days = history(database, workload_hash=workload_hash)
    if not days:
        raise NotFoundError(f"no record of the task {workload_hash}")
    rows = [
        _row(
            f"{day.day}",
            day.tvm_version,
            day.device_name,
            day.candidates,
            day.valid,
            number(day.best_us),
            day.route.value if day.route else "",
            number(day.so_far_us),
        )
        for day in days
    ]
    columns = ("day", "tvm", "device", "candidates", "valid", "best us", "route", "so far us")
    body = f"<h1>{_text(days[-1].name)}</h1><p><code>{_text(workload_hash)}</code></p>"
    return Page(f"task {days[-1].name}", body + table(columns, rows, {"day", "tvm", "device", "route"}))


def model(database: TuningDatabase, name: str) -> Page:
    """Return what is known of a model: how much of it is measured on each device, its jobs, its artifacts."""
    jobs = database.list_jobs(model=name, limit=LISTED)
    made = artifacts(database, model=name, limit=LISTED)
    if not jobs and not made:
        raise NotFoundError(f"no job and no artifact of the model {name}")
    found = coverage(database, name)
    tasks = {one.workload_hash for one in found}
    devices = sorted({(one.device_name, one.arch) for one in found if one.device_name is not None})
    rows = []
    for device, arch in devices:
        here = [one for one in found if (one.device_name, one.arch) == (device, arch)]
        covered = {one.workload_hash for one in here if one.covered}
        newest = max((one.last_at for one in here if one.last_at is not None), default=None)
        rows.append(
            _row(
                device,
                arch,
                f"{len(covered)} of {len(tasks)}",
                sum(one.valid for one in here),
                sum(one.failed for one in here),
                _minute(newest),
            )
        )
    columns = ("device", "code", "tasks with a valid record", "valid", "failed", "last (UTC)")
    parts = [
        f"<h1>{_text(name)}</h1><h2>Coverage</h2>",
        table(columns, rows, {"device", "code"}) if rows else _NONE,
        "<h2>Jobs</h2>",
        _jobs(jobs),
        "<h2>Artifacts</h2>",
        _artifacts(database, made),
    ]
    return Page(f"model {name}", "".join(parts))


def artifact(database: TuningDatabase, key: str) -> Page:
    """Return the report of an artifact whose folder is still where it was written."""
    found = _find_artifact(database, key)
    others = [one for one in artifacts(database, model=found.model, limit=LISTED) if one.key != found.key]
    links = " ".join(
        _link(f"/compare?before={one.key}&after={found.key}", _minute(one.created_at)).html for one in others
    )
    compared = f"<p>Compare with the artifact of {links}.</p>" if links else ""
    return Page(f"artifact {found.model}", compared + section(_report(found)))


def compare(database: TuningDatabase, before: str, after: str) -> Page:
    """Return two artifacts beside each other, kernel by kernel; kernels are paired by the ONNX nodes they come from."""
    old, new = (_find_artifact(database, key) for key in (before, after))
    sides = [{_origin(row): row for row in _report(one).kernels} for one in (old, new)]
    rows = []
    for origin in dict.fromkeys([*sides[1], *sides[0]]):
        was, now = (side.get(origin) for side in sides)
        known = now or was
        if known is None:
            continue
        times = (was.total_us / now.total_us) if was and now and was.total_us and now.total_us else None
        rows.append(
            _row(
                known.name,
                *(value for side in (was, now) for value in _kernel(side)),
                f"{times:.2f}" if times else "",
            )
        )
    columns = ("kernel", "route before", "us before", "route after", "us after", "times")
    parts = [
        f"<h1>{_text(new.model)}</h1>",
        table(
            ("", "artifact", "made (UTC)", "target", "validated", "ms"),
            [_row(name, *_summary(one)) for name, one in (("before", old), ("after", new))],
            {"", "artifact", "target", "validated"},
        ),
        "<h2>Kernels</h2>",
        table(columns, rows, {"kernel", "route before", "route after"}),
        "<p>Times are those of the kernels' records, of all calls. `times`: how many times as fast the new one is.</p>",
    ]
    return Page(f"compare {new.model}", "".join(parts))


def cost(database: TuningDatabase) -> Page:
    """Return what the newest jobs took."""
    rows = []
    for one in database.list_jobs(limit=LISTED):
        took = job_cost(database, one.id)
        valid = dict(took.by_status).get(Status.OK, 0)
        rows.append(
            _row(
                _link(f"/jobs/{one.id}", one.model),
                f"{one.target.kind} {one.target.arch}",
                _minute(one.started_at),
                took.tasks,
                took.candidates,
                percent(valid / took.candidates if took.candidates else None),
                number(took.wall_s),
                number(took.candidate_s),
                number(took.device_s),
            )
        )
    columns = (
        "model", "target", "began (UTC)", "tasks", "candidates", "valid", "s from start to end",
        "s building and measuring", "s of kernels on the device",
    )  # fmt: skip
    return Page("cost", "<h1>What jobs took</h1>" + (table(columns, rows, {"model", "target"}) if rows else _NONE))


_NONE = "<p>None.</p>"


def _batches(database: TuningDatabase, found: Sequence[Batch]) -> Html:
    rows = []
    for one in found:
        states = Counter("dead" if cell.dead else cell.state.value for cell in list_cells(database, one.id))
        rows.append(
            _row(
                _link(f"/batches/{one.id}", one.name),
                ", ".join(f"{count} {state}" for state, count in states.items()),
                one.driver.host,
                _minute(one.started_at),
                one.outcome or ("going on" if one.held else "its driver is gone"),
            )
        )
    columns = ("batch", "cells", "host", "began (UTC)", "outcome")
    return table(columns, rows, {"batch", "cells", "host", "began (UTC)", "outcome"}) if rows else _NONE


def _jobs(found: Sequence[Job]) -> Html:
    rows = [
        _row(
            _link(f"/jobs/{one.id}", one.model),
            _link(f"/models/{quote(one.model, safe='')}", "its model"),
            f"{one.target.kind} {one.target.arch}",
            _minute(one.started_at),
            number((one.finished_at - one.started_at).total_seconds() if one.finished_at else None),
            one.outcome or "not over, or killed",
        )
        for one in found
    ]
    columns = ("job", "", "target", "began (UTC)", "seconds", "outcome")
    return table(columns, rows, {"job", "", "target", "began (UTC)", "outcome"}) if rows else _NONE


def _artifacts(database: TuningDatabase, found: Sequence[ArtifactSummary]) -> Html:
    tags = _tags(database)
    rows = [_row(*_summary(one), ", ".join(tags.get(one.key, ()))) for one in found]
    columns = ("artifact", "made (UTC)", "target", "validated", "ms", "tags")
    return table(columns, rows, {"artifact", "made (UTC)", "target", "validated", "tags"}) if rows else _NONE


def _summary(one: ArtifactSummary) -> tuple[object, ...]:
    state = None if one.validation is None else one.validation.passed
    own = [arm.latency_us for arm in one.benchmarks if arm.arm.startswith("relaxtune")]
    return (
        _link(f"/artifacts/{quote(one.key)}", one.model),
        _minute(one.created_at),
        f"{one.target_kind} {one.arch}",
        {None: "never", True: "passed", False: "FAILED"}[state],
        number(own[0] / 1e3 if own else None),
    )


def _tags(database: TuningDatabase) -> Mapping[str, list[str]]:
    moves: dict[str, list[TagMove]] = {}
    for move in list_moves(database):
        moves.setdefault(move.tag, []).append(move)
    standing: dict[str, list[str]] = {}
    for tag, of_tag in moves.items():
        stack = stood_at(of_tag)
        if stack:
            standing.setdefault(stack[-1], []).append(tag)
    return standing


def _find_artifact(database: TuningDatabase, key: str) -> ArtifactSummary:
    found = [one for one in artifacts(database, limit=None) if one.key == key]
    if not found:
        raise NotFoundError(f"no artifact {key} in this database")
    return found[0]


def _report(one: ArtifactSummary) -> Report:
    return report_artifact(Path(one.location))


def _origin(row: KernelRow) -> tuple[str, ...]:
    return row.onnx_nodes or (row.name,)


def _kernel(row: KernelRow | None) -> tuple[str, str]:
    return ("", "") if row is None else (row.route, number(row.total_us))


@dataclass(frozen=True)
class _Markup:
    """HTML that is not escaped again."""

    html: Html


def _row(*values: object) -> tuple[Html, ...]:
    return tuple(value.html if isinstance(value, _Markup) else _text(str(value)) for value in values)


def _link(address: str, text: str) -> _Markup:
    return _Markup(f'<a href="{html.escape(address)}">{_text(text)}</a>')


def _plot(svg: Html) -> Html:
    return svg and f'<div class="wide">{svg}</div>'


def _minute(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def _text(text: str) -> Html:
    return html.escape(text)


PAGES: Mapping[str, Callable[..., Page]] = {
    "/cost": cost,
    "/batches/{batch_id}": batch,
    "/jobs/{job_id}": job,
    "/tasks/{workload_hash}": task,
    "/models/{name:path}": model,
    "/artifacts/{key}": artifact,
}
