"""`relaxtune report`: where a model's time goes, kernel by kernel."""

from __future__ import annotations

from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaxtune.pipeline.cli.db.common import open_for_reading
from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.cli.options import VerifyKeyOption, optional_database, require_signed
from relaxtune.pipeline.cli.output import print_json, print_table, stdout_console, write_text
from relaxtune.pipeline.errors import ArtifactError, UsageError
from relaxtune.pipeline.printable import short
from relaxtune.pipeline.printed_tables import TableView, first_of
from relaxtune.tuning_db.urls import DatabaseUrl

if TYPE_CHECKING:
    from collections.abc import Callable

    from relaxtune.pipeline.report.diff import KernelChange, ReportDiff
    from relaxtune.pipeline.report.report import Report


class ReportFormat(StrEnum):
    """How a report is written: a page into a file, the others to stdout."""

    HTML = "html"
    TABLE = "table"
    JSON = "json"


@takes_groups()
def report(
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Artifact directory.")] = None,
    db: Annotated[
        DatabaseUrl | None,
        optional_database("Tuning database with the artifact's records; without DIR, all its models are reported."),
    ] = None,
    out: Path | None = option(None, "The page. Default: DIR.html, or report.html.", metavar="FILE"),
    profile: bool | None = option(
        None,
        "Time every kernel of DIR on this machine's device. Default: only kernels without a recorded time.",
        "--profile/--no-profile",
    ),
    ceilings: Path | None = option(None, "JSON of the device's measured ceilings.", metavar="FILE"),
    diff: Path | None = option(None, "Another build of the model, to compare kernel by kernel.", metavar="OLD"),
    verify_key: VerifyKeyOption = None,
    output_format: ReportFormat = option(
        ReportFormat.HTML, "html goes to a file, table and json to stdout.", "--format"
    ),
) -> None:
    """Write a page about an artifact: time, share, rates, route and bottleneck of each kernel."""
    from relaxtune.pipeline.report.diff import diff_reports

    if directory is None and db is None:
        raise UsageError("nothing to report: name an artifact directory, a database with --db, or both")
    if directory is None and profile:
        raise UsageError("--profile runs the kernels of an artifact; name its directory")
    if directory is None and diff is not None:
        raise UsageError("--diff compares an artifact with OLD; name its directory, too")
    if out is not None and output_format is not ReportFormat.HTML:
        raise UsageError(f"--out is where the html page goes; --format {output_format.value} goes to stdout")
    if directory is not None:
        require_signed(verify_key, directory, *([] if diff is None else [diff]))
    reports = _reports(directory, db, ceilings, profile=profile)
    found = None if diff is None else diff_reports(_reports(diff, db, ceilings, profile=profile)[0], reports[0])
    if output_format is ReportFormat.HTML:
        from relaxtune.pipeline.report.page import render_page

        place = Path("report") if directory is None else directory.resolve()
        write_page(render_page(reports, found), out or place.with_name(f"{place.name}.html"))
    elif output_format is ReportFormat.JSON:
        data = [one.to_json() for one in reports]
        print_json({**data[0], **({} if found is None else {"diff": found.to_json()})} if directory else data)
    else:
        for each in () if found is None else (found, *found.buckets):
            _print_diff(each)
        for report_of_all in reports:
            for one in (report_of_all, *report_of_all.buckets):
                _print_tables(one)


def _reports(
    directory: Path | None, db: DatabaseUrl | None, ceilings_file: Path | None, *, profile: bool | None
) -> list[Report]:
    from relaxtune.pipeline.artifact.directory import load_manifest
    from relaxtune.pipeline.report.ceilings import measure_cpu_ceilings, read_ceilings
    from relaxtune.pipeline.report.report import report_artifact, report_database

    ceilings = read_ceilings(ceilings_file) if ceilings_file is not None else None
    if directory is None:
        assert db is not None
        with open_for_reading(db) as database:
            return list(report_database(database, ceilings=ceilings))
    measured = None
    if _lacks_times(directory) if profile is None else profile:
        from relaxtune.pipeline.report.profile import profile_artifact  # it needs TVM

        measured = profile_artifact(directory)
    if measured is not None and ceilings is None and load_manifest(directory).target.kind == "llvm":
        ceilings = measure_cpu_ceilings()
    with nullcontext() if db is None else open_for_reading(db) as database:
        return [report_artifact(directory, database=database, profile=measured, ceilings=ceilings)]


def _lacks_times(directory: Path) -> bool:
    """Whether no kernel of an artifact has a time by its record, and its device is here: untuned kernels ship."""
    from relaxtune.pipeline.artifact.device_choice import device_for
    from relaxtune.pipeline.artifact.directory import load_manifest

    manifest = load_manifest(directory)
    if any(kernel.latency_us is not None for kernel in manifest.kernels):
        return False
    try:
        device_for(manifest, None, directory)
    except ArtifactError:
        return False
    return True


def write_page(text: str, path: Path) -> None:
    """Write a page whole or not at all, and print where it is."""
    write_text(path, text, "--out")
    stdout_console().print(str(path), soft_wrap=True)


def _print_diff(diff: ReportDiff) -> None:
    from relaxtune.pipeline.pages.render import number

    columns: dict[str, Callable[[KernelChange], object]] = {
        "kernel": lambda one: first_of([short(row.name) for row in one.before]),
        "now": lambda one: first_of([short(row.name) for row in one.after]),
        "change": lambda one: one.what,
        "us before": lambda one: number(one.before_us) if one.before else None,
        "us after": lambda one: number(one.after_us) if one.after else None,
        "difference": lambda one: number(one.difference_us),
        "times": lambda one: None if one.times is None else f"{one.times:.2f}",
    }
    print_table(TableView.of(f"{diff.before.source} before, {diff.after.source} after", diff.changes, columns))
    for note in diff.notes:
        stdout_console().print(note, soft_wrap=True)


def _print_tables(report: Report) -> None:
    from relaxtune.pipeline.pages.render import number, percent

    columns = {
        "kernel": lambda row: short(row.name),
        "route": lambda row: row.route,
        "calls": lambda row: row.calls,
        "us": lambda row: number(row.time_us),
        "share": lambda row: percent(row.share),
        "TFLOP/s": lambda row: number(row.flops_per_s, 1e12),
        "of peak FLOP/s": lambda row: percent(row.compute_use),
        "GB/s": lambda row: number(row.bytes_per_s, 1e9),
        "of peak GB/s": lambda row: percent(row.bandwidth_use),
        "bottleneck": lambda row: row.bottleneck,
        "ONNX nodes": lambda row: first_of(row.onnx_nodes),
    }
    time = f"{report.kernels_us / 1e3:.3f} ms in " if report.kernels_us else "no times of "
    title = f"{report.model}, {report.source}, {report.target}: {time}{report.launches} kernel calls"
    optional = ("ONNX nodes", "GB/s", "TFLOP/s", "route", "of peak GB/s", "of peak FLOP/s")
    print_table(TableView.of(title, report.kernels, columns, optional=optional))
    for note in report.notes:
        stdout_console().print(note, soft_wrap=True)
