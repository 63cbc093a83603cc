"""The states of a batch's cells: written to the database, reported as events, and read again in case others cancel."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence

from relaxtune.pipeline.batch.cells import Cell
from relaxtune.pipeline.batch.events import CandidateEvent, CellEvent, OnEvent
from relaxtune.pipeline.batch.tasks import CellTasks
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.tuning_db.batches import beat, list_cells, move_cell
from relaxtune.tuning_db.cell_states import NO_FACTS, BatchHeldError, CellFacts, CellState, TransitionError
from relaxtune.tuning_db.errors import DatabaseBusyError, DatabaseLostError, TuningDatabaseError
from relaxtune.tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

#: A target's architecture and a workload's hash: several targets may be tuned at the same time.
TaskOn = tuple[str, str]
#: Seconds between two heartbeats, in which others' wishes to cancel are read too.
BEAT_S = 5.0


class Board:
    """Moves cells from state to state. A context manager: while it is entered, a heartbeat says that we are at work.

    `cells` has each cell by name, and its state. Another driver that takes the batch requests `stop`, and so does the
    first cell not accepted with `fail_fast`.
    """

    def __init__(
        self,
        database: TuningDatabase,
        batch_id: str,
        cells: Mapping[str, tuple[Cell, CellState, CellFacts]],
        stop: StopSignal,
        on_event: OnEvent,
        *,
        fail_fast: bool,
    ) -> None:
        self.stop = stop
        self.failed_first: str | None = None
        self._database = database
        self._batch_id = batch_id
        self._events = {name: CellEvent(cell, state, facts) for name, (cell, state, facts) in cells.items()}
        self._on_event = on_event
        self._fail_fast = fail_fast
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="relaxtune-heartbeat", daemon=True)
        self.lost: BatchHeldError | None = None
        # Weights of the tasks of each cell, the cells of each task, and the best microseconds known of it.
        self._weights: dict[str, dict[TaskOn, int]] = {}
        self._cells_with: defaultdict[TaskOn, list[str]] = defaultdict(list)
        self._best_us: dict[TaskOn, float] = {}

    def __enter__(self) -> Board:
        """Start the heartbeat."""
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the heartbeat."""
        self._over.set()
        self._heart.join()

    def state(self, cell: Cell) -> CellState:
        """Return the state of a cell, as this driver knows it."""
        return self._events[cell.name].state

    def events(self) -> Sequence[CellEvent]:
        """Return the newest event of each cell, in the plan's order."""
        return tuple(self._events.values())

    def move(self, cell: Cell, state: CellState, facts: CellFacts = NO_FACTS, note: str = "") -> bool:
        """Let a cell become what comes next; return False for one that was cancelled meanwhile."""
        try:
            move_cell(self._database, self._batch_id, cell.name, state, facts)
        except TransitionError as e:
            if e.state is not CellState.CANCELLED:
                raise
            self.report(CellEvent(cell, CellState.CANCELLED, CellFacts(error="cancelled")))
            return False
        self.report(CellEvent(cell, state, facts, note))
        return True

    def arrived(self, one: CellTasks) -> None:
        """Note the tasks of a cell, for how fast its kernels are."""
        with self._lock:
            weights = {(one.target.arch, task.workload_hash): task.weight for task in one.tasks}
            self._weights[one.cell.name] = weights
            for key in weights:
                self._cells_with[key].append(one.cell.name)

    def improved(self, arch: str, workload_hash: str, best_us: float) -> None:
        """Note the best latency of a task on a target, its fallback's included."""
        with self._lock:
            self._best_us[arch, workload_hash] = best_us

    def measured(self, arch: str, event: ProgressEvent) -> None:
        """Tell of a candidate of a target."""
        kernels_ms = {}
        with self._lock:
            for name in self._cells_with.get((arch, event.workload_hash), ()):
                weights = self._weights[name]
                if weights.keys() <= self._best_us.keys():
                    kernels_ms[name] = sum(weight * self._best_us[task] for task, weight in weights.items()) / 1e3
            self._on_event(CandidateEvent(event, kernels_ms))

    def report(self, event: CellEvent) -> None:
        """Report the state of a cell, which is in the database already."""
        with self._lock:
            known = self._events[event.cell.name]
            if known.state is event.state and event.facts.error in (None, known.facts.error):
                return
            self._events[event.cell.name] = event
            self._on_event(event)
            bad = event.state.over and event.state not in (CellState.DONE, CellState.CANCELLED)
            if bad and self._fail_fast and self.failed_first is None:
                self.failed_first = f"--fail-fast: {event.cell.name} is {event.state.value}"
                self.stop.request()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            # The border of a thread: a database that is away for a while must not end the run.
            try:
                beat(self._database, self._batch_id)
                for row in list_cells(self._database, self._batch_id):
                    if row.state is CellState.CANCELLED and row.spec.name in self._events:
                        self.report(CellEvent(self._events[row.spec.name].cell, row.state, row.facts))
            except BatchHeldError as e:
                self.lost = e
                self.stop.request()
                return
            except (DatabaseBusyError, DatabaseLostError) as e:
                logger.warning("no heartbeat: %s", e)
            except TuningDatabaseError:
                logger.exception("no heartbeat any more")
                return
