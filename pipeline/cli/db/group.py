"""`relaxtune db`: create, inspect and query the tuning database. This file: `init`, `info` and `upgrade`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

# Each of these files attaches its commands to `app`.
from relaxtune.pipeline.cli.db import artifacts, batches, exchange, explain, questions, records  # noqa: F401
from relaxtune.pipeline.cli.db.common import TableOptions, app
from relaxtune.pipeline.cli.groups import takes_groups
from relaxtune.pipeline.cli.output import emit
from relaxtune.pipeline.printed_tables import TableView

if TYPE_CHECKING:
    from relaxtune.tuning_db.store import TuningDatabase

__all__ = ["app"]


@app.command()
@takes_groups(without=("limit",))
def init(table: TableOptions) -> None:
    """Create the database if it does not exist, and count its contents."""
    from relaxtune.tuning_db.store import TuningDatabase

    with TuningDatabase.open(table.db) as database:
        _print_info(database, table)


@app.command()
@takes_groups(without=("limit",))
def info(table: TableOptions) -> None:
    """Count the contents of the database: records by status and route, jobs, artifacts, size."""
    with table.open() as database:
        _print_info(database, table)


@app.command(name="upgrade")
@takes_groups(without=("limit",))
def upgrade_schema(table: TableOptions) -> None:
    """Upgrade an older database to the schema of this version."""
    from relaxtune.tuning_db.store import upgrade

    before = upgrade(table.db)
    with table.open() as database:
        after = database.info().schema_revision
    columns = ("database", "schema before", "schema now")
    view = TableView("relaxtune db upgrade", columns, ((str(table.db), str(before), after),))
    emit(table.output_format, {"database": str(table.db), "before": before, "after": after}, view)


def _print_info(database: TuningDatabase, table: TableOptions) -> None:
    found = database.info()
    by_status = {status.value: count for status, count in found.records_by_status}
    by_route = {route.value: count for route, count in found.records_by_route}
    facts = {
        "database": found.url,
        "dialect": found.dialect,
        "schema": found.schema_revision,
        "workloads": found.workloads,
        "jobs": found.jobs,
        "artifacts": found.artifacts,
        "validations": found.validations,
        "benchmarks": found.benchmarks,
        "records": found.records,
        **{f"records {name}": count for name, count in {**by_status, **by_route}.items()},
        "size": f"{found.size_bytes / 1e6:.2f} MB",
    }
    data = {**asdict(found), "records_by_status": by_status, "records_by_route": by_route}
    table.emit_facts("tuning database", facts, data)
