"""`relaxtune db artifacts`: compiled modules, how they validated and how fast they ran."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from relaxtune.pipeline.cli.db.common import TableOptions, app, find_job, minute, require_known
from relaxtune.pipeline.cli.groups import takes_groups

if TYPE_CHECKING:
    from relaxtune.tuning_db.questions.artifacts import ValidationSummary

_KEY_DIGITS = 12


@app.command()
@takes_groups()
def artifacts(
    table: TableOptions,
    model: Annotated[str | None, typer.Option(help="Only artifacts of this model.")] = None,
    job: Annotated[str | None, typer.Option(help="Only artifacts of this job.")] = None,
) -> None:
    """List the recorded artifacts, the newest first, with validation and latency."""
    from relaxtune.tuning_db.questions import artifacts as queries

    with table.open() as database:
        require_known(database, model=model)
        job = job and find_job(database, job)
        found = queries.artifacts(database, model=model, job_id=job, limit=table.limit)
    columns = {
        "artifact": lambda one: one.key[:_KEY_DIGITS],
        "model": lambda one: one.model,
        "arch": lambda one: one.arch,
        "validated": lambda one: "never" if one.validation is None else _verdict(one.validation),
        "median ms": lambda one: ", ".join(f"{arm.arm} {arm.latency_us / 1e3:.3f}" for arm in one.benchmarks),
        "written to": lambda one: one.location,
        "made (UTC)": lambda one: minute(one.created_at),
    }
    table.emit("artifacts", found, columns, asdict)


def _verdict(last: ValidationSummary) -> str:
    error = "not finite" if last.max_abs is None else f"{last.max_abs:.2g}"
    return f"{'passed' if last.passed else 'FAILED'}, max abs {error}"
