"""`relaxtune db top | query | workloads`: records, and what they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict

from relaxtune.pipeline.cli.db.common import FilterOptions, TableOptions, app, microseconds, minute
from relaxtune.pipeline.cli.groups import takes_groups
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.printed_tables import Item
from relaxtune.tuning_db.records import TuningRecord

_RESOURCES = {"registers": "registers", "smem_bytes": "smem B", "spill_bytes": "spill B"}


@app.command()
@takes_groups(without=("status",))
def top(filters: FilterOptions, table: TableOptions) -> None:
    """List the best valid record of every task, the slowest first. --family model lists whole models."""
    from relaxtune.tuning_db.questions import queries

    with table.open() as database:
        lines = queries.top(database, filters.select(database), limit=table.limit)
    columns = {
        "task": lambda line: line.name,
        "family": lambda line: line.family,
        "route": lambda line: line.best.route.value,
        "best us": lambda line: microseconds(line.best.latency_us),
        "valid/failed": lambda line: f"{line.valid}/{line.failed}",
        "device": lambda line: line.best.environment.device_name,
        "measured (UTC)": lambda line: minute(line.best.created_at),
        **resource_columns(lines, lambda line: line.best),
    }
    table.emit("best record per task", lines, columns, lambda line: {**asdict(line), "best": record_data(line.best)})


@app.command()
@takes_groups()
def query(filters: FilterOptions, table: TableOptions) -> None:
    """List records, the newest first, with the end of the error text of failed candidates."""
    from relaxtune.tuning_db.questions import queries

    with table.open() as database:
        lines = queries.query(database, filters.select(database), limit=table.limit)
    columns = {
        "id": lambda line: line.record.id,
        "task": lambda line: line.name,
        "model": lambda line: line.model,
        "route": lambda line: line.record.route.value,
        "status": lambda line: line.record.status.value,
        "median us": lambda line: microseconds(line.record.latency_us),
        "error": lambda line: line.record.error and last_line(line.record.error)[:100],
        "measured (UTC)": lambda line: f"{line.record.created_at:%Y-%m-%d %H:%M:%S}",
        **resource_columns(lines, lambda line: line.record),
    }
    table.emit("records", lines, columns, lambda line: {**asdict(line), "record": record_data(line.record)})


@app.command()
@takes_groups()
def workloads(filters: FilterOptions, table: TableOptions) -> None:
    """List the workloads with FLOPs, bytes, and counts of valid and failed records."""
    from relaxtune.tuning_db.questions import queries

    with table.open() as database:
        lines = queries.workloads(database, filters.select(database), limit=table.limit)
    columns = {
        "task": lambda line: line.name,
        "family": lambda line: line.family,
        "workload": lambda line: line.workload_hash,
        "MFLOP": lambda line: f"{line.flops / 1e6:.3f}",
        "MB": lambda line: f"{line.bytes / 1e6:.3f}",
        "valid/failed": lambda line: f"{line.valid}/{line.failed}",
        "best us": lambda line: microseconds(line.best_us),
    }
    table.emit("workloads", lines, columns, asdict)


def resource_columns(
    items: Iterable[Item], record: Callable[[Item], TuningRecord]
) -> dict[str, Callable[[Item], object]]:
    """Return the columns of what kernels take, of those resources that any of the records knows."""
    items = list(items)

    def column(name: str) -> Callable[[Item], object]:
        return lambda item: getattr(record(item), name)

    known = [name for name in _RESOURCES if any(column(name)(item) is not None for item in items)]
    return {_RESOURCES[name]: column(name) for name in known}


def record_data(record: TuningRecord) -> dict[str, object]:
    """Return a record as plain data, with its median and its raw latencies."""
    return {**asdict(record), "latency_us": record.latency_us}
