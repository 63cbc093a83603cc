"""`relaxtune db artifacts`: compiled modules, how they validated and how fast they ran."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from relaxtune.pipeline.cli.db.common import DEFAULT_LIMIT, DataFormatOption, LimitOption, app, open_for_reading
from relaxtune.pipeline.cli.options import DEFAULT_DATABASE, DatabaseOption
from relaxtune.pipeline.cli.output import DataFormat, TableView, emit

if TYPE_CHECKING:
    from relaxtune.tuning_db.questions.artifacts import ArtifactSummary

_KEY_DIGITS = 12


@app.command()
def artifacts(
    db: DatabaseOption = DEFAULT_DATABASE,
    model: Annotated[str | None, typer.Option("--model", help="Only modules of this model.")] = None,
    job: Annotated[str | None, typer.Option("--job", help="Only modules that this job made.")] = None,
    limit: LimitOption = DEFAULT_LIMIT,
    output_format: DataFormatOption = DataFormat.TABLE,
) -> None:
    """List the compiled modules, the newest first: how they validated and how fast they ran."""
    from relaxtune.tuning_db.questions import artifacts as queries

    with open_for_reading(db) as database:
        found = queries.artifacts(database, model=model, job_id=job, limit=limit)
    rows = tuple(
        (
            one.key[:_KEY_DIGITS],
            one.model,
            one.arch,
            _verdict(one),
            ", ".join(f"{arm.arm} {arm.latency_us / 1e3:.3f}" for arm in one.benchmarks),
            one.location,
            f"{one.created_at:%Y-%m-%d %H:%M}",
        )
        for one in found
    )
    columns = ("artifact", "model", "arch", "validated", "median ms", "written to", "made (UTC)")
    emit(output_format, [asdict(one) for one in found], TableView("artifacts", columns, rows))


def _verdict(artifact: ArtifactSummary) -> str:
    last = artifact.validation
    if last is None:
        return "never"
    error = "not finite" if last.max_abs is None else f"{last.max_abs:.2g}"
    return f"{'passed' if last.passed else 'FAILED'}, max abs {error}"
