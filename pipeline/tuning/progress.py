"""Progress of a tuning run: events, and what shows them on a console."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from relaxtune.pipeline.printable import duration, short

_PLAIN_INTERVAL_S = 5.0


@dataclass(frozen=True)
class ProgressEvent:
    """One candidate is finished."""

    task: str  # Name of its task.
    # Candidates finished in the run, and how many there may be; `total` is None where only time limits the run.
    done: int
    total: int | None
    # Of the finished ones.
    valid: int
    failed: int
    best_us: float | None  # Best latency of the task so far, or None.
    # Until the run ends: by the time budget, or by the rate so far for the candidates that are left, whichever comes
    # first; None where nothing tells.
    seconds_left: float | None
    workload_hash: str = ""  # Of the task.
    devices: int = 1  # How many devices measure.


def estimate_left(done: int, total: int | None, elapsed_s: float, budget_left_s: float | None) -> float | None:
    """Return the seconds until a run ends.

    `total` is None where only time limits the run; `elapsed_s` is the time of the candidates `done`.
    """
    by_rate = None if total is None or done <= 0 else elapsed_s / done * max(0, total - done)
    return min((left for left in (by_rate, budget_left_s) if left is not None), default=None)


#: Called with every finished candidate, from the thread that tunes; an error that it raises ends the run.
OnCandidate = Callable[[ProgressEvent], None]


@dataclass(frozen=True)
class UntilTheEnd:
    """Counts what follows the search in the seconds left of events."""

    progress: OnCandidate
    follows_s: float

    def __call__(self, event: ProgressEvent) -> None:
        """Hand on a finished candidate."""
        left = None if event.seconds_left is None else event.seconds_left + self.follows_s
        self.progress(replace(event, seconds_left=left))


class ConsoleProgress:
    """Progress on stderr: a live bar on a terminal, one line every few seconds otherwise. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = (
            Progress(
                TextColumn("tuning"),
                BarColumn(bar_width=8),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=self._console,
            )
            if self._console.is_terminal
            else None
        )
        self._row = self._bar.add_task("", total=None) if self._bar else None
        self._last_line = 0.0

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: ProgressEvent) -> None:
        """Show a finished candidate."""
        if self._bar is not None and self._row is not None:
            self._bar.update(
                self._row,
                completed=event.done,
                total=event.total,
                description=f"{_figures(event)}; {short(event.task)}",
            )
            return
        now = time.monotonic()
        if now - self._last_line >= _PLAIN_INTERVAL_S or event.done == event.total:
            self._last_line = now
            total = "" if event.total is None else f"/{event.total}"
            self._console.print(f"tuning {event.done}{total} {describe(event)}", highlight=False, soft_wrap=True)


def describe(event: ProgressEvent) -> str:
    """Return an event as text, without the count."""
    return f"{short(event.task)}: {_figures(event)}"


def _figures(event: ProgressEvent) -> str:
    best = "nothing valid yet" if event.best_us is None else f"best {event.best_us:.1f} us"
    left = "" if event.seconds_left is None else f", about {duration(event.seconds_left)} left"
    return f"{best}; {event.valid} valid, {event.failed} failed{left}"
