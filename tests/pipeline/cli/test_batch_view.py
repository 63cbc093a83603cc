"""What a batch shows while it goes on, and in the end."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.events import CandidateEvent, CellEvent
from relaxtune.pipeline.batch.plan import parse_plan
from relaxtune.pipeline.cli import batch_view
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.cli.batch_view import BatchView, final_table
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.tuning_db.cell_states import CellFacts, CellState

PLAN = '[[cells]]\nmodels = ["bert-tiny", "gpt2-tiny"]\ntargets = ["llvm"]\n'


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    return list(list_cells(parse_plan(tmp_path / "small.toml", PLAN)))


def shown(view: BatchView) -> str:
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(view._render())
    return console.export_text()


def lines_of(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def test_all_cells_are_shown_from_the_beginning_and_seconds_stand_still_when_one_is_over(
    cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(batch_view.time, "monotonic", lambda: now[0])
    view = BatchView(Console(force_terminal=True), json_lines=False, cells=[one.name for one in cells])
    first, second = cells
    view._live._started = True
    assert all(lines_of(shown(view), one.name)[0].split("│")[2].strip() == "queued" for one in cells)
    view.take(CellEvent(first, CellState.DONE, CellFacts(seconds=7.4, shipped_ms=0.25)))
    view.take(CellEvent(second, CellState.TUNING))
    now[0] = 130.0
    progress = ProgressEvent("task", 3, 9, 3, 0, 12.0, 5.0, "1", 2)
    view.take(CandidateEvent(progress, {second.name: 1.5}))
    now[0] = 132.0
    view.take(CandidateEvent(replace(progress, done=5), {second.name: 1.25}))
    text = shown(view)
    over, tuned = lines_of(text, first.name)[0], lines_of(text, second.name)[0]
    assert [part.strip() for part in over.split("│")[2:6]] == ["done", "7", "", "0.25"]
    assert [part.strip() for part in tuned.split("│")[2:6]] == ["tuning", "32", "1.25", ""]
    assert "5 of 9 candidates; 0.5 a second, 0.2 on each of 2 devices; about 5 s of tuning left" in text


def test_artifacts_are_named_from_where_one_is(
    cells: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = CellFacts(artifact=str(tmp_path / "out" / "a"))
    there = replace(facts, artifact="/somewhere/else")
    table = final_table("", [("a", "done", facts), ("b", "done", there), ("c", "failed", CellFacts())])
    assert [row[table.columns.index("artifact")] for row in table.rows] == ["out/a", "/somewhere/else", ""]


def test_a_plan_that_was_not_run_says_how_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "small.toml"
    plan.write_text(PLAN, encoding="utf-8")
    for command in ("status", "watch", "resume", "report"):
        with pytest.raises(SystemExit) as ended:
            main(["batch", command, str(plan)])
        told = capsys.readouterr().err
        assert ended.value.code == 2
        assert f"was not run yet: {tmp_path / 'relaxtune.db'} is not there" in told
        assert f"relaxtune batch run {plan}" in told
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]
