"""What the pages show: the first one and those of batches here, the others beside; every text in them is escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from relaxtune.pipeline.batch.report import batch_body
from relaxtune.pipeline.dashboard.artifact_pages import artifact, artifact_list
from relaxtune.pipeline.dashboard.gate_pages import gate, gates
from relaxtune.pipeline.dashboard.job_pages import cost, job_list
from relaxtune.pipeline.dashboard.markup import Html, Page, link, minute, row, rows_table, text
from relaxtune.pipeline.dashboard.task_pages import matrix, model, task
from relaxtune.pipeline.report.html import tiles
from relaxtune.tuning_db.batches import get_batch, list_batches, list_cells
from relaxtune.tuning_db.cell_states import Batch
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.questions.artifacts import artifacts
from relaxtune.tuning_db.records import Status

LISTED = 25


def overview(database: TuningDatabase, counts: Mapping[Status, int] | None) -> Page:
    """Return the first page: records by status (None: not counted yet), and the newest batches, jobs and artifacts."""
    told = "being counted" if counts is None else "none yet: `relaxtune tune` or `relaxtune batch run` makes them"
    known = counts or {}
    facts = [(f"records {status.value}", f"{known[status]:,}") for status in Status if known.get(status)]
    parts = [
        f"<h1>{text(database.url)}</h1>",
        tiles(facts or [("records", told)]),
        "<h2>Batches</h2>",
        _batch_list(database, list_batches(database, limit=LISTED)),
        "<h2>Jobs</h2>",
        job_list(database.list_jobs(limit=LISTED)),
        "<h2>Artifacts</h2>",
        artifact_list(database, artifacts(database, limit=LISTED)),
    ]
    return Page("overview", "".join(parts), live=True)


def batch(database: TuningDatabase, batch_id: str) -> Page:
    """Return the cells of a batch and the attempts at them."""
    found = get_batch(database, batch_id)
    return Page(f"batch {found.name}", batch_body(database, found), live=found.held)


def _batch_list(database: TuningDatabase, found: Sequence[Batch]) -> Html:
    rows = []
    for one in found:
        states = Counter("dead" if cell.dead else cell.state.value for cell in list_cells(database, one.id))
        rows.append(
            row(
                link(f"/batches/{one.id}", one.name),
                ", ".join(f"{count} {state}" for state, count in states.items()),
                one.driver.host,
                minute(one.started_at),
                one.outcome or ("going on" if one.held else "its driver is gone"),
            )
        )
    columns = ("batch", "cells", "host", "began (UTC)", "outcome")
    return rows_table(columns, rows, {*columns})


PAGES: Mapping[str, Callable[..., Page]] = {
    "/cost": cost,
    "/coverage": matrix,
    "/gates": gates,
    "/gates/{gate_id}": gate,
    "/batches/{batch_id}": batch,
    "/tasks/{workload_hash}": task,
    "/models/{name:path}": model,
    "/artifacts/{key}": artifact,
}
