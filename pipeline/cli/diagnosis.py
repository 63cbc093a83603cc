"""`relaxtune doctor`."""

from __future__ import annotations

from dataclasses import asdict

import typer

from relaxtune.pipeline.cli.doctor import FindingStatus, run_checks
from relaxtune.pipeline.cli.options import FormatOption
from relaxtune.pipeline.cli.output import OutputFormat, TableView, emit


def doctor(output_format: FormatOption = OutputFormat.TABLE) -> None:
    """Say what is installed and found, from where, and what is missing. Exits 1 when something required is not ok."""
    findings = run_checks()
    columns = {
        "check": lambda finding: finding.name,
        "status": lambda finding: finding.status.value,
        "found": lambda finding: finding.found,
        "where": lambda finding: finding.source,
        "fix": lambda finding: finding.fix,
    }
    emit(output_format, [asdict(one) for one in findings], TableView.of("relaxtune doctor", findings, columns))
    if any(finding.required and finding.status is not FindingStatus.OK for finding in findings):
        raise typer.Exit(1)
