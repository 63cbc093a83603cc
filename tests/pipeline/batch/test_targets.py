"""Several targets of one plan: at the same time where they are measured on different devices, else in turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from relaxtune.pipeline.batch import driver
from relaxtune.pipeline.batch.board import Board
from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.events import BatchEvent, CandidateEvent
from relaxtune.pipeline.batch.executors import LocalExecutors
from relaxtune.pipeline.batch.plan import Plan, parse_plan
from relaxtune.pipeline.batch.tasks import CellTasks
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.tuning_db.cell_states import NO_FACTS, CellState
from tests.pipeline.tuning.tuning_cases import Place, matmul_task

PLAN = 'effort = "quick"\n[[cells]]\nmodels = ["bert-tiny"]\ntargets = ["cuda:sm_90a", "cuda:sm_89", "llvm"]\n'


class Several(LocalExecutors):
    """Two devices; two targets share one of them."""

    def apart(self, targets: Sequence[ResolvedTarget]) -> list[list[int]]:
        assert [one.arch for one in targets][:2] == ["sm_90a", "sm_89"]
        return [[0, 2], [1]]


def plan_in(folder: Path) -> Plan:
    return parse_plan(folder / "several.toml", PLAN)


def test_targets_of_different_devices_are_worked_on_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, order = threading.Barrier(2), []

    def carry_out(plan, batch, target, group, every, *_) -> None:  # type: ignore[no-untyped-def]
        order.append(target.arch)
        if target.kind == "cuda":
            met.wait(60)

    monkeypatch.setattr(driver, "_carry_out", carry_out)
    monkeypatch.setattr(driver, "open_executors", lambda *_: closing(Several()))
    result = driver.run_batch(plan_in(tmp_path))
    assert sorted(order[:2]) == ["sm_89", "sm_90a"]
    assert order[2] == resolve_target("llvm").arch
    assert [one.state for one in result.cells] == [CellState.QUEUED] * 3


def test_an_error_of_one_target_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def carry_out(plan, batch, target, group, every, board, *_) -> None:  # type: ignore[no-untyped-def]
        if target.arch == "sm_89":
            raise PipelineError("the node is gone")
        stopped = threading.Event()
        while not board.stop.requested:
            stopped.wait(0.01)

    monkeypatch.setattr(driver, "_carry_out", carry_out)
    monkeypatch.setattr(driver, "open_executors", lambda *_: closing(Several()))
    with pytest.raises(PipelineError, match="the node is gone"):
        driver.run_batch(plan_in(tmp_path))


def test_one_machine_works_on_its_targets_in_turn() -> None:
    targets = [resolve_target("llvm"), resolve_target("cuda:sm_90a")]
    assert LocalExecutors().apart(targets) == [[0, 1]]


def test_a_kernel_of_two_targets_has_a_latency_on_each(place: Place, tmp_path: Path) -> None:
    task = replace(matmul_task(16, 32, 32), weight=2)
    cells = list_cells(plan_in(tmp_path))[:2]
    told: list[BatchEvent] = []
    known = {cell.name: (cell, CellState.TUNING, NO_FACTS) for cell in cells}
    board = Board(None, "", known, StopSignal(), told.append, fail_fast=False)  # type: ignore[arg-type]
    for cell, arch in zip(cells, ("sm_90a", "sm_89"), strict=True):
        board.arrived(tasks_of(cell, arch, place, task))
    board.improved("sm_90a", task.workload_hash, 100.0)
    board.improved("sm_89", task.workload_hash, 700.0)
    event = ProgressEvent(task.name, 1, 8, 1, 0, 700.0, None, task.workload_hash)
    board.measured("sm_89", event)
    assert [one.kernels_ms for one in told if isinstance(one, CandidateEvent)] == [{cells[1].name: 1.4}]


def tasks_of(cell: Cell, arch: str, place: Place, task) -> CellTasks:  # type: ignore[no-untyped-def]
    return CellTasks(cell, cell.source, "", resolve_target(f"cuda:{arch}"), place.environment, (task,))
