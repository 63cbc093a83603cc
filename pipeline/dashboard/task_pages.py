"""Pages on tasks and models: a kernel's history over code, drivers and TVM versions, and what is measured where."""

from __future__ import annotations

from urllib.parse import quote

from markupsafe import Markup

from relaxtune.pipeline.dashboard.artifact_pages import artifact_list
from relaxtune.pipeline.dashboard.job_pages import job_list
from relaxtune.pipeline.dashboard.markup import Page, Section, chart, sections
from relaxtune.pipeline.pages.charts import curve
from relaxtune.pipeline.pages.render import code, link, minute, number, table
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.questions.artifacts import artifacts
from relaxtune.tuning_db.questions.insights import HistoryPoint, coverage, history
from relaxtune.tuning_db.questions.progress import covered_tasks
from relaxtune.tuning_db.store import TuningDatabase

_LISTED = 25
# Of a kernel's hash: as many tell a task's kernels apart.
_HASH_SHOWN = 8


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
    told = (
        "The code of the kernel is the hash of the best one of the day: another commit of relaxtune that makes the "
        "same kernel has the same hash."
    )
    parts = [
        *(Section(device, chart(curve)) for device, curve in curves),
        Section(
            "Days", table(columns, rows, {"device", "driver", "tvm", "relaxtune", "route", "code of the kernel"}), told
        ),
    ]
    return Page(f"task {days[-1].name}", sections(days[-1].name, parts, subtitle=code(workload_hash)))


def model(database: TuningDatabase, name: str) -> Page:
    """Return what is known of a model: how much of it is measured on each device, its jobs, its artifacts."""
    jobs = database.list_jobs(model=name, limit=_LISTED)
    made = artifacts(database, model=name, limit=_LISTED)
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
        valid, failed = sum(one.valid for one in here), sum(one.failed for one in here)
        rows.append((device, arch, f"{len(covered)} of {len(tasks)}", valid, failed, minute(newest)))
    columns = ("device", "code", "tasks with a valid record", "valid", "failed", "last (UTC)")
    parts = [
        Section("Coverage", table(columns, rows, {"device", "code"})),
        Section("Jobs", job_list(jobs)),
        Section("Artifacts", artifact_list(database, made)),
    ]
    return Page(f"model {name}", sections(name, parts))


def matrix(database: TuningDatabase) -> Page:
    """Return how many tasks of each model have a valid record on each device."""
    told = "Tasks are those that jobs found in a model, of any target."
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
    parts = [Section("", table(columns, rows, {"model"}), told)]
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
