"""How a batch is shown while it goes on: a live table on a terminal, plain lines elsewhere, JSON lines on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relaxtune.pipeline.printable import duration, milliseconds
from relaxtune.pipeline.printed_tables import TableView

if TYPE_CHECKING:
    from relaxtune.pipeline.batch.events import BatchEvent, CandidateEvent, CellEvent
    from relaxtune.tuning_db.cell_states import BatchCell, CellFacts

_PLAIN_INTERVAL_S = 5.0
# Seconds over which candidates a second are counted.
_WINDOW_S = 20.0
# Cells that fit a screen; those that are over, or queued, are left out first.
_ROWS_MAX = 30


@dataclass
class _Row:
    state: str = "queued"
    kernels_ms: float | None = None
    shipped_ms: float | None = None
    note: str = ""
    since: float = field(default_factory=time.monotonic)
    seconds: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds in this state; of a cell that is over, those that it was finished in."""
        return time.monotonic() - self.since if self.seconds is None else self.seconds


class BatchView:
    """Shows the events of a batch. A context manager.

    With `json_lines`, each cell that is over is a line of JSON on stdout; `cells` are shown before their first event.
    """

    def __init__(self, console: Console, *, json_lines: bool, cells: Sequence[str] = ()) -> None:
        self._console = console
        self._json = json_lines
        self._rows = {name: _Row() for name in cells}
        self._times: deque[float] = deque()
        self._newest: CandidateEvent | None = None
        self._printed = 0.0
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        """Show the table."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the table away; the final one goes to stdout."""
        self._live.stop()

    def take(self, event: BatchEvent) -> None:
        """Show an event."""
        from relaxtune.pipeline.batch.events import CellEvent

        if isinstance(event, CellEvent):
            self._take_cell(event)
        else:
            self._take_candidate(event)

    def _take_cell(self, event: CellEvent) -> None:
        row = self._rows.setdefault(event.cell.name, _Row())
        row.state, row.since = event.state.value, time.monotonic()
        row.shipped_ms, row.note = event.facts.shipped_ms, event.facts.error or event.note
        row.seconds = (event.facts.seconds or 0.0) if event.state.over else None
        if self._json and event.state.over:
            sys.stdout.write(json.dumps(event.to_json()) + "\n")
            sys.stdout.flush()
        if not self._live.is_started:
            note = f": {row.note}" if row.note not in ("", row.state) else ""
            self._console.print(f"{event.cell.name}: {event.state.value}{note}", markup=False, soft_wrap=True)

    def _take_candidate(self, event: CandidateEvent) -> None:
        now = time.monotonic()
        self._newest = event
        self._times.append(now)
        while self._times[0] < now - _WINDOW_S:
            self._times.popleft()
        for name, kernels_ms in event.kernels_ms.items():
            self._rows.setdefault(name, _Row()).kernels_ms = kernels_ms
        if not self._live.is_started and now - self._printed >= _PLAIN_INTERVAL_S:
            self._printed = now
            self._console.print(self._headline(), markup=False, soft_wrap=True)

    def _headline(self) -> str:
        states = [row.state for row in self._rows.values()]
        over = ", ".join(f"{states.count(one)} {one}" for one in dict.fromkeys(states))
        if self._newest is None:
            return over
        progress = self._newest.progress
        span = max(1e-3, self._times[-1] - self._times[0]) if len(self._times) > 1 else None
        speed = ""
        if span is not None:
            rate, devices = (len(self._times) - 1) / span, progress.devices
            each = f", {rate / devices:.1f} on each of {devices} devices" if devices > 1 else ""
            speed = f"{rate:.1f} a second{each}"
        parts = [
            f"{progress.done}{'' if progress.total is None else f' of {progress.total}'} candidates",
            speed,
            "" if progress.seconds_left is None else f"about {duration(progress.seconds_left)} of tuning left",
            over,
        ]
        return "; ".join(filter(None, parts))

    def _render(self) -> Group:
        table = Table("cell", "stage", "s", "best so far ms", "ms shipped", "note")
        rows = sorted(self._rows.items(), key=lambda item: item[1].state in ("queued", "done"))
        for name, row in sorted(rows[:_ROWS_MAX]):
            best, shipped = milliseconds(row.kernels_ms), milliseconds(row.shipped_ms)
            cells = (name, row.state, f"{row.elapsed_s:.0f}", best, shipped, row.note[:60])
            table.add_row(*map(Text, cells))
        more = len(rows) - _ROWS_MAX
        return Group(Text(self._headline()), table, Text(f"and {more} more" if more > 0 else ""))


def final_table(title: str, cells: Iterable[tuple[str, str, CellFacts]]) -> TableView:
    """Return the table of finished cells: name, state and facts of each."""
    columns = {
        "cell": lambda one: one[0],
        "status": lambda one: one[1],
        "validated": lambda one: None if one[2].validated is None else "yes" if one[2].validated else "NO",
        "ms untuned": lambda one: milliseconds(one[2].untuned_ms),
        "ms tuned": lambda one: milliseconds(one[2].shipped_ms),
        "ms peer": lambda one: one[2].peer_ms and f"{milliseconds(one[2].peer_ms)} {one[2].peer}",
        "MB": lambda one: one[2].size_bytes and f"{one[2].size_bytes / 1e6:.1f}",
        "artifact": lambda one: one[2].artifact and one[2].artifact.removeprefix(f"{Path.cwd()}/"),
        "why": lambda one: one[2].error,
    }
    return TableView.of(title, list(cells), columns)


def status_of(cell: BatchCell) -> str:
    """Return the state of a cell for people: `dead` where its driver stopped."""
    return f"dead ({cell.state.value})" if cell.dead else cell.state.value


def status_rows(cells: Sequence[BatchCell]) -> list[tuple[str, str, CellFacts]]:
    """Return the rows of `final_table` for cells of the database."""
    return [(cell.spec.name, status_of(cell), cell.facts) for cell in cells]
