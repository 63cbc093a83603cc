"""`batch plan` lowers a cell once, until something changes that its tasks follow from."""

from __future__ import annotations

import json
import os
import time
from dataclasses import fields, replace
from pathlib import Path

import onnx
import pytest

from relaxtune.pipeline.batch import prediction, tasks, unchanged
from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.plan import parse_plan
from relaxtune.pipeline.batch.prediction import lower_cells, prepare_cells, preview
from relaxtune.pipeline.batch.tasks import CellFault, CellTasks, LoweredCell, prepare_alike, prepare_cell
from relaxtune.pipeline.batch.unchanged import NOT_OF_ARTIFACTS, LoweredBefore
from relaxtune.pipeline.prepare import Imported, ModelRequest, import_request
from relaxtune.pipeline.tasks.task import TaskFacts
from relaxtune.pipeline.tuning.ray.facts import hash_of_code
from tests.pipeline.batch.plan_cases import dense

PLAN = """
[defaults]
targets = ["llvm", "cuda:sm_90a"]
precisions = ["graph", "fp16"]
[[cells]]
models = ["one.onnx"]
shapes = ["x=4x32"]
"""


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    onnx.save(dense(), tmp_path / "one.onnx")
    return list(list_cells(parse_plan(tmp_path / "plan.toml", PLAN)))


@pytest.fixture
def kept(tmp_path: Path) -> LoweredBefore:
    return LoweredBefore(tmp_path / "kept")


def facts(one: LoweredCell | CellFault) -> tuple[object, ...]:
    assert isinstance(one, LoweredCell)
    names = [field.name for field in fields(TaskFacts)]
    found = [[getattr(task, name) for name in names] for task in one.tasks]
    return one.cell, one.model, one.model_sha256, str(one.target), one.environment, one.note, found


def test_what_was_lowered_is_read_back_as_it_was(
    cells: list[Cell], kept: LoweredBefore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [facts(one) for one in lower_cells(cells, kept)]
    assert [bool(one[5]) for one in first] == [False, True, False, True]
    assert all(one[6] for one in first)
    monkeypatch.setattr(tasks, "prepare_model", None)
    assert [facts(one) for one in lower_cells(cells, kept)] == first
    # A name, an importance and a limit change nothing that is lowered.
    (other,) = lower_cells([replace(cells[0], name="other", importance=3)], kept)
    assert facts(other)[1:] == first[0][1:]


def test_a_plan_that_is_interrupted_keeps_what_it_came_to(
    cells: list[Cell], kept: LoweredBefore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [replace(cell, name=f"other {cell.name}", shape="x=8x32") for cell in cells]

    def interrupted(group: list[Cell]) -> list[CellTasks | CellFault]:
        if group == other:
            raise KeyboardInterrupt
        return prepare_alike(group)

    monkeypatch.setattr(prediction, "_CELLS_EACH", 100)
    monkeypatch.setattr(prediction, "prepare_alike", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lower_cells([*cells, *other], kept)
    assert [kept.find(cell) is not None for cell in (*cells, *other)] == [True] * 4 + [False] * 4


def test_precisions_and_targets_share_an_import_and_have_the_tasks_of_their_own(
    cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [facts(prepare_cell(cell)) for cell in cells]
    imports: list[ModelRequest] = []

    def counted(request: ModelRequest) -> Imported:
        imports.append(request)
        return import_request(request)

    monkeypatch.setattr(tasks, "import_request", counted)
    assert [facts(one) for one in prepare_cells(cells)] == alone
    assert len(imports) == 1
    assert len({str(one[6]) for one in alone}) == 4


@pytest.mark.parametrize("change", ["weights", "shape", "seed", "target", "code"])
def test_a_cell_is_lowered_again_when_something_changed(
    change: str, cells: list[Cell], kept: LoweredBefore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cells[0]
    lower_cells([cell], kept)
    assert kept.find(cell) is not None
    if change == "weights":
        onnx.save(dense(seed=1), tmp_path / "one.onnx")
        os.utime(tmp_path / "one.onnx", (1, 1))
    elif change == "code":
        monkeypatch.setattr(unchanged, "code_key", lambda: "another version")
    else:
        changed = {"shape": replace(cell, shape="x=8x32"), "target": replace(cell, target="cuda:sm_80")}
        cell = {**changed, "seed": replace(cell, seed=1)}[change]
    assert kept.find(cell) is None


def test_a_file_that_cannot_be_read_is_left_aside(
    cells: list[Cell], kept: LoweredBefore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (first,) = lower_cells(cells[:1], kept)
    (path,) = (tmp_path / "kept").iterdir()
    path.write_text(json.dumps({"model": "one"}))
    (again,) = lower_cells(cells[:1], kept)
    assert facts(again) == facts(first)
    assert f"{cells[0].name} is lowered again" in caplog.text


def test_a_file_that_no_plan_asks_for_is_removed(cells: list[Cell], kept: LoweredBefore, tmp_path: Path) -> None:
    lower_cells(cells[:2], kept)
    month_ago = time.time() - 31 * 86_400
    for path in (tmp_path / "kept").iterdir():
        os.utime(path, (month_ago, month_ago))
    lower_cells(cells[1:3], kept)
    assert [kept.find(cell) is not None for cell in cells[:3]] == [False, True, True]


def test_a_place_that_cannot_be_written_costs_only_time(
    cells: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(prediction, "cache_folder", lambda name: tmp_path / "file" / name)
    plan = parse_plan(tmp_path / "plan.toml", PLAN)
    assert [len(one.tasks) > 0 for one in preview(plan).cells if isinstance(one, LoweredCell)] == [True] * 4
    assert "cannot be kept for the next `batch plan`" in caplog.text


def test_pages_and_commands_are_no_part_of_the_code_that_makes_artifacts(tmp_path: Path) -> None:
    files = [tmp_path / "pipeline" / name for name in ("jobs.py", "dashboard/pages.py", "cli/app.py", "clip.py")]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a = 1")
    before, changes = hash_of_code(tmp_path, but=NOT_OF_ARTIFACTS), []
    for path in files:
        path.write_text("a = 2")
        changes.append(hash_of_code(tmp_path, but=NOT_OF_ARTIFACTS) != before)
        path.write_text("a = 1")
    assert changes == [True, False, False, True]
