"""Imports, compiles, compares and validates cells while others are tuned, in a process here or on a node."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from relaxtune.pipeline.tuning.ray.node_side import PackedWork

if TYPE_CHECKING:
    from relaxtune.pipeline.batch.cells import Cell
    from relaxtune.pipeline.batch.finishing import FinishRequest, ReadyCell
    from relaxtune.pipeline.prepare import PreparedModel

WORKER_MODULE = "relaxtune.pipeline.batch.worker"

#: Cores for each worker, which imports and compiles while other processes build.
CORES_EACH = 2
# Models are kept for their cells' end while so much of the machine's memory is left.
_MEMORY_LEFT = 0.5


@dataclass(frozen=True)
class PrepareWork:
    """A cell to import and lower; the answer is its `CellTasks` with what its tasks begin with, or its `CellFault`.

    Its model is kept.
    """

    cell: Cell


@dataclass(frozen=True)
class LookWork:
    """Cells of one model in one shape to import and lower, for their tasks alone: an answer for each."""

    cells: tuple[Cell, ...]

    @property
    def cell(self) -> Cell:
        """The first."""
        return self.cells[0]


@dataclass(frozen=True)
class AheadWork:
    """An imported cell, to build and keep its parts that tuning does not change. The answer is whether it did."""

    cell: Cell
    samples: int


@dataclass(frozen=True)
class FinishWork:
    """A cell to finish; the answer is a `FinishedCell`.

    `locks` and `device` name the lock to hold while something is timed; None where nothing else is.
    """

    request: FinishRequest
    locks: Path | None = None
    device: str = ""

    @property
    def cell(self) -> Cell:
        """The cell."""
        return self.request.cell


Work = PrepareWork | LookWork | AheadWork | FinishWork


def start() -> Callable[[object], object]:
    """Do the slow imports, and return what answers a request."""
    import tvm

    # Kept out while TVM was imported (`child.leave_out_torch`); SciPy takes the mark for the real one.
    if sys.modules.get("torch", tvm) is None:
        del sys.modules["torch"]
    from relaxtune.pipeline.batch import finishing  # noqa: F401

    return CellWorker().answer


class CellWorker:
    """Works on cells, one request at a time; keeps the model of a cell that it imported until it has finished it."""

    def __init__(self) -> None:
        self._ready: dict[str, ReadyCell] = {}

    def answer(self, request: object) -> object:
        """Answer a request, in this process."""
        from relaxtune.pipeline.batch.finishing import FinishedCell, finish_cell
        from relaxtune.pipeline.batch.tasks import CellTasks, prepare_alike, prepare_cell
        from relaxtune.pipeline.jobs.compile_and_tune import make_beforehand
        from relaxtune.pipeline.tuning.measure.device_lock import lock_of
        from relaxtune.tuning_db.cell_states import CellState
        from relaxtune.tuning_db.store import TuningDatabase

        if isinstance(request, PackedWork):
            work = pickle.loads(request.work)
            if isinstance(work, FinishWork):
                work = replace(work, locks=request.locks, device=request.device)
            found = self.answer(work)
            if isinstance(found, FinishedCell) and found.state is CellState.FAILED:
                where = f"on {os.uname().nodename}: "
                found = replace(found, facts=replace(found.facts, error=where + (found.facts.error or "")))
            if not request.keep:
                self._ready.clear()
            return pickle.dumps(found)
        if isinstance(request, PrepareWork):
            tasks = prepare_cell(request.cell, partial(self._keep, request.cell))
            return tasks.with_starts() if isinstance(tasks, CellTasks) else tasks
        if isinstance(request, LookWork):
            return prepare_alike(request.cells)
        if isinstance(request, AheadWork):
            ready = self._ready.get(request.cell.name)
            if ready is None or memory_left() < _MEMORY_LEFT:
                self._ready.pop(request.cell.name, None)
                return False
            beforehand = make_beforehand(ready.prepared, request.samples, CORES_EACH)
            self._ready[request.cell.name] = replace(ready, beforehand=beforehand)
            return True
        if not isinstance(request, FinishWork):
            raise TypeError(f"expected work on a cell, got {type(request).__name__}")
        ready = self._ready.pop(request.cell.name, None)
        lock = nullcontext() if request.locks is None else closing(lock_of(request.locks, request.device))
        with TuningDatabase.open(request.request.database, create=False) as database, lock as held:
            return finish_cell(request.request, database, held, ready=ready)

    def _keep(self, cell: Cell, model: PreparedModel) -> None:
        from relaxtune.pipeline.batch.finishing import ReadyCell

        # Cells come faster than they are got ready: all models of a plan would fill the memory.
        if memory_left() >= _MEMORY_LEFT:
            self._ready[cell.name] = ReadyCell(model)


def memory_left() -> float:
    """Return the share of the machine's memory that is left."""
    memory = psutil.virtual_memory()
    return float(memory.available / memory.total)
