"""What a plan may say, and how each thing that it may not say is told: file, line, key, what is accepted."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from relaxtune.pipeline.batch import cells as cells_module
from relaxtune.pipeline.batch.cells import list_cells, source_key
from relaxtune.pipeline.batch.plan import PlanError, TomlLines, read_plan
from relaxtune.pipeline.batch.tasks import group_options
from relaxtune.pipeline.cli.app import main
from relaxtune.tuning_db.urls import DatabaseUrl, hide_secrets

GOOD = """\
name = "night"
database = "records.db"
effort = "quick"

[budget]
seconds = 60
candidates = 100

[defaults]
targets = ["llvm"]
shapes = [
    "input_ids=1x16",  # short
    "input_ids=8x128",
]
limits = { rtol = 0.1, max_latency_ms = 9 }
tags = ["nightly"]

[[cells]]
models = ["bert-tiny", "gpt2-tiny"]
precisions = ["graph", "fp16"]
importance = 4

[[cells]]
models = ["exports/*.onnx"]
shapes = [""]
buckets = ["sequence=128,256"]
tags = ["mine"]

[cells.limits]
max_latency_ms = 2.5
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "night.toml"
    path.write_text(text, encoding="utf-8")
    return path


def exports(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / "exports" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_cells_are_the_product_of_a_matrix(tmp_path: Path) -> None:
    exports(tmp_path, "one.onnx", "two.onnx")
    plan = read_plan(write(tmp_path, GOOD))
    cells = list_cells(plan)
    assert [cell.name for cell in cells] == [
        "bert-tiny-1x16-llvm",
        "bert-tiny-1x16-fp16-llvm",
        "bert-tiny-8x128-llvm",
        "bert-tiny-8x128-fp16-llvm",
        "gpt2-tiny-1x16-llvm",
        "gpt2-tiny-1x16-fp16-llvm",
        "gpt2-tiny-8x128-llvm",
        "gpt2-tiny-8x128-fp16-llvm",
        "one-sequence-128-256-llvm",
        "two-sequence-128-256-llvm",
    ]
    assert {cell.importance for cell in cells[:8]} == {4}
    assert cells[0].limits.max_latency_ms == 9
    assert (cells[-1].limits.max_latency_ms, cells[-1].limits.rtol) == (2.5, 0.1)
    assert cells[-1].tags == ("nightly", "mine")
    assert (plan.out, plan.database) == (tmp_path / "out", DatabaseUrl.of(tmp_path / "records.db"))
    request = cells[1].request
    assert (request.shapes, request.lowering.precision) == ({"input_ids": (1, 16)}, "fp16")
    assert (cells[0].request.lowering.precision, cells[-1].request.buckets) == (None, {"sequence": (128, 256)})


def test_folders_and_names_of_the_hub_are_models_by_content_and_by_name(tmp_path: Path) -> None:
    exports(tmp_path, "tiny/config.json")
    text = GOOD.replace('"exports/*.onnx"', '"exports/tiny", "hf:org/small"')
    *_, folder, hub = list_cells(read_plan(write(tmp_path, text)))
    assert [cell.name.partition("-")[0] for cell in (folder, hub)] == ["tiny", "small"]
    before = source_key(folder.source)
    assert source_key(hub.source) == "hf:org/small"
    (tmp_path / "exports" / "tiny" / "config.json").write_text("{}")
    assert source_key(folder.source) != before


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    exports(tmp_path, "bert/model.onnx", "vit/model.onnx")
    plan = read_plan(write(tmp_path, '[[cells]]\nmodels = ["exports/**/*.onnx"]\ntargets = ["llvm"]'))
    assert [cell.name for cell in list_cells(plan)] == ["bert-model-llvm", "vit-model-llvm"]


def test_progress_of_a_glob_is_told_and_its_folders_are_limited(tmp_path: Path, monkeypatch) -> None:
    exports(tmp_path, "bert/model.onnx", "vit/deep/model.onnx")
    plan = read_plan(write(tmp_path, '[[cells]]\nmodels = ["exports/**/*.onnx"]\ntargets = ["llvm"]'))
    told: list[str] = []
    assert len(list_cells(plan, told.append)) == 2
    assert told[-1].endswith("in 4 folders so far")
    monkeypatch.setattr(cells_module, "FOLDERS_MAX", 3)
    with pytest.raises(PlanError, match=r":2: cells\[0\]\.models: .* more than 3 folders; name a folder nearer"):
        list_cells(plan)


def test_too_many_cells_are_refused_before_they_are_made(tmp_path: Path, monkeypatch) -> None:
    exports(tmp_path, *(f"{number}.onnx" for number in range(6)))
    plan = read_plan(write(tmp_path, '[[cells]]\nmodels = ["exports/*.onnx"]\nprecisions = ["graph", "fp16"]'))
    monkeypatch.setattr(cells_module, "CELLS_MAX", 11)
    with pytest.raises(PlanError, match="there are 12 cells up to here; a plan has at most 11: split it"):
        list_cells(plan)
    monkeypatch.setattr(cells_module, "CELLS_MAX", 5)
    with pytest.raises(PlanError, match="more than 5 files match; a plan has at most 5 cells: split it"):
        list_cells(plan)


def test_lines_of_keys_are_found() -> None:
    lines = TomlLines(GOOD)
    assert lines.find(("budget", "candidates")) == 7
    assert lines.find(("defaults", "shapes"), "input_ids=8x128") == 13
    assert lines.find(("defaults", "limits", "rtol")) == 15
    assert lines.find(("cells", 0, "importance")) == 21
    assert lines.find(("cells", 1, "models", 0)) == 24
    assert lines.find(("cells", 1, "limits", "max_latency_ms")) == 30
    assert lines.find(("cells", 1, "precisions")) == 23
    assert lines.find(("nowhere",)) == 1


CELLS = '[[cells]]\nmodels = ["bert-tiny"]\ntargets = ["llvm"]\n'
BAD = {
    "no TOML": ("[budget]\nseconds = = 3\n", 2, ["this is no TOML", "in quotes"]),
    "no cells": ('name = "a"\n', 1, ["cells", "is missing", "[[cells]] table with models"]),
    "empty models": ("[[cells]]\nmodels = []\n", 2, ["cells[0].models: got [], expected a list of models"]),
    "no models": ('[[cells]]\ntargets = ["llvm"]\n', 1, ["cells[0].models", "is missing"]),
    "unknown key": (CELLS + 'precision = ["fp16"]\n', 4, ["cells[0].precision", "did you mean precisions?"]),
    "unknown table": (CELLS + "[budgets]\nseconds = 3\n", 4, ["budgets", "did you mean budget?"]),
    "unknown limit": (CELLS + "limits = { max_latency = 3 }\n", 4, ["limits.max_latency", "max_latency_ms?"]),
    "unknown budget": ("[budget]\ntrials = 3\n" + CELLS, 2, ["budget.trials", "candidates, gpu_hours, seconds"]),
    "text for a number": (
        '[budget]\ncandidates = "many"\n' + CELLS,
        2,
        ["'many'", "whole number greater than 0"],
    ),
    "negative budget": ("[budget]\nseconds = -1\n" + CELLS, 2, ["budget.seconds", "-1", "greater than 0"]),
    "no hours": (
        "[budget]\ngpu_hours = 0\n" + CELLS,
        2,
        ["budget.gpu_hours", "got 0", "added up, a number greater than 0"],
    ),
    "no importance": (CELLS + "importance = 0\n", 4, ["cells[0].importance", "a whole number of at least 1"]),
    "text for a list": (
        '[[cells]]\nmodels = "bert-tiny"\n',
        2,
        ["got 'bert-tiny', expected a list"],
    ),
    "unknown effort": ('effort = "quik"\n' + CELLS, 1, ["effort", "quick, normal, thorough", "did you mean quick?"]),
    "unknown model": ('[[cells]]\nmodels = ["bert-tniy"]\n', 2, ["bert-tniy", "Did you mean bert-tiny"]),
    "missing file": ('[[cells]]\nmodels = ["exports/on.onnx"]\n', 2, ["exports/on.onnx", "did you mean one.onnx?"]),
    "empty glob": ('[[cells]]\nmodels = ["none/*.onnx"]\n', 2, ["no file matches 'none/*.onnx'"]),
    "unknown precision": (CELLS + 'precisions = ["fp61"]\n', 4, ["'fp61'", "graph, fp32", "did you mean fp16?"]),
    "unknown target": (
        '[[cells]]\nmodels = ["bert-tiny"]\ntargets = [\n  "llvm",\n  "rocm:x"\n]\n',
        5,
        ["cells[0].targets", "rocm:x"],
    ),
    "unreadable shape": (CELLS + 'shapes = ["input_ids:1x16"]\n', 4, ["cells[0].shapes", "input_ids=1x128"]),
    "shape twice": (CELLS + 'shapes = ["a=1,a=2"]\n', 4, ["names input 'a' twice"]),
    "unknown input": (
        CELLS + 'shapes = ["input_id=1x16"]\n',
        4,
        ["no input and no axis 'input_id'", "did you mean input_ids?"],
    ),
    "unreadable bucket": (CELLS + 'buckets = ["sequence"]\n', 4, ["cells[0].buckets", "sequence=128,256"]),
    "cell twice": (CELLS + CELLS, 4, ["bert-tiny graph llvm is there twice, also at line 1"]),
    "no database": ("database = 3\n" + CELLS, 1, ["database: got 3", "a file or a URL"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_plan_is_told_with_its_line_and_nothing_is_started(kind: str, tmp_path: Path, capsys) -> None:
    text, line, parts = BAD[kind]
    exports(tmp_path, "one.onnx")
    path = write(tmp_path, text)
    with pytest.raises(SystemExit) as ended:
        main(["batch", "run", str(path)])
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert f"{path}:{line}: " in told.err
    for part in parts:
        assert part in told.err
    assert "Traceback" not in told.err
    assert not told.out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["exports", "night.toml"]


def test_hours_of_gpus_are_shared_by_the_devices(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, "[budget]\ngpu_hours = 2\n" + CELLS))
    assert [group_options(plan, 3, 4, devices).time_budget_s for devices in (1, 4)] == [5400, 1350]
    assert group_options(plan, 3, 4, 4).trials is None
    both = read_plan(write(tmp_path, "[budget]\ngpu_hours = 2\nseconds = 3000\n" + CELLS))
    assert [group_options(both, 4, 4, devices).time_budget_s for devices in (1, 4)] == [3000, 1800]


def test_a_password_of_a_plan_is_not_shown(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, 'database = "postgresql://me:hunter2@host/records"\n' + CELLS))
    # The last is what the database keeps of it.
    assert "hunter2" not in f"{plan} {plan!r} {plan.database} {hide_secrets(plan.text)}"
    assert plan.database.reveal() == "postgresql://me:hunter2@host/records"
    with pytest.raises(PlanError) as raised:
        read_plan(write(tmp_path, 'database = ["postgresql://me:hunter2@host/records"]\n' + CELLS))
    assert "hunter2" not in str(raised.value)


def test_a_message_has_all_faults_of_a_plan(tmp_path: Path) -> None:
    path = write(tmp_path, '[[cells]]\nmodels = ["bert-tniy"]\nprecisions = ["fp61"]\ntargets = ["rocm:x"]\n')
    with pytest.raises(PlanError) as raised:
        list_cells(read_plan(path))
    assert {line.split(":")[1] for line in str(raised.value).splitlines() if str(path) in line} == {"2", "3", "4"}


def test_the_plans_of_the_page_are_plans(tmp_path: Path) -> None:
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "batch.md").read_text(encoding="utf-8")
    texts = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exports(tmp_path, "one.onnx", "two.onnx")
    texts.append((docs / "demo-batch.toml").read_text(encoding="utf-8"))
    assert [len(list_cells(read_plan(write(tmp_path, text)))) for text in texts] == [6, 2, 6]


def test_a_plan_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.toml cannot be read .* expected a TOML file"):
        read_plan(tmp_path / "none.toml")


def test_a_plan_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_plan(path).table == read_plan(_written(tmp_path / "other.toml", GOOD)).table


def test_a_plan_that_nests_too_deeply_or_is_a_pipe_is_refused(tmp_path: Path) -> None:
    deep = _written(tmp_path / "deep.toml", "a = " + "[" * 20_000 + "]" * 20_000)
    with pytest.raises(PlanError, match="nested too deeply"):
        read_plan(deep)
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(PlanError, match="a pipe or a device; save its content to a file"):
        read_plan(tmp_path / "pipe.toml")


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
