"""A cell with a limit of its latency is finished as soon as its kernels promise to keep it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.early import EarlyCells
from relaxtune.pipeline.batch.feed import CellFeed
from relaxtune.pipeline.batch.finishing import FinishedCell
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
limits = { max_latency_ms = 1.0 }
[[cells]]
models = ["gpt2-tiny"]
"""


class Board:
    """Keeps states, as a database would."""

    def __init__(self) -> None:
        self.stop = SimpleNamespace(asked=False)
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
    """A limited cell of two tasks, and one that has the second of them too."""
    first, second = matmul_task(16, 32, 32, "first"), replace(matmul_task(32, 32, 32, "second"), weight=2)
    limited, other = list_cells(parse_plan(Path("early.toml"), PLAN.replace("gpt2-tiny", "llama-tiny")))
    made = {limited: (first, second), other: (second,)}
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


def test_a_cell_that_is_fast_enough_is_finished_and_leaves_the_rest_to_others(cells: dict[str, CellTasks]) -> None:
    feed, board, workers = feed_of(cells)
    (limited, _), (first, second) = cells, next(iter(cells.values())).tasks
    feed.improved(first.workload_hash, 300.0)
    feed.take(idle=False)
    feed.improved(second.workload_hash, 400.0)
    feed.take(idle=False)
    # 300 + 2 x 400 us: more than the kernels' part of a limit of 1 ms.
    assert not workers.finishing
    feed.improved(second.workload_hash, 200.0)
    # Its tasks are tuned on until it is accepted.
    assert not any(arrival.dropped for arrival in feed.take(idle=False))
    assert board.states[limited][-1] is CellState.COMPILING
    workers.finishing[0].set_result(FinishedCell(CellState.DONE, CellFacts(shipped_ms=0.9, validated=True)))
    feed.take(idle=False)
    (arrival,) = [one for one in feed.take(idle=False) if one.dropped] or feed.take(idle=False)
    assert board.states[limited][-1] is CellState.DONE
    # The other cell wants the second task still.
    assert arrival.dropped == {first.workload_hash}


def test_a_cell_that_was_tried_too_early_is_tuned_on(cells: dict[str, CellTasks]) -> None:
    feed, board, workers = feed_of(cells)
    (limited, _), (first, second) = cells, next(iter(cells.values())).tasks
    feed.improved(first.workload_hash, 200.0)
    feed.improved(second.workload_hash, 300.0)
    feed.take(idle=False)
    missed = FinishedCell(CellState.REJECTED, CellFacts(shipped_ms=1.6, validated=True, error="takes 1.6 ms"))
    workers.finishing[0].set_result(missed)
    feed.take(idle=False)
    assert board.states[limited][-4:] == [
        CellState.COMPILING, CellState.QUEUED, CellState.IMPORTING, CellState.TUNING,
    ]  # fmt: skip
    # Its kernels took half of its latency: now they must take less than half of the limit.
    feed.improved(first.workload_hash, 100.0)
    feed.take(idle=False)
    assert len(workers.finishing) == 1
    feed.improved(second.workload_hash, 150.0)
    feed.take(idle=False)
    assert len(workers.finishing) == 2
    # Nothing is left to tune, and nothing got faster: that is the end.
    feed.settled([first.workload_hash, second.workload_hash])
    workers.finishing[1].set_result(missed)
    feed.take(idle=False)
    assert board.states[limited][-1] is CellState.REJECTED


def test_a_cell_whose_kernels_got_faster_while_it_was_tried_is_finished_again(cells: dict[str, CellTasks]) -> None:
    feed, board, workers = feed_of(cells)
    (limited, _), (first, second) = cells, next(iter(cells.values())).tasks
    feed.improved(first.workload_hash, 200.0)
    feed.improved(second.workload_hash, 300.0)
    feed.take(idle=False)
    feed.improved(second.workload_hash, 100.0)
    feed.settled([first.workload_hash, second.workload_hash])
    missed = FinishedCell(CellState.REJECTED, CellFacts(shipped_ms=1.1, validated=True, error="takes 1.1 ms"))
    workers.finishing[0].set_result(missed)
    feed.take(idle=False)
    assert board.states[limited][-1] is CellState.COMPILING


def test_a_cell_waits_until_all_its_kernels_are_measured() -> None:
    early = EarlyCells()
    early.add("cell", 1.0, {"a": 1, "b": 1})
    early.improved("a", 1.0)
    assert early.take_promising({"cell"}) == []
    early.improved("b", 1.0)
    assert early.take_promising({"cell"}) == ["cell"]
    assert early.take_promising({"cell"}) == []
