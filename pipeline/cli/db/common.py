"""Shared by the commands of `relaxtune db`: their group, options and filters, opening and formatting.

`takes_groups` gives a command the options of a class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from relaxtune.pipeline.cli.groups import option
from relaxtune.pipeline.cli.options import DEFAULT_DATABASE, DatabaseOption
from relaxtune.pipeline.cli.output import DataFormat, emit
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.printed_tables import Item, TableView
from relaxtune.tuning_db.records import Mode, RecordFilter, Route, Status
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


@dataclass(frozen=True)
class FilterOptions:
    """The records that a command is about; in the order of `--help`."""

    model: str | None = option(None, "Only workloads that a job found in this model.")
    family: str | None = option(None, "Only this operator family: matmul, softmax, ...")
    workload: str | None = option(None, "Only this workload hash.")
    shape: str | None = option(None, "Only kernels with an argument like 1x128x768.")
    dtype: str | None = option(None, "Only kernels with an argument like float16.")
    target: str | None = option(None, "Only this target kind: llvm, cuda.")
    arch: str | None = option(None, "Only this architecture: sm_90a, znver4.")
    device: str | None = option(None, "Only records of this device: 'NVIDIA H200'.")
    tvm: str | None = option(None, "Only records of this TVM version.")
    route: Route | None = option(None, "Only kernels made by this route.")
    status: Status | None = option(None, "Only records with this status.")
    job: str | None = option(None, "Only records of this job: its id, or the start of it.")
    since: datetime | None = option(None, "Only records of this time (UTC) or later.")
    until: datetime | None = option(None, "Only records before this time (UTC).")

    def select(self, database: TuningDatabase) -> RecordFilter:
        """Return the filter that the options say.

        Raises `UsageError`: a shape cannot be read, or the database has nothing of a name.
        """
        sizes = None if self.shape is None else self.shape.split("x")
        if sizes is not None and not all(part.isdigit() for part in sizes):
            raise UsageError(f"--shape {self.shape!r}: expected sizes such as 1x128x768")
        filters = RecordFilter(
            model=self.model,
            family=self.family,
            workload_hash=self.workload,
            shape=None if sizes is None else tuple(map(int, sizes)),
            dtype=self.dtype,
            target_kind=self.target,
            arch=self.arch,
            device_name=self.device,
            tvm_version=self.tvm,
            route=self.route,
            status=self.status,
            job_id=None if self.job is None else find_job(database, self.job),
            since=as_utc(self.since),
            until=as_utc(self.until),
        )
        require_known(
            database, model=self.model, family=self.family, workload=self.workload, target=self.target, arch=self.arch,
            device=self.device, tvm=self.tvm,
        )  # fmt: skip
        return filters


def as_utc(moment: datetime | None) -> datetime | None:
    """Return a time of the command line, which has no zone, in UTC."""
    return None if moment is None else moment.replace(tzinfo=UTC)


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
