"""One HTML page on a batch: its cells before and after, its attempts, and where the time of each model goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.pages.render import code, note, number, page, render, table
from relaxtune.pipeline.printable import milliseconds
from relaxtune.pipeline.report.page import section
from relaxtune.pipeline.report.report import report_artifact
from relaxtune.tuning_db.batches import list_attempts, list_cells
from relaxtune.tuning_db.cell_states import Attempt, Batch, BatchCell
from relaxtune.tuning_db.store import TuningDatabase

# Models whose kernels are shown; each takes some 50 KB.
_SECTIONS_MAX = 40
_CELL_COLUMNS = (
    "cell", "status", "validated", "ms untuned", "ms tuned", "", "times as fast", "ms peer", "MB", "s", "artifact",
    "why",
)  # fmt: skip
_ATTEMPT_COLUMNS = ("cell", "attempt", "host", "process", "started (UTC)", "s", "state", "error")
_LEFT = frozenset({"cell", "status", "validated", "", "artifact", "host", "state"})


def render_batch(database: TuningDatabase, batch: Batch) -> str:
    """Return the page of a batch, as the database knows it now."""
    finished = [cell for cell in list_cells(database, batch.id) if cell.facts.artifact is not None]
    sections = [(cell.spec.name, _section(cell)) for cell in finished[:_SECTIONS_MAX]]
    return page(f"batch {batch.name}", batch_body(database, batch, sections, max(0, len(finished) - _SECTIONS_MAX)))


def batch_body(
    database: TuningDatabase, batch: Batch, sections: Sequence[tuple[str, Markup]] | None = None, left_out: int = 0
) -> Markup:
    """Return the tables of a batch, and folded sections on its artifacts, without opening one."""
    cells, attempts = list_cells(database, batch.id), list_attempts(database, batch.id)
    slowest_ms = max((max(one.facts.untuned_ms or 0.0, one.facts.shipped_ms or 0.0) for one in cells), default=0.0)
    return render(
        "batch.html",
        batch=batch,
        facts=_facts(batch, cells),
        cells=table(_CELL_COLUMNS, [_cell(cell, slowest_ms) for cell in cells], _LEFT),
        attempts=table(_ATTEMPT_COLUMNS, [*map(_attempt, attempts)], _LEFT),
        sections=sections,
        left_out=left_out,
    )


def _facts(batch: Batch, cells: Sequence[BatchCell]) -> list[tuple[str, str]]:
    counts = Counter("dead" if cell.dead else cell.state.value for cell in cells)
    untuned, shipped = (
        sum(getattr(cell.facts, name) for cell in cells if cell.facts.untuned_ms and cell.facts.shipped_ms)
        for name in ("untuned_ms", "shipped_ms")
    )
    end = batch.finished_at or batch.heartbeat_at
    facts = [
        ("cells", ", ".join(f"{count} {state}" for state, count in counts.items())),
        ("outcome", batch.outcome or ("going on" if batch.held else "its driver is gone")),
        ("began (UTC)", f"{batch.started_at:%Y-%m-%d %H:%M}"),
        ("took", f"{(end - batch.started_at).total_seconds():,.0f} s"),
    ]
    if shipped:
        facts.append(("all models, untuned and tuned", f"{untuned:.4g} and {shipped:.4g} ms"))
    return facts


def _cell(cell: BatchCell, slowest_ms: float) -> tuple[object, ...]:
    facts, state = cell.facts, "dead" if cell.dead else cell.state.value
    times = facts.untuned_ms / facts.shipped_ms if facts.untuned_ms and facts.shipped_ms else None
    bar = Markup('<span class="bar {}" style="width:{:.1f}%" title="{:.4g} ms"></span>')
    bars = [
        bar.format(name, 100 * value / slowest_ms, value)
        for name, value in (("before", facts.untuned_ms), ("after", facts.shipped_ms))
        if value and slowest_ms
    ]
    shown = code(cell.spec.name)
    return (
        Markup('<a href="#{}">{}</a>').format(cell.spec.name, shown) if facts.artifact else shown,
        Markup('<b class="{0}">{0}</b>').format(state),
        "" if facts.validated is None else "yes" if facts.validated else "NO",
        milliseconds(facts.untuned_ms),
        milliseconds(facts.shipped_ms),
        Markup().join(bars),
        number(times),
        f"{milliseconds(facts.peer_ms)} {facts.peer or ''}".strip(),
        number(facts.size_bytes, 1e6),
        number(facts.seconds),
        code(facts.artifact),
        note(facts.error),
    )


def _attempt(attempt: Attempt) -> tuple[object, ...]:
    took = None if attempt.finished_at is None else (attempt.finished_at - attempt.started_at).total_seconds()
    return (
        code(attempt.cell),
        attempt.number,
        attempt.driver.host,
        attempt.driver.pid,
        f"{attempt.started_at:%Y-%m-%d %H:%M:%S}",
        number(took),
        attempt.state.value,
        note(attempt.error),
    )


def _section(cell: BatchCell) -> Markup:
    try:
        return section(report_artifact(Path(str(cell.facts.artifact))))
    except ArtifactError as e:
        return Markup('<p class="note">{}</p>').format(e)
