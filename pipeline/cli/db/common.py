"""Shared by the commands of `relaxtune db`: their group, their options, opening and formatting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from relaxtune.pipeline.cli.groups import option
from relaxtune.pipeline.cli.options import DEFAULT_DATABASE, DatabaseOption
from relaxtune.pipeline.cli.output import DataFormat, emit
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.printed_tables import Item, TableView
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.urls import DatabasePlace

if TYPE_CHECKING:
    from relaxtune.tuning_db.store import TuningDatabase

app = typer.Typer(help="Create, inspect and query the tuning database.", no_args_is_help=True)


@dataclass(frozen=True)
class TableOptions:
    """The database, the number of rows, and the format that they are written in."""

    db: DatabaseOption = DEFAULT_DATABASE
    limit: int = option(50, "Most rows to return.", min=1)
    output_format: DataFormat = option(DataFormat.TABLE, "How to write the rows to stdout.", "--format")

    def open(self) -> TuningDatabase:
        """Return the database, which is not created nor changed."""
        return open_for_reading(self.db)

    def emit(
        self,
        title: str,
        items: Sequence[Item],
        columns: Mapping[str, Callable[[Item], object]],
        to_data: Callable[[Item], Mapping[str, object]],
    ) -> None:
        """Write the items: `columns` are the cells of the table, `to_data` an item of JSON or CSV."""
        emit(self.output_format, [to_data(item) for item in items], TableView.of(title, items, columns))

    def emit_counts(self, title: str, counts: Mapping[str, int]) -> None:
        """Write how many of each there were."""
        self.emit_facts(title, {name.replace("_", " "): count for name, count in counts.items()}, counts, "count")

    def emit_facts(
        self, title: str, facts: Mapping[str, object], data: Mapping[str, object], value: str = "value"
    ) -> None:
        """Write what was found of one thing: a row for each fact."""
        emit(self.output_format, data, TableView.facts(title, facts.items(), value))


def open_for_reading(url: DatabasePlace) -> TuningDatabase:
    """Return the database at `url`, which is not created nor changed."""
    from relaxtune.tuning_db.store import TuningDatabase

    return TuningDatabase.open(url, mode=Mode.READ_ONLY, create=False)


def find_job(database: TuningDatabase, start: str) -> str:
    """Return the id of the one job that begins with `start`.

    Raises `UsageError`: no job or several do.
    """
    ids = sorted(job.id for job in database.list_jobs() if job.id.startswith(start))
    if start in ids or len(ids) == 1:
        return start if start in ids else ids[0]
    known = f"{len(ids)} begin with it: {', '.join(ids[:5])}" if ids else "none begins with it"
    raise UsageError(f"No job {start}: {known}; `relaxtune db jobs` lists them")


def require_known(database: TuningDatabase, **values: str | None) -> None:
    """Check that the database has something of each value, so that a misspelt name is no empty table.

    Raises `UsageError`: names the option and what the database knows.
    """
    from relaxtune.tuning_db.questions.queries import known_values

    for name, value in values.items():
        if value is None:
            continue
        known = sorted(known_values(database, name))
        if value not in known:
            more = f" and {len(known) - 20} more" if len(known) > 20 else ""
            listed = ", ".join(known[:20]) + more or "none"
            raise UsageError(f"--{name} {value!r}: this database has none of that {name}; it has {listed}")


def microseconds(value: float | None) -> str:
    """Return a latency for a table, empty when there is none."""
    if value is None:
        return ""
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def minute(moment: object) -> str:
    """Return a time for a table."""
    return f"{moment:%Y-%m-%d %H:%M}"
