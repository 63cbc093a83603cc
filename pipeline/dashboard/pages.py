"""The first page, pages of batches, and the list of all pages; every text in them is escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from markupsafe import Markup

from relaxtune.pipeline.batch.report import batch_body
from relaxtune.pipeline.dashboard.artifact_pages import artifact, artifact_list, compare, gate, gates, verdict
from relaxtune.pipeline.dashboard.job_pages import (
    LISTED,
    OVER_OR_KILLED,
    cost,
    job_kernels,
    job_list,
    matrix,
    model,
    task,
)
from relaxtune.pipeline.dashboard.markup import Page, Section, chart, sections
from relaxtune.pipeline.pages.render import link, minute, table
from relaxtune.pipeline.report.page import course_chart, shares_chart
from relaxtune.tuning_db.batches import get_batch, list_batches, list_cells
from relaxtune.tuning_db.cell_states import Batch
from relaxtune.tuning_db.gates import list_gates
from relaxtune.tuning_db.jobs import Job
from relaxtune.tuning_db.questions.artifacts import ArtifactSummary, artifacts
from relaxtune.tuning_db.questions.progress import count_by_status, job_progress
from relaxtune.tuning_db.records import Status
from relaxtune.tuning_db.store import TuningDatabase


def overview(database: TuningDatabase) -> Page:
    """Return the first page: records by status, and the newest batches, jobs and artifacts."""
    counts = count_by_status(database)
    none = ("records", "none yet: `relaxtune tune` or `relaxtune batch run` writes them")
    facts = [(f"records {status.value}", f"{counts[status]:,}") for status in Status if counts.get(status)]
    batches, jobs = list_batches(database, limit=LISTED), database.list_jobs(limit=LISTED)
    newest = artifacts(database, limit=LISTED)
    parts = [
        Section("Needs attention", _attention(database, batches, jobs, newest)),
        *(_newest(database, jobs[0]) if jobs else ()),
        Section("Batches", _batch_list(database, batches)),
        Section("Jobs", job_list(jobs)),
        Section("Artifacts", artifact_list(database, newest)),
    ]
    return Page("overview", sections(database.url, parts, facts=facts or [none]), live=True)


def _attention(
    database: TuningDatabase, batches: Sequence[Batch], jobs: Sequence[Job], newest: Sequence[ArtifactSummary]
) -> Markup:
    found: list[tuple[datetime, Markup, str]] = []
    for batch in batches:
        lost = sum(cell.dead or cell.state.value in ("failed", "rejected") for cell in list_cells(database, batch.id))
        why = f"{lost} cells failed or were rejected" if lost else ""
        if batch.outcome is None and not batch.held:
            why = "its driver is gone: continue with `relaxtune batch resume`"
        if why:
            found.append((batch.started_at, link(f"/batches/{batch.id}", f"batch {batch.name}"), why))
    for job in jobs:
        if job.outcome not in ("done", None):
            found.append((job.started_at, link(f"/jobs/{job.id}", f"job {job.model}"), job.outcome))
    for one in newest:
        if one.validation is not None and not one.validation.passed:
            link_ = link(f"/artifacts/{one.key}", f"artifact {one.model}")
            found.append((one.created_at, link_, "disagrees with ONNX Runtime"))
    for gate_ in list_gates(database, limit=LISTED):
        if not gate_.passed:
            found.append((gate_.created_at, link(f"/gates/{gate_.id}", f"gate {gate_.model}"), verdict(gate_)))
    rows = [(what, why, minute(when)) for when, what, why in sorted(found, key=lambda row: row[0], reverse=True)]
    return table(("what", "why", "when (UTC)"), rows[:LISTED]) if rows else Markup()


def _newest(database: TuningDatabase, job: Job) -> list[Section]:
    progress = job_progress(database, job.id)
    name = link(f"/jobs/{job.id}", job.model)
    subtitle = Markup("{}, {} {}, began {} UTC: {}.").format(
        name, job.target.kind, job.target.arch, minute(job.started_at), job.outcome or OVER_OR_KILLED
    )
    return [
        Section("The newest job: best so far", chart(course_chart(progress.curve)), subtitle),
        Section("The newest job: shares of its time", chart(shares_chart(job_kernels(progress)))),
    ]


def batch(database: TuningDatabase, batch_id: str) -> Page:
    """Return the cells of a batch and the attempts at them."""
    found = get_batch(database, batch_id)
    return Page(f"batch {found.name}", batch_body(database, found), live=found.held)


def _batch_list(database: TuningDatabase, found: Sequence[Batch]) -> Markup:
    rows = []
    for one in found:
        states = Counter("dead" if cell.dead else cell.state.value for cell in list_cells(database, one.id))
        rows.append(
            (
                link(f"/batches/{one.id}", one.name),
                ", ".join(f"{count} {state}" for state, count in states.items()),
                one.driver.host,
                minute(one.started_at),
                one.outcome or ("going on" if one.held else "its driver is gone"),
            )
        )
    return table(("batch", "cells", "host", "began (UTC)", "outcome"), rows)


PAGES: Mapping[str, Callable[..., Page]] = {
    "/": overview,
    "/compare": compare,
    "/cost": cost,
    "/coverage": matrix,
    "/gates": gates,
    "/gates/{gate_id}": gate,
    "/batches/{batch_id}": batch,
    "/tasks/{workload_hash}": task,
    "/models/{name:path}": model,
    "/artifacts/{key}": artifact,
}
