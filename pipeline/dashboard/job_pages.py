"""Pages on jobs, their tasks and models: progress, ceilings and cost; the history of a kernel; coverage of devices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from markupsafe import Markup

from relaxtune.pipeline.dashboard.artifact_pages import artifact_list
from relaxtune.pipeline.dashboard.markup import Page, Section, chart, remark, sections
from relaxtune.pipeline.pages.charts import curve
from relaxtune.pipeline.pages.render import code, link, minute, number, percent, table
from relaxtune.pipeline.report.ceilings import Ceilings, known_ceilings
from relaxtune.pipeline.report.kernel import KernelRow, TimeSource, float_dtype, judged
from relaxtune.pipeline.report.page import roofline_chart
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.jobs import Job
from relaxtune.tuning_db.questions.artifacts import artifacts
from relaxtune.tuning_db.questions.insights import HistoryPoint, coverage, failures, history
from relaxtune.tuning_db.questions.progress import (
    JobProgress,
    TaskProgress,
    candidates_of_jobs,
    covered_tasks,
    job_progress,
)
from relaxtune.tuning_db.records import RecordFilter
from relaxtune.tuning_db.store import TuningDatabase

#: The outcome of a job without one.
OVER_OR_KILLED = "not over, or killed"
LISTED = 25
# Of a kernel's hash: as many tell a task's kernels apart.
_HASH_SHOWN = 8
_COLUMNS = (
    "task", "family", "calls", "us a call", "us", "share", "GFLOP/s", "of ceiling", "GB/s", "of ceiling", "bottleneck",
    "valid", "failed", "seconds",
)  # fmt: skip


def job_list(found: Sequence[Job]) -> Markup:
    """Return a table of jobs."""
    rows = [
        (
            link(f"/jobs/{one.id}", one.model),
            link(f"/models/{quote(one.model, safe='')}", "its model"),
            f"{one.target.kind} {one.target.arch}",
            minute(one.started_at),
            number(one.wall_s),
            one.outcome or OVER_OR_KILLED,
        )
        for one in found
    ]
    columns = ("job", "", "target", "began (UTC)", "seconds", "outcome")
    return table(columns, rows, {"job", "", "target", "began (UTC)", "outcome"})


def job(database: TuningDatabase, job_id: str, ceilings: Mapping[str, Ceilings]) -> Page:
    """Return what a job measured: how the model got faster, its tasks, why candidates failed, and what it took.

    `ceilings` are of devices by name; known ones need not be there.
    """
    found, progress = database.get_job(job_id), job_progress(database, job_id)
    took = found.wall_s
    timed = [task for task in progress.tasks if task.best_us is not None]
    facts = [
        *((f"candidates {status.value}", f"{count:,}") for status, count in progress.by_status.items()),
        ("tasks with a time", f"{len(timed)} of {len(progress.tasks)}"),
        *([("seconds from start to end", number(took))] if took is not None else []),
        ("seconds of building and measuring", number(progress.candidate_s)),
    ]
    course = chart(curve([(seconds, us / 1e3) for seconds, us in progress.curve], "seconds", "ms"))
    causes = [
        (cause.status.value, cause.cause, cause.count, cause.workloads, cause.example_id)
        for cause in failures(database, RecordFilter(job_id=job_id), limit=LISTED)
    ]
    few = Markup("<p>Fewer than two improvements were measured.</p>")
    parts = [
        Section("Best so far", course or few, "All calls of all kernels, each timed alone." if course else ""),
        *_tasks(progress, ceilings),
        Section(
            "Why candidates failed",
            table(("status", "cause", "candidates", "tasks", "record"), causes, {"status", "cause"}),
        ),
    ]
    subtitle = (
        f"Job {found.id}, {found.target.kind} {found.target.arch}, began {minute(found.started_at)} UTC: "
        f"{found.outcome or OVER_OR_KILLED}."
    )
    body = sections(found.model, parts, subtitle=subtitle, facts=facts)
    return Page(f"job {found.model}", body, live=found.finished_at is None)


def cost(database: TuningDatabase) -> Page:
    """Return what the newest jobs took."""
    jobs = database.list_jobs(limit=LISTED)
    of_job = candidates_of_jobs(database, [one.id for one in jobs])
    rows = []
    for one in jobs:
        took = of_job[one.id]
        rows.append(
            (
                link(f"/jobs/{one.id}", one.model),
                f"{one.target.kind} {one.target.arch}",
                minute(one.started_at),
                took.tasks,
                took.candidates,
                percent(took.valid / took.candidates if took.candidates else None),
                number(one.wall_s),
                number(took.candidate_s),
            )
        )
    columns = (
        "model", "target", "began (UTC)", "tasks", "candidates", "valid", "s from start to end",
        "s building and measuring",
    )  # fmt: skip
    return Page("cost", sections("The cost of jobs", [Section("", table(columns, rows, {"model", "target"}))]))


def _tasks(progress: JobProgress, ceilings: Mapping[str, Ceilings]) -> list[Section]:
    device = progress.devices[0] if len(progress.devices) == 1 else None
    known = ceilings.get(device or "") or known_ceilings(device)
    kernels = job_kernels(progress, known)
    # Both are in the order of time.
    rows = [_task(task, kernel) for task, kernel in zip(progress.tasks, kernels, strict=True)]
    tasks = table(_COLUMNS, rows, {"task", "family", "bottleneck"})
    roofs = chart(roofline_chart(kernels, known))
    if roofs and known is not None:
        explanation = f"The best kernel of each task. Ceilings: {known.source}."
        return [Section("Tasks", tasks), Section("Rates and ceilings", roofs, explanation)]
    if device is None:
        why = "times of this job are of several devices" if progress.devices else "this job measured nothing"
    else:
        why = f"none are known of {device}; `relaxtune dashboard --ceilings FILE` takes measured ones"
    return [Section("Tasks", tasks), Section("", remark(f"No ceilings: {why}."))]


def job_kernels(progress: JobProgress, ceilings: Ceilings | None = None) -> tuple[KernelRow, ...]:
    """Return the tasks of a job as kernels, those that take the most time first."""
    return judged([_kernel(task) for task in progress.tasks], ceilings)


def _kernel(task: TaskProgress) -> KernelRow:
    inputs = json.loads(task.signature).get("inputs", [])
    return KernelRow(
        name=task.name,
        family=task.family,
        onnx_nodes=(),
        calls=task.weight,
        route="",
        record_id=None,
        time_us=task.best_us,
        time_source=TimeSource.RECORD,
        flops=task.flops,
        bytes=task.bytes,
        dtype=float_dtype([str(dtype) for _, dtype in inputs]),
    )


def _task(task: TaskProgress, kernel: KernelRow) -> tuple[object, ...]:
    return (
        code(link(f"/tasks/{quote(task.workload_hash)}", task.name)),
        task.family,
        task.weight,
        number(task.best_us),
        number(kernel.total_us),
        percent(kernel.share),
        number(kernel.flops_per_s, 1e9),
        percent(kernel.compute_use),
        number(kernel.bytes_per_s, 1e9),
        percent(kernel.bandwidth_use),
        kernel.bottleneck.value if kernel.bottleneck else "",
        task.valid,
        task.failed,
        number(task.seconds),
    )


def task(database: TuningDatabase, workload_hash: str) -> Page:
    """Return the days of a task: each device, driver, TVM version and commit, the best kernel, and the best so far."""
    days = history(database, workload_hash=workload_hash)
    if not days:
        raise NotFoundError(f"no record of the task {workload_hash}")
    devices = dict.fromkeys(day.device_name for day in days)
    curves = [(device, _curve([day for day in days if day.device_name == device])) for device in devices]
    rows = [
        (
            f"{day.day}",
            day.device_name,
            day.driver or "",
            day.tvm_version,
            day.code_version or "unknown",
            day.candidates,
            day.valid,
            number(day.best_us),
            day.route.value if day.route else "",
            code((day.kernel_hash or "")[:_HASH_SHOWN]),
            number(day.so_far_us),
        )
        for day in days
    ]
    columns = (
        "day (UTC)", "device", "driver", "tvm", "relaxtune", "candidates", "valid", "best us", "route",
        "code of the kernel", "best so far us",
    )  # fmt: skip
    explanation = (
        "The code of the kernel is the hash of the best one of the day: another commit of relaxtune that makes the "
        "same kernel has the same hash."
    )
    parts = [
        *(Section(device, chart(curve)) for device, curve in curves),
        Section(
            "Days",
            table(columns, rows, {"device", "driver", "tvm", "relaxtune", "route", "code of the kernel"}),
            explanation,
        ),
    ]
    return Page(f"task {days[-1].name}", sections(days[-1].name, parts, subtitle=code(workload_hash)))


def model(database: TuningDatabase, name: str) -> Page:
    """Return what is known of a model: how much of it is measured on each device, its jobs, its artifacts."""
    jobs = database.list_jobs(model=name, limit=LISTED)
    own_artifacts = artifacts(database, model=name, limit=LISTED)
    if not jobs and not own_artifacts:
        raise NotFoundError(f"no job and no artifact of the model {name}")
    found = coverage(database, name)
    tasks = {one.workload_hash for one in found}
    devices = sorted({(one.device_name, one.arch) for one in found if one.device_name is not None})
    rows = []
    for device, arch in devices:
        here = [one for one in found if (one.device_name, one.arch) == (device, arch)]
        covered = {one.workload_hash for one in here if one.covered}
        newest = max((one.last_at for one in here if one.last_at is not None), default=None)
        valid, failed = sum(one.valid for one in here), sum(one.failed for one in here)
        rows.append((device, arch, f"{len(covered)} of {len(tasks)}", valid, failed, minute(newest)))
    columns = ("device", "code", "tasks with a valid record", "valid", "failed", "last (UTC)")
    parts = [
        Section("Coverage", table(columns, rows, {"device", "code"})),
        Section("Jobs", job_list(jobs)),
        Section("Artifacts", artifact_list(database, own_artifacts)),
    ]
    return Page(f"model {name}", sections(name, parts))


def matrix(database: TuningDatabase) -> Page:
    """Return how many tasks of each model have a valid record on each device."""
    explanation = "Tasks are those that jobs found in a model, of any target."
    found = covered_tasks(database)
    places = sorted({place for one in found for place in one.covered})
    rows = [
        (
            link(f"/models/{quote(one.model)}", one.model),
            one.tasks,
            *(_part(one.covered.get(place, 0), one.tasks) for place in places),
        )
        for one in found
    ]
    columns = ("model", "tasks", *(f"{device}, {arch}" for device, arch in places))
    parts = [Section("", table(columns, rows, {"model"}), explanation)]
    return Page("coverage", sections("Tasks with a valid record, by model and device", parts))


def _part(covered: int, tasks: int) -> Markup:
    """Return a cell that is the fuller the more is covered."""
    share = covered / tasks if tasks else 0.0
    kind = "full" if covered == tasks else "part" if covered else "empty"
    return Markup('<span class="cover {}" style="--share:{:.2f}">{}</span>').format(kind, share, covered)


def _curve(days: list[HistoryPoint]) -> Markup:
    first = days[0].day
    points = [(float((day.day - first).days), day.so_far_us) for day in days if day.so_far_us is not None]
    several = len({at for at, _ in points}) > 1
    return curve(points, f"days since {first}", "us, the best so far") if several else Markup()
