"""What the commands of `relaxtune db` share: their group, their options, opening and formatting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from relaxtune.pipeline.cli.output import DataFormat, TableView, emit
from relaxtune.tuning_db.records import Mode

if TYPE_CHECKING:
    from relaxtune.tuning_db.contract import TuningDatabase

app = typer.Typer(help="Create, inspect and query the tuning database.", no_args_is_help=True)

DataFormatOption = Annotated[DataFormat, typer.Option("--format", help="How to write the rows to stdout.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Most rows to return.")]

DEFAULT_LIMIT = 50


def open_for_reading(url: str) -> TuningDatabase:
    """Return the database at `url`, which is not created nor changed."""
    from relaxtune.tuning_db.store import SqlDatabase

    return SqlDatabase.open(url, mode=Mode.READ_ONLY, create=False)


def microseconds(value: float | None) -> str:
    """Return a latency for a table, empty when there is none."""
    if value is None:
        return ""
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def emit_counts(output_format: DataFormat, title: str, counts: dict[str, int]) -> None:
    """Write how many of each there were."""
    rows = tuple((name.replace("_", " "), str(count)) for name, count in counts.items())
    emit(output_format, counts, TableView(title, ("what", "count"), rows))
