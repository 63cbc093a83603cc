"""`relaxtune db batches`: the batches, their cells, and every attempt at one."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from relaxtune.pipeline.cli.db.common import TableOptions, app, minute
from relaxtune.pipeline.cli.groups import takes_groups

if TYPE_CHECKING:
    from relaxtune.tuning_db.cell_states import Attempt, Batch, BatchCell


@app.command()
@takes_groups()
def batches(
    table: TableOptions,
    batch: Annotated[
        str | None,
        typer.Argument(metavar="[BATCH]", help="Name of a batch, or the start of its id: list its attempts."),
    ] = None,
) -> None:
    """List the batches, the newest first, or all attempts at the cells of a batch."""
    from relaxtune.tuning_db import batches as stored

    with table.open() as database:
        if batch is not None:
            found = stored.get_batch(database, batch)
            _print_attempts(found, stored.list_attempts(database, found.id)[: table.limit], table)
            return
        listed = stored.list_batches(database, limit=table.limit)
        states = {one.id: Counter(cell.state.value for cell in stored.list_cells(database, one.id)) for one in listed}
    columns = {
        "batch": lambda one: one.id[:8],
        "name": lambda one: one.name,
        "started (UTC)": lambda one: minute(one.started_at),
        "host": lambda one: one.driver.host,
        "process": lambda one: one.driver.pid,
        "cells": lambda one: ", ".join(f"{count} {state}" for state, count in states[one.id].items()),
        "outcome": lambda one: one.outcome or ("going on" if one.held else "its driver is gone"),
    }
    table.emit("batches", listed, columns, lambda one: {**batch_data(one), "cells": dict(states[one.id])})


def _print_attempts(batch: Batch, attempts: list[Attempt], table: TableOptions) -> None:
    columns = {
        "cell": lambda one: one.cell,
        "attempt": lambda one: one.number,
        "host": lambda one: one.driver.host,
        "process": lambda one: one.driver.pid,
        "started (UTC)": lambda one: minute(one.started_at),
        "seconds": lambda one: one.finished_at and f"{(one.finished_at - one.started_at).total_seconds():.0f}",
        "state": lambda one: one.state.value,
        "error": lambda one: one.error,
    }
    table.emit(f"attempts of {batch.name} ({batch.id[:8]})", attempts, columns, asdict)


def batch_data(batch: Batch) -> dict[str, object]:
    """Return a batch as plain data."""
    driver = asdict(batch.driver)
    return {
        "batch": batch.id,
        "name": batch.name,
        "path": batch.path,
        **driver,
        "held": batch.held,
        "heartbeat_at": batch.heartbeat_at,
        "started_at": batch.started_at,
        "finished_at": batch.finished_at,
        "outcome": batch.outcome,
    }


def cell_data(cell: BatchCell) -> dict[str, object]:
    """Return a cell as plain data."""
    spec, facts = asdict(cell.spec), asdict(cell.facts)
    return {
        "cell": spec.pop("name"),
        "status": cell.state.value,
        "dead": cell.dead,
        "attempts": cell.attempts,
        "updated_at": cell.updated_at,
        **facts,
        **spec,
    }
