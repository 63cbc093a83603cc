"""Cells between import and finish: which tasks are tuned for them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.feed import CellFeed
from relaxtune.pipeline.batch.plan import parse_plan
from relaxtune.pipeline.batch.tasks import CellTasks
from relaxtune.pipeline.batch.worker import FinishWork, PrepareWork, Work
from relaxtune.pipeline.batch.workers import CellWorkers
from relaxtune.tuning_db.cell_states import NO_FACTS, CellFacts, CellState
from tests.pipeline.tuning.tuning_cases import Place, matmul_task

PLAN = """
[defaults]
targets = ["llvm"]
[[cells]]
models = ["bert-tiny"]
[[cells]]
models = ["gpt2-tiny"]
"""


class Board:
    """Keeps states, as a database would."""

    def __init__(self) -> None:
        self.stop = SimpleNamespace(requested=False)
        self.states: dict[str, list[CellState]] = {}

    def state(self, cell: Cell) -> CellState:
        return self.states.get(cell.name, [CellState.QUEUED])[-1]

    def move(self, cell: Cell, state: CellState, facts: CellFacts = NO_FACTS) -> bool:
        self.states.setdefault(cell.name, []).append(state)
        return True

    def arrived(self, one: CellTasks) -> None:
        """Do nothing."""

    def improved(self, arch: str, workload_hash: str, best_us: float) -> None:
        """Do nothing."""


class Workers(CellWorkers):
    """Answers what a test says."""

    count = 2

    def __init__(self, found: dict[str, CellTasks]) -> None:
        self.found = found
        self.finishing: list[Future[object]] = []

    def submit(self, work: Work) -> Future[object]:
        future: Future[object] = Future()
        if isinstance(work, PrepareWork):
            future.set_result(self.found[work.cell.name])
        elif isinstance(work, FinishWork):
            self.finishing.append(future)
        return future

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def cells(place: Place) -> dict[str, CellTasks]:
    """A cell of two tasks, and one that has the second of them too."""
    first, second = matmul_task(16, 32, 32, "first"), replace(matmul_task(32, 32, 32, "second"), weight=2)
    whole, other = list_cells(parse_plan(Path("feed.toml"), PLAN.replace("gpt2-tiny", "llama-tiny")))
    made = {whole: (first, second), other: (second,)}
    return {
        cell.name: CellTasks(cell, cell.source, "", place.target, place.environment, tasks)
        for cell, tasks in made.items()
    }


def feed_of(cells: dict[str, CellTasks]) -> tuple[CellFeed, Board, Workers]:
    board, workers = Board(), Workers(cells)
    given = [one.cell for one in cells.values()]
    feed = CellFeed(given, board, None, workers, lambda cell: SimpleNamespace(samples=1), lambda cell, part: 8)  # type: ignore[arg-type]
    assert sum(arrival.trials or 0 for arrival in feed.take(idle=False)) == 16
    return feed, board, workers


def test_what_only_a_cancelled_cell_wanted_is_tuned_no_further(cells: dict[str, CellTasks]) -> None:
    feed, board, workers = feed_of(cells)
    (cancelled, _), (first, _) = cells, next(iter(cells.values())).tasks
    assert not any(arrival.dropped for arrival in feed.take(idle=False))
    board.states[cancelled].append(CellState.CANCELLED)
    (arrival,) = feed.take(idle=False)
    # The other cell wants the second task still.
    assert arrival.dropped == {first.workload_hash}
    assert not workers.finishing
