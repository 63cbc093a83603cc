"""`relaxtune db top | query | workloads`: records, and what they are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from relaxtune.pipeline.cli.db.common import (
    DEFAULT_LIMIT,
    DataFormatOption,
    LimitOption,
    app,
    microseconds,
    open_for_reading,
)
from relaxtune.pipeline.cli.db.filters import takes_filters
from relaxtune.pipeline.cli.options import DEFAULT_DATABASE, DatabaseOption
from relaxtune.pipeline.cli.output import DataFormat, TableView, emit
from relaxtune.tuning_db.records import RecordFilter, TuningRecord

_RESOURCES = {"registers": "registers", "smem_bytes": "smem B", "spill_bytes": "spill B"}


@app.command()
@takes_filters(without=("status",))
def top(
    db: DatabaseOption = DEFAULT_DATABASE,
    limit: LimitOption = DEFAULT_LIMIT,
    output_format: DataFormatOption = DataFormat.TABLE,
    *,
    filters: RecordFilter,
) -> None:
    """List the best valid record of every workload, the slowest first."""
    from relaxtune.tuning_db.questions import queries

    with open_for_reading(db) as database:
        lines = queries.top(database, filters, limit=limit)
    resources = ResourceColumns([line.best for line in lines])
    rows = tuple(
        (
            line.name,
            line.family,
            line.best.route.value,
            microseconds(line.best.latency_us),
            f"{line.valid}/{line.failed}",
            line.best.environment.device_name,
            f"{line.best.created_at:%Y-%m-%d %H:%M}",
            *resources(line.best),
        )
        for line in lines
    )
    columns = ("task", "family", "route", "best us", "valid/failed", "device", "measured (UTC)", *resources)
    data = [{**asdict(line), "best": record_data(line.best)} for line in lines]
    emit(output_format, data, TableView("best record per task", columns, rows))


@app.command()
@takes_filters()
def query(
    db: DatabaseOption = DEFAULT_DATABASE,
    limit: LimitOption = DEFAULT_LIMIT,
    output_format: DataFormatOption = DataFormat.TABLE,
    *,
    filters: RecordFilter,
) -> None:
    """List records, the newest first; failed candidates with the end of their error text."""
    from relaxtune.tuning_db.questions import queries

    with open_for_reading(db) as database:
        lines = queries.query(database, filters, limit=limit)
    resources = ResourceColumns([line.record for line in lines])
    rows = tuple(
        (
            str(line.record.id),
            line.name,
            line.model or "",
            line.record.route.value,
            line.record.status.value,
            microseconds(line.record.latency_us),
            _last_line(line.record.error),
            f"{line.record.created_at:%Y-%m-%d %H:%M:%S}",
            *resources(line.record),
        )
        for line in lines
    )
    columns = ("id", "task", "model", "route", "status", "median us", "error", "measured (UTC)", *resources)
    data = [{**asdict(line), "record": record_data(line.record)} for line in lines]
    emit(output_format, data, TableView("records", columns, rows))


@app.command()
@takes_filters()
def workloads(
    db: DatabaseOption = DEFAULT_DATABASE,
    limit: LimitOption = DEFAULT_LIMIT,
    output_format: DataFormatOption = DataFormat.TABLE,
    *,
    filters: RecordFilter,
) -> None:
    """List the workloads with their work and how much was measured of them."""
    from relaxtune.tuning_db.questions import queries

    with open_for_reading(db) as database:
        lines = queries.workloads(database, filters, limit=limit)
    rows = tuple(
        (
            line.name,
            line.family,
            line.workload_hash,
            f"{line.flops / 1e6:.3f}",
            f"{line.bytes / 1e6:.3f}",
            f"{line.valid}/{line.failed}",
            microseconds(line.best_us),
        )
        for line in lines
    )
    columns = ("task", "family", "workload", "MFLOP", "MB", "valid/failed", "best us")
    emit(output_format, [asdict(line) for line in lines], TableView("workloads", columns, rows))


class ResourceColumns:
    """The columns of what kernels take, of those resources that any of the records knows."""

    def __init__(self, records: Sequence[TuningRecord]) -> None:
        self._names = [name for name in _RESOURCES if any(getattr(record, name) is not None for record in records)]

    def __iter__(self) -> Iterator[str]:
        """Return the titles of the columns."""
        return (_RESOURCES[name] for name in self._names)

    def __call__(self, record: TuningRecord) -> list[str]:
        """Return the cells of a record, empty where it is not known."""
        values = (getattr(record, name) for name in self._names)
        return ["" if value is None else str(value) for value in values]


def record_data(record: TuningRecord) -> dict[str, object]:
    """Return a record as plain data, with its median beside the raw latencies."""
    return {**asdict(record), "latency_us": record.latency_us}


def _last_line(text: str | None) -> str:
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1][:100] if lines else ""
