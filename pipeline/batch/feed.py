"""The cells of one target on their way: imported, given to the tuning, finished when their tasks are settled.

::

    waiting ── import ──▶ arrived ── its tasks settled ──▶ settled ── compile, compare, validate ──▶ over

On a GPU other processes import and finish (`workers`), while tasks of other cells are built and measured; they hold the
device's lock while they time something. Parts of an artifact that tuning does not change are built while the cell is
tuned. On a CPU measuring must be alone: the tuning thread itself imports all cells first, and finishes one at moments
in which nothing is built or measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

from relaxtune.pipeline.batch.board import Board
from relaxtune.pipeline.batch.cells import Cell
from relaxtune.pipeline.batch.events import CellEvent
from relaxtune.pipeline.batch.finishing import FinishedCell, FinishRequest, error_text, finish_cell
from relaxtune.pipeline.batch.tasks import CellFault, CellTasks, prepare_cell, weighted
from relaxtune.pipeline.batch.worker import AheadWork, FinishWork, PrepareWork
from relaxtune.pipeline.batch.workers import CellWorkers
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tuning.admission import Arrival
from relaxtune.tuning_db.cell_states import CellFacts, CellState
from relaxtune.tuning_db.store import TuningDatabase

# Returns how many candidates a cell brings, of its tasks the part that no cell before it has; None is no limit.
TrialsOf = Callable[[Cell, float], int | None]


class CellFeed:
    """A `TaskFeed` of cells.

    `workers` import and finish cells while others are tuned; None leaves that to the tuning thread. `request_of`
    returns the request to finish a cell, once its tasks are settled.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        board: Board,
        database: TuningDatabase,
        workers: CellWorkers | None,
        request_of: Callable[[Cell], FinishRequest],
        trials_of: TrialsOf,
    ) -> None:
        self._board = board
        self._database = database
        self._workers = workers
        self._request_of = request_of
        self._trials_of = trials_of
        self._waiting = deque(cells)
        self._importing: dict[Future[object], Cell] = {}
        self._tuning: dict[str, tuple[Cell, set[str]]] = {}
        self._settled_cells: deque[Cell] = deque()
        self._finishing: dict[Future[object], Cell] = {}
        self._settled: set[str] = set()
        self._seen: set[str] = set()
        self._hashes: dict[str, frozenset[str]] = {}
        # Of the target, known with its first cell.
        self._arch = ""

    @property
    def arriving(self) -> bool:
        """Whether cells are still to be imported."""
        return bool(self._waiting or self._importing) and not self._board.stop.requested

    def take(self, *, idle: bool) -> Sequence[Arrival]:
        """Return the tasks of cells that were imported, and let others go on."""
        if self._board.stop.requested:
            return ()
        dropped = self._drop_over()
        arrivals = [Arrival(dropped=dropped)] if dropped else []
        if self._workers is not None:
            return [*arrivals, *self._take_imported(self._workers)]
        if idle and self._waiting:
            cell = self._waiting.popleft()
            return [*arrivals, self._arrival(cell, prepare_cell(cell) if self._begin(cell) else None)]
        if idle and self._settled_cells:
            self._finish_here(self._settled_cells.popleft())
            return [*arrivals, Arrival()]
        return arrivals

    def settled(self, workload_hashes: Sequence[str]) -> None:
        """Let cells whose tasks are all settled go on to be finished."""
        self._settled |= set(workload_hashes)
        for name, (cell, open_ones) in list(self._tuning.items()):
            open_ones -= self._settled
            if not open_ones:
                del self._tuning[name]
                self._settle(cell)

    def improved(self, workload_hash: str, best_us: float) -> None:
        """Show how fast a task is."""
        self._board.improved(self._arch, workload_hash, best_us)

    def wait(self, seconds: float) -> None:
        """Wait for the next import."""
        if self._importing:
            wait(self._importing, seconds, FIRST_COMPLETED)

    def finish_rest(self) -> None:
        """Finish all cells, also those that the tuning never got to; a run that was stopped leaves them queued."""
        left = [*(cell for cell, _ in self._tuning.values()), *self._importing.values(), *self._waiting]
        self._tuning, self._waiting = {}, deque()
        for future in self._importing:
            future.cancel()
        self._importing = {}
        for cell in left:
            if not self._board.stop.requested and self._begin(cell) and self._board.move(cell, CellState.TUNING):
                self._settle(cell)
        while self._settled_cells and not self._board.stop.requested:
            self._finish_here(self._settled_cells.popleft())
        while self._finishing and not self._board.stop.requested:
            wait(self._finishing, 0.5, FIRST_COMPLETED)
            self._take_finished()

    def fail_rest(self, error: Exception) -> None:
        """Let all cells that are not over fail."""
        left = [*(cell for cell, _ in self._tuning.values()), *self._importing.values(), *self._waiting]
        for cell in [*left, *self._settled_cells, *self._finishing.values()]:
            self._board.move(cell, CellState.FAILED, CellFacts(error=error_text(error)))

    def _begin(self, cell: Cell) -> bool:
        state = self._board.state(cell)
        return not state.over and (state is not CellState.QUEUED or self._board.move(cell, CellState.IMPORTING))

    def _take_imported(self, workers: CellWorkers) -> list[Arrival]:
        self._take_finished()
        while self._waiting and len(self._importing) < workers.count:
            cell = self._waiting.popleft()
            if self._begin(cell):
                self._importing[workers.submit(PrepareWork(cell))] = cell
        arrivals = []
        for future in [one for one in self._importing if one.done()]:
            cell = self._importing.pop(future)
            error = future.exception()
            found = CellFault(cell, last_line(error)) if isinstance(error, Exception) else future.result()
            if isinstance(found, CellTasks | CellFault):
                arrivals.append(self._arrival(cell, found))
        return arrivals

    def _take_finished(self) -> None:
        for future in [one for one in self._finishing if one.done()]:
            cell = self._finishing.pop(future)
            error = future.exception()
            if isinstance(error, Exception):
                self._board.move(cell, CellState.FAILED, CellFacts(error=last_line(error)))
                continue
            found = future.result()
            if isinstance(found, FinishedCell):
                self._over(cell, _seen(found))

    def _arrival(self, cell: Cell, found: CellTasks | CellFault | None) -> Arrival:
        """Return the tasks of an imported cell; none of one that failed or was cancelled."""
        # The executors know whether the target can be measured: this process may have no such device.
        if isinstance(found, CellFault):
            self._board.move(cell, CellState.FAILED, CellFacts(error=found.note))
        elif found is not None and self._board.move(cell, CellState.TUNING):
            self._board.arrived(found)
            self._arch = found.target.arch
            hashes = frozenset(task.workload_hash for task in found.tasks)
            part = len(hashes - self._seen) / max(1, len(hashes))
            self._seen |= hashes
            self._hashes[cell.name] = hashes
            # The run tells again of those that it has.
            self._settled -= hashes
            if hashes:
                self._tuning[cell.name] = (cell, set(hashes))
                if self._workers is not None:
                    # Its errors come again when the cell is finished.
                    self._workers.submit(AheadWork(cell, self._request_of(cell).samples))
            else:
                self._settle(cell)
            tasks = tuple(weighted(task, cell) for task in found.tasks)
            return Arrival(tasks, self._trials_of(cell, part), starts=found.starts)
        # The budget of a cell that failed goes to the others.
        return Arrival(trials=self._trials_of(cell, 0.0))

    def _drop_over(self) -> frozenset[str]:
        """Leave cells that were cancelled; return the tasks that only they had."""
        gone = [name for name, (cell, _) in self._tuning.items() if self._board.state(cell).over]
        dropped = {task for name in gone for task in self._hashes.pop(name)}
        for name in gone:
            del self._tuning[name]
        wanted = {task for name in self._tuning for task in self._hashes[name]} if dropped else set()
        return frozenset(dropped - wanted)

    def _settle(self, cell: Cell) -> None:
        if self._workers is None:
            self._settled_cells.append(cell)
        elif self._board.move(cell, CellState.COMPILING):
            self._finishing[self._workers.submit(FinishWork(self._request_of(cell)))] = cell

    def _finish_here(self, cell: Cell) -> None:
        if self._board.move(cell, CellState.COMPILING):
            validating = partial(self._board.report, CellEvent(cell, CellState.VALIDATING))
            self._over(cell, finish_cell(self._request_of(cell), self._database, on_validating=validating))

    def _over(self, cell: Cell, found: FinishedCell) -> None:
        if found.state is CellState.CANCELLED:
            self._board.report(CellEvent(cell, found.state, found.facts))
            return
        self._board.move(cell, found.state, found.facts)


def _seen(found: FinishedCell) -> FinishedCell:
    artifact = found.facts.artifact
    if artifact is None or Path(artifact).is_dir():
        return found
    why = f"{artifact} was written on another node; put the plan's folder `out` on a file system that all nodes share"
    return FinishedCell(CellState.FAILED, replace(found.facts, error=why, artifact=None))
