"""`relaxtune db export | import | merge | prune | delete`: databases between people."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from relaxtune.pipeline.cli.db.common import DataFormatOption, app, emit_counts, open_for_reading
from relaxtune.pipeline.cli.db.filters import takes_filters
from relaxtune.pipeline.cli.options import DEFAULT_DATABASE, DatabaseOption
from relaxtune.pipeline.cli.output import DataFormat
from relaxtune.tuning_db.records import RecordFilter


class FileForm(StrEnum):
    """What a database is exchanged as."""

    ARCHIVE = "archive"
    METASCHEDULE = "metaschedule"


FormOption = Annotated[
    FileForm, typer.Option("--as", help="archive: one checksummed file; metaschedule: a folder of its two JSON files.")
]


@app.command(name="export")
@takes_filters()
def export_database(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The archive, or the folder for MetaSchedule's files.")],
    db: DatabaseOption = DEFAULT_DATABASE,
    form: FormOption = FileForm.ARCHIVE,
    output_format: DataFormatOption = DataFormat.TABLE,
    *,
    filters: RecordFilter,
) -> None:
    """Write the database, or the records that the filters select, whole or not at all."""
    with open_for_reading(db) as database:
        if form is FileForm.METASCHEDULE:
            from relaxtune.tuning_db.exchange.stock_json import export_stock

            workloads, records = export_stock(database, out, filters)
            emit_counts(output_format, f"wrote {out}", {"workloads": workloads, "records": records})
        else:
            from relaxtune.tuning_db.exchange.archive import export_archive

            entries = export_archive(database, out, filters)
            emit_counts(output_format, f"wrote {out}", {"entries": entries, "bytes": out.stat().st_size})


@app.command(name="import")
def import_database(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="An archive, or a folder of MetaSchedule's files.")],
    db: DatabaseOption = DEFAULT_DATABASE,
    measured_for: Annotated[
        str,
        typer.Option("--measured-for", metavar="TARGET", help="MetaSchedule's files: what they were measured for."),
    ] = "auto",
    measured_on: Annotated[
        str | None,
        typer.Option("--measured-on", metavar="DEVICE", help="MetaSchedule's files: the device. Default: this one."),
    ] = None,
    output_format: DataFormatOption = DataFormat.TABLE,
) -> None:
    """Read an archive, or what stock MetaSchedule wrote, all or nothing; nothing in it is executed."""
    from relaxtune.tuning_db.store import SqlDatabase

    with SqlDatabase.open(db) as database:
        if source.is_dir():
            counts = _import_stock(database, source, measured_for, measured_on)
        else:
            from relaxtune.tuning_db.exchange.archive import import_archive

            counts = asdict(import_archive(database, source))
    emit_counts(output_format, f"read {source}", counts)


def _import_stock(database: object, source: Path, measured_for: str, measured_on: str | None) -> dict[str, int]:
    from dataclasses import replace

    from relaxtune.pipeline.environment import detect_environment, target_key
    from relaxtune.schedules.targets import resolve_target
    from relaxtune.tuning_db.contract import TuningDatabase
    from relaxtune.tuning_db.exchange.stock_json import import_stock

    assert isinstance(database, TuningDatabase)
    target = resolve_target(measured_for)
    environment = detect_environment(target)
    if measured_on is not None:
        environment = replace(environment, device_name=measured_on)
    return asdict(import_stock(database, source, environment=environment, target=target_key(target)))


@app.command()
def merge(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The database to take from: a file or a URL.")],
    db: DatabaseOption = DEFAULT_DATABASE,
    output_format: DataFormatOption = DataFormat.TABLE,
) -> None:
    """Take everything of another database into this one, all or nothing; again changes nothing."""
    from relaxtune.tuning_db.exchange.archive import merge as merge_databases
    from relaxtune.tuning_db.store import SqlDatabase

    with open_for_reading(source) as other, SqlDatabase.open(db) as database:
        counts = asdict(merge_databases(database, other))
    emit_counts(output_format, f"merged {source} into {db}", counts)


@app.command()
@takes_filters()
def prune(
    db: DatabaseOption = DEFAULT_DATABASE,
    older_than_days: Annotated[
        float | None, typer.Option("--older-than-days", min=0, help="Forget records older than this.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=1, help="Keep the best and the last failed of each task and device."),
    ] = None,
    dominated: Annotated[
        bool, typer.Option("--dominated", help="Forget records of which a newer one of the same kind is faster.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many would go.")] = False,
    output_format: DataFormatOption = DataFormat.TABLE,
    *,
    filters: RecordFilter,
) -> None:
    """Forget records by age, count or because better ones are newer; the best of each task and route always stays."""
    from relaxtune.tuning_db.exchange.pruning import PruneRules
    from relaxtune.tuning_db.exchange.pruning import prune as prune_records
    from relaxtune.tuning_db.store import SqlDatabase

    before = None if older_than_days is None else datetime.now(UTC) - timedelta(days=older_than_days)
    rules = PruneRules(before=before, keep=keep, dominated=dominated)
    with SqlDatabase.open(db, create=False) as database:
        done = prune_records(database, rules, filters, dry_run=dry_run)
    emit_counts(output_format, "would remove" if dry_run else "removed", asdict(done))


@app.command()
def delete(
    ids: Annotated[list[int], typer.Argument(metavar="ID...", help="Ids of records, as `db query` lists them.")],
    db: DatabaseOption = DEFAULT_DATABASE,
    output_format: DataFormatOption = DataFormat.TABLE,
) -> None:
    """Forget records by their ids, all of them or none: for those that are wrong."""
    from relaxtune.tuning_db.exchange.pruning import delete_records
    from relaxtune.tuning_db.store import SqlDatabase

    with SqlDatabase.open(db, create=False) as database:
        done = delete_records(database, ids)
    emit_counts(output_format, "removed", asdict(done))
