"""`relaxtune doctor`."""

from __future__ import annotations

from dataclasses import asdict

import typer

from relaxtune.pipeline.cli.options import FormatOption
from relaxtune.pipeline.cli.output import OutputFormat, TableView, emit
from relaxtune.pipeline.doctor import FindingStatus, run_checks


def doctor(output_format: FormatOption = OutputFormat.TABLE) -> None:
    """Say what is installed and found, from where, and what is missing. Exits 1 when something required is not ok."""
    findings = run_checks()
    rows = tuple(
        (finding.name, finding.status.value, finding.found, finding.source, finding.fix) for finding in findings
    )
    emit(
        output_format,
        [asdict(finding) for finding in findings],
        TableView("relaxtune doctor", ("check", "status", "found", "where", "fix"), rows),
    )
    if any(finding.required and finding.status is not FindingStatus.OK for finding in findings):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Attach the command to `app`."""
    app.command()(doctor)
