"""The process that imports, compiles, compares and validates cells beside the tuning of others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relaxtune.pipeline.batch.cells import Cell
    from relaxtune.pipeline.batch.finishing import FinishRequest

WORKER_MODULE = "relaxtune.pipeline.batch.worker"


@dataclass(frozen=True)
class PrepareWork:
    """A cell to import and lower; the answer is its `CellTasks`, with what its tasks begin with, or `CellFault`."""

    cell: Cell


@dataclass(frozen=True)
class FinishWork:
    """A cell to finish; the answer is a `FinishedCell`.

    `turns` and `device` name the lock to hold while something is timed; None where nothing else is.
    """

    request: FinishRequest
    turns: Path | None = None
    device: str = ""


Work = PrepareWork | FinishWork


def start() -> Callable[[object], object]:
    """Do the slow imports, and return what answers a request."""
    import tvm

    # Kept out while TVM was imported (`child.leave_out_torch`); SciPy takes the mark for the real one.
    if sys.modules.get("torch", tvm) is None:
        del sys.modules["torch"]
    from relaxtune.pipeline.batch import finishing  # noqa: F401

    return answer


def answer(request: object) -> object:
    """Do what is asked for, in this process."""
    from relaxtune.pipeline.batch.finishing import finish_cell
    from relaxtune.pipeline.batch.tasks import CellFault, prepare_cell
    from relaxtune.pipeline.errors import PipelineError
    from relaxtune.pipeline.tuning.measure.device_turn import turn_of
    from relaxtune.tuning_db.store import SqlDatabase

    if isinstance(request, PrepareWork):
        found = prepare_cell(request.cell)
        # Errors of some kinds do not survive the way to another process; their text does.
        return CellFault(found.cell, PipelineError(found.note)) if isinstance(found, CellFault) else found.with_starts()
    if not isinstance(request, FinishWork):
        raise TypeError(f"expected a cell to prepare or to finish, got {type(request).__name__}")
    turn = nullcontext() if request.turns is None else closing(turn_of(request.turns, request.device))
    with SqlDatabase.open(request.request.database, create=False) as database, turn as held:
        return finish_cell(request.request, database, held)
