"""`relaxtune db`: create, inspect and query the tuning database. This file: `init`, `info` and `upgrade`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

# Each of these files attaches its commands to `app`.
from relaxtune.pipeline.cli.db import artifacts, exchange, questions, records  # noqa: F401
from relaxtune.pipeline.cli.db.common import DataFormatOption, app, open_for_reading
from relaxtune.pipeline.cli.options import DEFAULT_DATABASE, DatabaseOption
from relaxtune.pipeline.cli.output import DataFormat, TableView, emit

if TYPE_CHECKING:
    from relaxtune.tuning_db.contract import TuningDatabase

__all__ = ["app"]


@app.command()
def init(db: DatabaseOption = DEFAULT_DATABASE, output_format: DataFormatOption = DataFormat.TABLE) -> None:
    """Create the database if it is not there, and say what it holds."""
    from relaxtune.tuning_db.store import SqlDatabase

    with SqlDatabase.open(db) as database:
        _print_info(database, output_format)


@app.command()
def info(db: DatabaseOption = DEFAULT_DATABASE, output_format: DataFormatOption = DataFormat.TABLE) -> None:
    """Say what the database holds: schema, records by status and by route, size."""
    with open_for_reading(db) as database:
        _print_info(database, output_format)


@app.command(name="upgrade")
def upgrade_schema(db: DatabaseOption = DEFAULT_DATABASE, output_format: DataFormatOption = DataFormat.TABLE) -> None:
    """Bring an older database to the schema of this version."""
    from relaxtune.tuning_db.store import upgrade

    before = upgrade(db)
    with open_for_reading(db) as database:
        after = database.info().schema_revision
    view = TableView("relaxtune db upgrade", ("database", "schema before", "schema now"), ((db, str(before), after),))
    emit(output_format, {"database": db, "before": before, "after": after}, view)


def _print_info(database: TuningDatabase, output_format: DataFormat) -> None:
    found = database.info()
    rows = [
        ("database", found.url),
        ("dialect", found.dialect),
        ("schema", found.schema_revision),
        ("workloads", str(found.workloads)),
        ("jobs", str(found.jobs)),
        ("artifacts", str(found.artifacts)),
        ("validations", str(found.validations)),
        ("benchmarks", str(found.benchmarks)),
        ("records", str(found.records)),
        *((f"records {status.value}", str(count)) for status, count in found.records_by_status),
        *((f"records {route.value}", str(count)) for route, count in found.records_by_route),
        ("size", f"{found.size_bytes / 1e6:.2f} MB"),
    ]
    data = {
        **asdict(found),
        "records_by_status": {status.value: count for status, count in found.records_by_status},
        "records_by_route": {route.value: count for route, count in found.records_by_route},
    }
    emit(output_format, data, TableView("tuning database", ("what", "value"), tuple(rows)))
