"""What every command shares: `--format`, `--debug`, data on stdout, everything else on stderr."""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TextIO, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from relaxtune.pipeline.output_file import output_file
from relaxtune.pipeline.printable import printable
from relaxtune.tuning_db.questions.data_frames import flatten
from relaxtune.tuning_db.urls import hide_secrets

Item = TypeVar("Item")

# Columns of the database that hold JSON as text; `--format json` writes what they say.
_JSON_FIELDS = frozenset(
    {"attributes", "conditions", "config", "decision", "manifest", "options", "report", "signature"}
)


# Cells up to this many letters are not folded.
_NARROW = 12


class OutputFormat(StrEnum):
    """How a command writes its data to stdout."""

    TABLE = "table"
    JSON = "json"


class DataFormat(StrEnum):
    """How a command whose data are rows writes them."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True)
class TableView:
    """A table to print: its title, column names, and rows of already formatted cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, title: str, items: Iterable[Item], columns: Mapping[str, Callable[[Item], object]]) -> TableView:
        """Return a table with a row for each item; `columns` says what a cell shows, nothing for None."""
        shown = [[show(item) for show in columns.values()] for item in items]
        rows = tuple(tuple("" if value is None else str(value) for value in row) for row in shown)
        return cls(title, tuple(columns), rows)


def first_of(names: Sequence[str]) -> str:
    """Return the first name and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


class SafeConsole(Console):
    """A console that writes no control characters but its own, whatever the names hold that it prints."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is written."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def print_error(text: str) -> None:
    """Write an error to stderr, as a line of its own."""
    stderr_console().print(f"error: {hide_secrets(text)}", style="bold red", soft_wrap=True)


def stdout_console() -> Console:
    """Return a console for data; it never wraps cells away when stdout is a pipe."""
    return SafeConsole(
        file=sys.stdout, width=None if sys.stdout.isatty() else 200, highlight=False, markup=False, emoji=False
    )


def stderr_console() -> Console:
    """Return a console for progress, logs and error messages."""
    return SafeConsole(file=sys.stderr, highlight=False, markup=False, emoji=False)


def print_json(value: object) -> None:
    """Write `value` to stdout as one JSON document, with no JSON inside its strings."""
    sys.stdout.write(json.dumps(_unpacked(value), indent=2, sort_keys=False, default=str) + "\n")


def _unpacked(value: object, name: str = "") -> object:
    """Return `value` with the fields of `_JSON_FIELDS` read, where they hold a JSON object or list."""
    if isinstance(value, Mapping):
        return {key: _unpacked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_unpacked(inner) for inner in value]
    if name in _JSON_FIELDS and isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def print_csv(value: Mapping[str, object] | Sequence[object]) -> None:
    """Write `value` to stdout as CSV, a line for each item: nested fields by dotted names, lists as JSON."""
    rows = [flatten(item) for item in ([value] if isinstance(value, Mapping) else value)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: json.dumps(v, default=str) if isinstance(v, list | tuple) else _safe(v) for name, v in row.items()}
        )


def _safe(value: object) -> object:
    return printable(value) if isinstance(value, str) else value


def write_text(path: Path, text: str, option: str) -> None:
    """Write a text file as `output_file` does; `option` is what named it."""
    with output_file(path, option) as file:
        file.write(text.encode(errors="replace"))


def as_table(view: TableView) -> Table:
    """Return what rich draws."""
    table = Table(title=Text(view.title, style="table.title"), title_justify="left")
    widths = [max(map(len, column)) for column in zip(view.columns, *view.rows, strict=True)]
    narrow = [width <= _NARROW for width in widths]
    # Numbers and words keep their width where names have room to be folded beside them.
    kept = sum(width for width, short in zip(widths, narrow, strict=True) if short)
    room = stdout_console().width - 3 * len(widths) - kept
    for column, short in zip(view.columns, narrow, strict=True):
        table.add_column(column, overflow="fold", no_wrap=short and room >= _NARROW * narrow.count(False))
    for row in view.rows:
        # As plain text: names and messages may hold brackets, which rich would read as markup.
        table.add_row(*(Text(cell) for cell in row))
    return table


def print_table(view: TableView) -> None:
    """Write `view` to stdout as a table."""
    stdout_console().print(as_table(view))


def emit(
    output_format: OutputFormat | DataFormat, value: Mapping[str, object] | Sequence[object], *views: TableView
) -> None:
    """Write a command's result: `value` as JSON or CSV, or `views` as tables."""
    if output_format == OutputFormat.JSON:
        print_json(value)
        return
    if output_format == DataFormat.CSV:
        print_csv(value)
        return
    for view in views:
        print_table(view)


def configure_logging(*, verbose: bool) -> None:
    """Send the project's log records to stderr: what was detected and decided; with `verbose` every detail too."""
    handler = _StderrHandler()
    handler.setFormatter(_SafeFormatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("relaxtune")
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    # MetaSchedule tells every step of every round.
    logging.getLogger("relaxtune.metaschedule").setLevel(logging.DEBUG if verbose else logging.WARNING)


def leave_out_details() -> None:
    """Show warnings alone, unless everything is asked for: what is told of one model is too much of many."""
    logger = logging.getLogger("relaxtune")
    for handler in logger.handlers:
        handler.setLevel(logging.NOTSET if logger.level == logging.DEBUG else logging.WARNING)


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(hide_secrets(super().format(record)))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the moment of writing, not to what it was when logging was configured."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)
