"""`relaxtune db`: create, inspect and query the tuning database."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import DEFAULT_DATABASE, DatabaseOption
from pipeline.cli.output import DataFormat, TableView, emit
from pipeline.errors import UsageError
from tuning_db.records import Mode, RecordFilter, Route, Status, TuningRecord

if TYPE_CHECKING:
    from tuning_db.store import TuningDatabase

app = typer.Typer(help="Create, inspect and query the tuning database.", no_args_is_help=True)

ModelFilter = Annotated[str | None, typer.Option("--model", help="Only workloads that a job found in this model.")]
FamilyFilter = Annotated[str | None, typer.Option("--family", help="Only this operator family: matmul, softmax, ...")]
WorkloadFilter = Annotated[str | None, typer.Option("--workload", help="Only this workload hash.")]
TargetFilter = Annotated[str | None, typer.Option("--target", help="Only this target kind: llvm, cuda.")]
ArchFilter = Annotated[str | None, typer.Option("--arch", help="Only this architecture: sm_90a, znver4.")]
RouteFilter = Annotated[Route | None, typer.Option("--route", help="Only kernels made by this route.")]
StatusFilter = Annotated[Status | None, typer.Option("--status", help="Only candidates that ended like this.")]
JobFilter = Annotated[str | None, typer.Option("--job", help="Only candidates of this job.")]
SinceFilter = Annotated[datetime | None, typer.Option("--since", help="Only records of this time (UTC) or later.")]
UntilFilter = Annotated[datetime | None, typer.Option("--until", help="Only records before this time (UTC).")]
ShapeFilter = Annotated[str | None, typer.Option("--shape", help="Only kernels with an argument like 1x128x768.")]
DtypeFilter = Annotated[str | None, typer.Option("--dtype", help="Only kernels with an argument like float16.")]
DeviceFilter = Annotated[str | None, typer.Option("--device", help="Only what this device measured: 'NVIDIA H200'.")]
DataFormatOption = Annotated[DataFormat, typer.Option("--format", help="How to write the rows to stdout.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Most rows to return.")]

DEFAULT_LIMIT = 50


@app.command()
def init(db: DatabaseOption = DEFAULT_DATABASE, output_format: DataFormatOption = DataFormat.TABLE) -> None:
    """Create the database if it is not there, and say what it holds."""
    from tuning_db.store import TuningDatabase

    with TuningDatabase.open(db) as database:
        _print_info(database, output_format)


@app.command()
def info(db: DatabaseOption = DEFAULT_DATABASE, output_format: DataFormatOption = DataFormat.TABLE) -> None:
    """Say what the database holds: schema, records by status and by route, size."""
    with open_for_reading(db) as database:
        _print_info(database, output_format)


@app.command(name="upgrade")
def upgrade_schema(db: DatabaseOption = DEFAULT_DATABASE, output_format: DataFormatOption = DataFormat.TABLE) -> None:
    """Bring an older database to the schema of this version."""
    from tuning_db.store import upgrade

    before = upgrade(db)
    with open_for_reading(db) as database:
        after = database.info().schema_revision
    view = TableView("relaxtune db upgrade", ("database", "schema before", "schema now"), ((db, str(before), after),))
    emit(output_format, {"database": db, "before": before, "after": after}, view)


@app.command()
def top(
    db: DatabaseOption = DEFAULT_DATABASE,
    model: ModelFilter = None,
    family: FamilyFilter = None,
    workload: WorkloadFilter = None,
    target: TargetFilter = None,
    arch: ArchFilter = None,
    device: DeviceFilter = None,
    shape: ShapeFilter = None,
    dtype: DtypeFilter = None,
    route: RouteFilter = None,
    job: JobFilter = None,
    since: SinceFilter = None,
    until: UntilFilter = None,
    limit: LimitOption = DEFAULT_LIMIT,
    output_format: DataFormatOption = DataFormat.TABLE,
) -> None:
    """List the best valid record of every workload, the slowest first."""
    from tuning_db import queries

    filters = make_filters(
        model=model,
        family=family,
        workload=workload,
        target=target,
        arch=arch,
        device=device,
        shape=shape,
        dtype=dtype,
        route=route,
        job=job,
        since=since,
        until=until,
    )
    with open_for_reading(db) as database:
        lines = queries.top(database, filters, limit=limit)
    rows = tuple(
        (
            line.name,
            line.family,
            line.best.route.value,
            microseconds(line.best.latency_us),
            f"{line.valid}/{line.failed}",
            line.best.environment.device_name,
            f"{line.best.created_at:%Y-%m-%d %H:%M}",
        )
        for line in lines
    )
    columns = ("task", "family", "route", "best us", "valid/failed", "device", "measured (UTC)")
    data = [{**asdict(line), "best": record_data(line.best)} for line in lines]
    emit(output_format, data, TableView("best record per task", columns, rows))


@app.command()
def query(
    db: DatabaseOption = DEFAULT_DATABASE,
    model: ModelFilter = None,
    family: FamilyFilter = None,
    workload: WorkloadFilter = None,
    target: TargetFilter = None,
    arch: ArchFilter = None,
    device: DeviceFilter = None,
    shape: ShapeFilter = None,
    dtype: DtypeFilter = None,
    route: RouteFilter = None,
    status: StatusFilter = None,
    job: JobFilter = None,
    since: SinceFilter = None,
    until: UntilFilter = None,
    limit: LimitOption = DEFAULT_LIMIT,
    output_format: DataFormatOption = DataFormat.TABLE,
) -> None:
    """List records, the newest first; failed candidates with the end of their error text."""
    from tuning_db import queries

    filters = make_filters(
        model=model,
        family=family,
        workload=workload,
        target=target,
        arch=arch,
        device=device,
        shape=shape,
        dtype=dtype,
        route=route,
        status=status,
        job=job,
        since=since,
        until=until,
    )
    with open_for_reading(db) as database:
        lines = queries.query(database, filters, limit=limit)
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
        )
        for line in lines
    )
    columns = ("id", "task", "model", "route", "status", "median us", "error", "measured (UTC)")
    data = [{**asdict(line), "record": record_data(line.record)} for line in lines]
    emit(output_format, data, TableView("records", columns, rows))


@app.command()
def workloads(
    db: DatabaseOption = DEFAULT_DATABASE,
    model: ModelFilter = None,
    family: FamilyFilter = None,
    workload: WorkloadFilter = None,
    shape: ShapeFilter = None,
    dtype: DtypeFilter = None,
    limit: LimitOption = DEFAULT_LIMIT,
    output_format: DataFormatOption = DataFormat.TABLE,
) -> None:
    """List the workloads with their work and how much was measured of them."""
    from tuning_db import queries

    filters = make_filters(model=model, family=family, workload=workload, shape=shape, dtype=dtype)
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


def open_for_reading(url: str) -> TuningDatabase:
    """Return the database at `url`, which is not created nor changed."""
    from tuning_db.store import TuningDatabase

    return TuningDatabase.open(url, mode=Mode.READ_ONLY, create=False)


def _print_info(database: TuningDatabase, output_format: DataFormat) -> None:
    found = database.info()
    rows = [
        ("database", found.url),
        ("dialect", found.dialect),
        ("schema", found.schema_revision),
        ("workloads", str(found.workloads)),
        ("jobs", str(found.jobs)),
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


def make_filters(
    *,
    model: str | None = None,
    family: str | None = None,
    workload: str | None = None,
    target: str | None = None,
    arch: str | None = None,
    device: str | None = None,
    shape: str | None = None,
    dtype: str | None = None,
    tvm_version: str | None = None,
    route: Route | None = None,
    status: Status | None = None,
    job: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> RecordFilter:
    """Return the filter that the options of a command say."""
    return RecordFilter(
        model=model,
        family=family,
        workload_hash=workload,
        target_kind=target,
        arch=arch,
        device_name=device,
        shape=_sizes(shape),
        dtype=dtype,
        tvm_version=tvm_version,
        route=route,
        status=status,
        job_id=job,
        since=as_utc(since),
        until=as_utc(until),
    )


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not all(part.isdigit() for part in text.split("x")):
        raise UsageError(f"--shape {text!r}: expected sizes such as 1x128x768")
    return tuple(int(part) for part in text.split("x"))


def as_utc(moment: datetime | None) -> datetime | None:
    """Return a time of the command line, which has no zone, in UTC."""
    return None if moment is None else moment.replace(tzinfo=UTC)


def record_data(record: TuningRecord) -> dict[str, object]:
    """Return a record as plain data, with its median beside the raw latencies."""
    return {**asdict(record), "latency_us": record.latency_us}


def microseconds(value: float | None) -> str:
    """Return a latency for a table, empty when there is none."""
    if value is None:
        return ""
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _last_line(text: str | None) -> str:
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1][:100] if lines else ""


# The other commands of `relaxtune db` register themselves on `app`.
from pipeline.cli import database_exchange, database_questions  # noqa: E402, F401
