"""`relaxtune cluster`: the nodes of a Ray cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from relaxtune.pipeline.cli.options import FormatOption
from relaxtune.pipeline.cli.output import OutputFormat, emit
from relaxtune.pipeline.printed_tables import TableView

app = typer.Typer(help="Look at a Ray cluster.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Look at a Ray cluster."""


@app.command()
def check(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Such as 10.0.0.1:6379, or auto on a node of it.")],
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """List what each node has and lacks, and other versions. Exits 1 if a node is not ready."""
    from relaxtune.pipeline.tuning.ray.cluster import check_cluster

    found = check_cluster(address)
    columns = {
        "node": lambda one: one.host,
        "CPUs": lambda one: one.cpus,
        "measures on": lambda one: ", ".join(one.devices) or None,
        "status": lambda one: "ok" if one.ok else "NOT OK",
        "what to do": lambda one: "; ".join(one.faults) or None,
    }
    emit(output_format, [asdict(one) for one in found], TableView.of(f"cluster {address}", found, columns))
    if not all(one.ok for one in found):
        raise typer.Exit(1)
