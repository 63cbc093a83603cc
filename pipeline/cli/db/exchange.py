"""`relaxtune db export | bundle | import | merge | prune | delete`: databases between people."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaxtune.pipeline.cli.db.common import FilterOptions, TableOptions, app, open_for_reading
from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.output_file import output_file
from relaxtune.tuning_db.urls import DatabaseUrl

if TYPE_CHECKING:
    from relaxtune.tuning_db.store import TuningDatabase


class FileForm(StrEnum):
    """The form in which a database is exchanged."""

    ARCHIVE = "archive"
    METASCHEDULE = "metaschedule"


# Names of files that other programs write, and would not read here.
_OTHER_FORMATS = frozenset(
    {".parquet", ".csv", ".tsv", ".arrow", ".feather", ".xlsx", ".db", ".sqlite", ".sqlite3", ".zip", ".tar"}
)

FormOption = Annotated[
    FileForm, typer.Option("--as", help="archive: one checksummed file; metaschedule: a folder of its two JSON files.")
]


@app.command(name="export")
@takes_groups(without=("limit",))
def export_database(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The archive, or the folder for MetaSchedule's files.")],
    filters: FilterOptions,
    table: TableOptions,
    form: FormOption = FileForm.ARCHIVE,
) -> None:
    """Write the database, or the records that the filters select, to a file."""
    if form is FileForm.ARCHIVE and out.suffix.lower() in _OTHER_FORMATS:
        raise UsageError(
            f"{out} would not be what its name says: an archive is lines of JSON in gzip, for `relaxtune db import`. "
            f"Name it {out.with_suffix('.rtdb').name}; for other programs, take `relaxtune db query --format json`"
        )
    with table.open() as database:
        selected = filters.select(database)
        if form is FileForm.METASCHEDULE:
            from relaxtune.tuning_db.exchange.stock_json import export_stock

            workloads, records = export_stock(database, out, selected)
            table.emit_counts(f"wrote {out}", {"workloads": workloads, "records": records})
        else:
            from relaxtune.tuning_db.exchange.archive import export_archive

            with output_file(out, "the archive") as file:
                entries = export_archive(database, file, selected)
                size = file.tell()
            table.emit_counts(f"wrote {out}", {"entries": entries, "bytes": size})


@app.command()
@takes_groups(without=("limit",))
def bundle(
    artifacts: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Artifacts.")],
    table: TableOptions,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The new SQLite file.")],
) -> None:
    """Write the records behind artifacts into a small database, to build them on another machine with the same device.

    `compile --db FILE` makes the same kernels there.
    """
    from relaxtune.pipeline.registry.bundle import write_bundle

    made = write_bundle(artifacts, table.db, out)
    table.emit_counts(f"wrote {out}", {"artifacts": made.artifacts, "records": made.records, "bytes": made.bytes})


@app.command(name="import")
@takes_groups(without=("limit",))
def import_database(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="An archive, or a folder of MetaSchedule's files.")],
    table: TableOptions,
    measured_for: str = option("auto", "Target of MetaSchedule's records.", metavar="TARGET"),
    measured_on: str | None = option(
        None, "Device of MetaSchedule's records. Default: this machine's.", metavar="DEVICE"
    ),
) -> None:
    """Read an archive, or records of stock MetaSchedule, whole or not at all. Nothing in them is executed."""
    from relaxtune.tuning_db.store import TuningDatabase

    with TuningDatabase.open(table.db) as database:
        if source.is_dir():
            counts = _import_stock(database, source, measured_for, measured_on)
        else:
            from relaxtune.tuning_db.exchange.archive import import_archive

            counts = asdict(import_archive(database, source))
    table.emit_counts(f"read {source}", counts)


def _import_stock(database: TuningDatabase, source: Path, measured_for: str, measured_on: str | None) -> dict[str, int]:

    from relaxtune.pipeline.environment import detect_environment, target_key
    from relaxtune.schedules.targets import resolve_target
    from relaxtune.tuning_db.exchange.stock_json import import_stock

    target = resolve_target(measured_for)
    environment = detect_environment(target)
    if measured_on is not None:
        environment = replace(environment, device_name=measured_on)
    return asdict(import_stock(database, source, environment=environment, target=target_key(target)))


@app.command()
@takes_groups(without=("limit",))
def merge(
    source: Annotated[
        DatabaseUrl,
        typer.Argument(metavar="SOURCE", help="The other database: a file or a URL.", parser=DatabaseUrl.of),
    ],
    table: TableOptions,
) -> None:
    """Add everything of another database to this one, whole or not at all."""
    from relaxtune.tuning_db.exchange.archive import merge as merge_databases
    from relaxtune.tuning_db.store import TuningDatabase

    with open_for_reading(source) as other, TuningDatabase.open(table.db) as database:
        counts = asdict(merge_databases(database, other))
    table.emit_counts(f"merged {source} into {table.db}", counts)


@app.command()
@takes_groups(without=("limit",))
def prune(
    filters: FilterOptions,
    table: TableOptions,
    older_than_days: float | None = option(None, "Remove records older than this.", min=0, max=100_000),
    keep: int | None = option(
        None, "Keep this many of the best and of the last failed records of each task and device.", min=1
    ),
    dominated: bool = option(
        False, "Remove records if a newer record of the same route, task and device is faster.", "--dominated"
    ),
    dry_run: bool = option(False, "Only count the records to remove.", "--dry-run"),
) -> None:
    """Remove records by age, count, or because newer ones are faster. The best of each task and route stays."""
    from relaxtune.tuning_db.exchange.pruning import PruneRules, prune as prune_records
    from relaxtune.tuning_db.store import TuningDatabase

    before = None if older_than_days is None else datetime.now(UTC) - timedelta(days=older_than_days)
    rules = PruneRules(before=before, keep=keep, dominated=dominated)
    with TuningDatabase.open(table.db, create=False) as database:
        done = prune_records(database, rules, filters.select(database), dry_run=dry_run)
    table.emit_counts("would remove" if dry_run else "removed", asdict(done))


@app.command()
@takes_groups(without=("limit",))
def delete(
    ids: Annotated[list[int], typer.Argument(metavar="ID...", help="Ids of records, as `db query` lists them.")],
    table: TableOptions,
) -> None:
    """Remove wrong records by their ids, all of them or none."""
    from relaxtune.tuning_db.exchange.pruning import delete_records
    from relaxtune.tuning_db.store import TuningDatabase

    with TuningDatabase.open(table.db, create=False) as database:
        done = delete_records(database, ids)
    table.emit_counts("removed", asdict(done))
