"""Shared by every command: `--format`, `--debug`, data on stdout, everything else on stderr."""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from relaxtune.pipeline.output_file import output_file
from relaxtune.pipeline.printable import printable
from relaxtune.pipeline.printed_tables import TableView
from relaxtune.tuning_db.questions.data_frames import flatten
from relaxtune.tuning_db.urls import hide_secrets

# Columns of the database that hold JSON as text; `--format json` writes what they say.
_JSON_FIELDS = frozenset(
    {"attributes", "conditions", "config", "decision", "manifest", "options", "report", "signature"}
)


class OutputFormat(StrEnum):
    """How a command writes its data to stdout."""

    TABLE = "table"
    JSON = "json"


class DataFormat(StrEnum):
    """How a command whose data are rows writes them."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


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
        for name, cell in row.items():
            if isinstance(cell, list | tuple):
                row[name] = json.dumps(cell, default=str)
            elif isinstance(cell, str):
                row[name] = printable(cell)
        writer.writerow(row)


def write_text(path: Path, text: str, option: str) -> None:
    """Write a text file as `output_file` does; `option` is what named it."""
    with output_file(path, option) as file:
        file.write(text.encode(errors="replace"))


def print_table(view: TableView) -> None:
    """Write `view` to stdout as a table."""
    stdout_console().print(view)


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
    # MetaSchedule logs every step of every round.
    logging.getLogger("relaxtune.metaschedule").setLevel(logging.DEBUG if verbose else logging.WARNING)


def leave_out_details() -> None:
    """Show warnings alone, unless `--verbose` is given: the log of one model is too long for many."""
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
