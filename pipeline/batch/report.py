"""One HTML page on a batch: its cells before and after, its attempts, and where the time of each model goes."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.printable import printable
from relaxtune.pipeline.report.html import number, page, section, table, tiles
from relaxtune.pipeline.report.report import report_artifact
from relaxtune.tuning_db.batches import list_attempts, list_cells
from relaxtune.tuning_db.cell_states import Attempt, Batch, BatchCell
from relaxtune.tuning_db.contract import TuningDatabase

# Models whose kernels are shown; each takes some 50 KB.
_SECTIONS_MAX = 40
_CELL_COLUMNS = (
    "cell", "status", "validated", "ms untuned", "ms tuned", "", "times as fast", "ms peer", "MB", "s", "artifact",
    "why",
)  # fmt: skip
_ATTEMPT_COLUMNS = ("cell", "attempt", "host", "process", "started (UTC)", "s", "state", "error")
_LEFT = frozenset({"cell", "status", "validated", "", "artifact", "host", "state"})
_STYLE = (
    "<style>.bar { display: block; height: .55em; margin: .15em 0; border-radius: .2em; min-width: 1px }"
    " .before { background: #a0aec0 } .after { background: #2b6cb0 } td:has(> .bar) { min-width: 9rem }"
    " .done { color: #276749 } .rejected, .failed, .dead { color: #c53030 } details { max-width: none }"
    " @media screen and (prefers-color-scheme: dark) { .done { color: #68d391 }"
    " .rejected, .failed, .dead { color: #fc8181 } .after { background: #63b3ed } }</style>"
)


def render_batch(database: TuningDatabase, batch: Batch) -> str:
    """Return the page of a batch, as the database knows it now."""
    told = [
        batch_body(database, batch),
        "<h2>Where the time goes</h2>",
        *_sections(list_cells(database, batch.id)),
        f"<details><summary>The plan</summary><pre>{_escape(batch.plan)}</pre></details>",
    ]
    return page(f"batch {batch.name}", printable("".join(told)))


def batch_body(database: TuningDatabase, batch: Batch) -> str:
    """Return the tables of a batch as HTML, without opening an artifact."""
    cells, attempts = list_cells(database, batch.id), list_attempts(database, batch.id)
    parts = [
        _STYLE,
        f"<h1>{_escape(batch.name)}</h1>",
        f"<p>Batch {_escape(batch.id)} of {_escape(batch.path)}, on {_escape(batch.driver.host)}.</p>",
        tiles(_facts(batch, cells)),
        "<h2>Cells</h2>",
        table(_CELL_COLUMNS, [_cell(cell, _slowest(cells)) for cell in cells], _LEFT),
        "<h2>Attempts</h2>",
        table(_ATTEMPT_COLUMNS, [*map(_attempt, attempts)], _LEFT),
    ]
    return printable("".join(parts))


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


def _slowest(cells: Sequence[BatchCell]) -> float:
    return max((max(cell.facts.untuned_ms or 0.0, cell.facts.shipped_ms or 0.0) for cell in cells), default=0.0)


def _cell(cell: BatchCell, slowest_ms: float) -> tuple[str, ...]:
    facts, state = cell.facts, "dead" if cell.dead else cell.state.value
    times = facts.untuned_ms / facts.shipped_ms if facts.untuned_ms and facts.shipped_ms else None
    bars = "".join(
        f'<span class="bar {name}" style="width:{100 * value / slowest_ms:.1f}%" title="{value:.4g} ms"></span>'
        for name, value in (("before", facts.untuned_ms), ("after", facts.shipped_ms))
        if value and slowest_ms
    )
    shown = f"<code>{_escape(cell.spec.name)}</code>"
    return (
        f'<a href="#{_escape(cell.spec.name)}">{shown}</a>' if facts.artifact else shown,
        f'<b class="{state}">{state}</b>',
        "" if facts.validated is None else "yes" if facts.validated else "NO",
        _ms(facts.untuned_ms),
        _ms(facts.shipped_ms),
        bars,
        number(times),
        f"{_ms(facts.peer_ms)} {_escape(facts.peer or '')}".strip(),
        number(facts.size_bytes, 1e6),
        number(facts.seconds),
        f"<code>{_escape(facts.artifact)}</code>" if facts.artifact else "",
        _note(facts.error),
    )


def _attempt(attempt: Attempt) -> tuple[str, ...]:
    took = None if attempt.finished_at is None else (attempt.finished_at - attempt.started_at).total_seconds()
    return (
        f"<code>{_escape(attempt.cell)}</code>",
        str(attempt.number),
        _escape(attempt.driver.host),
        str(attempt.driver.pid),
        f"{attempt.started_at:%Y-%m-%d %H:%M:%S}",
        number(took),
        attempt.state.value,
        _note(attempt.error),
    )


def _sections(cells: Sequence[BatchCell]) -> list[str]:
    """Return the report of each artifact, folded; the manifest alone is read."""
    parts: list[str] = []
    made = [cell for cell in cells if cell.facts.artifact is not None]
    for cell in made[:_SECTIONS_MAX]:
        name = _escape(cell.spec.name)
        try:
            told = section(report_artifact(Path(str(cell.facts.artifact))))
        except ArtifactError as e:
            told = f'<p class="note">{_escape(str(e))}</p>'
        parts.append(f'<details id="{name}"><summary><code>{name}</code></summary>{told}</details>')
    if len(made) > _SECTIONS_MAX:
        parts.append(f"<p>And {len(made) - _SECTIONS_MAX} more: <code>relaxtune report DIR</code> shows each.</p>")
    return parts


def _note(told: str | None) -> str:
    return f'<span class="note">{_escape(told)}</span>' if told else ""


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _escape(text: str) -> str:
    return html.escape(text)
