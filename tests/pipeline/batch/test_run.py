"""A plan carried out: tasks merged and tuned once, cells accepted or not each by itself, and nothing done twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import relaxtune
from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline import jobs
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.batch.cells import list_cells
from relaxtune.pipeline.batch.plan import read_plan
from relaxtune.pipeline.batch.prediction import preview
from relaxtune.pipeline.batch.run import CellStatus, run_batch
from relaxtune.pipeline.batch.tasks import CellTasks, group_cells, prepare_cell, share_budget
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.tuning.options import LEVELS, Effort
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.questions.insights import coverage
from relaxtune.tuning_db.store import SqlDatabase

PLAN = """\
name = "small"
database = "records.db"
out = "made"
samples = 1
[budget]
candidates = 6
[defaults]
targets = ["llvm"]
shapes = ["x=16x32"]
[[cells]]
models = ["first.onnx"]
importance = 3
tags = ["kept"]
[[cells]]
models = ["second.onnx", "strange.onnx"]
[[cells]]
models = ["first.onnx"]
shapes = ["x=8x32"]
limits = { max_latency_ms = 1e-6 }
"""


def dense(operator: str = "Relu", seed: int = 0) -> onnx.ModelProto:
    """A dense layer and an activation."""
    weights = np.random.default_rng(seed).standard_normal((32, 64)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="dense/MatMul"),
        helper.make_node(operator, ["h"], ["y"], name="dense/activation"),
    ]
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 32))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", 64))],
        [numpy_helper.from_array(weights, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@dataclass(frozen=True)
class Ran:
    folder: Path
    plan: Path
    code: int
    lines: list[dict[str, object]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A plan carried out once, by the command."""
    folder = tmp_path_factory.mktemp("batch")
    onnx.save(dense(), folder / "first.onnx")
    onnx.save(dense(seed=1), folder / "second.onnx")
    (folder / "strange.onnx").write_bytes(b"this is no model")
    plan = folder / "small.toml"
    plan.write_text(PLAN, encoding="utf-8")
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.write", printed.append)
        with pytest.raises(SystemExit) as ended:
            main(["batch", "run", str(plan), "--format", "json"])
    return Ran(folder, plan, int(ended.value.code or 0), [json.loads(line) for line in "".join(printed).splitlines()])


@pytest.fixture
def database(ran: Ran) -> Iterator[TuningDatabase]:
    with SqlDatabase.open(ran.folder / "records.db") as opened:
        yield opened


def test_each_cell_has_its_own_end(ran: Ran) -> None:
    found = {str(line["cell"]): line for line in ran.lines}
    assert ran.code == 1
    assert {name: line["status"] for name, line in found.items()} == {
        "first-16x32-llvm": "done",
        "second-16x32-llvm": "done",
        "strange-16x32-llvm": "failed",
        "first-8x32-llvm": "rejected",
    }
    done, strange, missed = found["first-16x32-llvm"], found["strange-16x32-llvm"], found["first-8x32-llvm"]
    assert (done["validated"], done["tags"]) == (True, ["kept"])
    assert done["untuned_ms"] > 0
    assert done["shipped_ms"] > 0
    assert (strange["artifact"], strange["validated"]) == (None, None)
    assert "strange.onnx" in str(strange["reason"])
    assert "max_latency_ms is 1e-06" in str(missed["reason"])
    assert missed["artifact"] == str(ran.folder / "made/first-8x32-llvm.rejected")
    assert {path.name for path in (ran.folder / "made").iterdir()} == {
        "first-16x32-llvm",
        "second-16x32-llvm",
        "first-8x32-llvm.rejected",
    }
    assert load_manifest(Path(str(done["artifact"]))).validation["passed"]


def test_a_task_of_several_cells_is_one_task_with_their_weights(ran: Ran, database: TuningDatabase) -> None:
    cells = [one for one in map(prepare_cell, list_cells(read_plan(ran.plan))) if isinstance(one, CellTasks)]
    (group,) = group_cells(cells)
    first, second, small = cells
    assert [task.workload_hash for task in first.tasks] == [task.workload_hash for task in second.tasks]
    assert len(group.tasks) == len(first.tasks) + len(small.tasks)
    weights = {task.workload_hash: task.weight for task in group.tasks}
    assert [weights[task.workload_hash] for task in first.tasks] == [4 * task.weight for task in first.tasks]
    assert [weights[task.workload_hash] for task in small.tasks] == [task.weight for task in small.tasks]
    (job,) = database.list_jobs(model="batch small")
    assert {task.workload_hash: task.weight for task in database.list_job_tasks(job.id)} == weights
    assert {task.workload_hash for task in coverage(database, "second")} == {t.workload_hash for t in second.tasks}


def test_a_cell_without_new_tasks_adds_no_candidates(ran: Ran) -> None:
    plan = read_plan(ran.plan)
    cells = [one for one in map(prepare_cell, list_cells(plan)) if isinstance(one, CellTasks)]
    groups = group_cells(cells)
    assert [options.trials for options in share_budget(plan, groups)] == [6]
    table = plan.table.model_copy(update={"budget": plan.table.budget.model_copy(update={"candidates": None})})
    (options,) = share_budget(replace(plan, table=table), groups)
    assert options.trials == 2 * (LEVELS[Effort.NORMAL].trials or 0)


def test_a_plan_that_ran_is_not_measured_again(ran: Ran, database: TuningDatabase) -> None:
    shown = preview(read_plan(ran.plan))
    (group,) = shown.groups
    (job,) = database.list_jobs(model="batch small")
    assert (group.ended_by, group.candidates, group.tuning_s) == (job.id, 0, 0.0)
    assert group.finishing_s is not None
    assert group.finishing_s > 0
    assert all(group.records[task.workload_hash] for task in group.group.tasks)
    before = {record.id for record in database.list_records() if "norm_rows_max" not in record.decision}
    result = run_batch(read_plan(ran.plan))
    assert [one.status.value for one in result.cells] == ["done", "done", "failed", "rejected"]
    assert [summary.candidates for summary in result.tuning] == [0]
    after = {record.id for record in database.list_records() if "norm_rows_max" not in record.decision}
    assert after == before


def test_a_plan_is_predicted_by_what_the_database_knows(ran: Ran, tmp_path: Path, capsys) -> None:
    plan = ran.folder / "next.toml"
    plan.write_text(PLAN.replace("candidates = 6", "candidates = 40").replace('"small"', '"next"'), encoding="utf-8")
    (group,) = preview(read_plan(plan)).groups
    assert (group.ended_by, group.candidates) == (None, 40)
    assert group.history.candidate_s is not None
    assert group.tuning_s == pytest.approx(40 * group.history.candidate_s)
    with pytest.raises(SystemExit) as ended:
        main(["batch", "plan", str(plan), "--format", "json"])
    data = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1  # a model cannot be loaded
    assert [(cell["cell"], bool(cell["note"])) for cell in data["cells"]][2] == ("strange-16x32-llvm", True)
    assert data["targets"][0]["tasks_before_merging"] > len(data["targets"][0]["tasks"])


def test_a_plan_is_shown_without_a_database_and_makes_none(ran: Ran, tmp_path: Path, capsys) -> None:
    onnx.save(dense(), tmp_path / "first.onnx")
    plan = tmp_path / "new.toml"
    plan.write_text('[[cells]]\nmodels = ["first.onnx"]\ntargets = ["llvm"]\nshapes = ["x=4x32"]\n', encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["batch", "plan", str(plan)])
    shown = capsys.readouterr().out
    assert int(ended.value.code or 0) == 0
    assert "predicted: tuning unknown, finishing unknown" in " ".join(shown.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.onnx", "new.toml"]


def test_a_failed_validation_rejects_its_cell_and_exits_with_3(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    validate = jobs._validate

    def against_first(place: Path, model: OnnxModel, samples: int, limits: jobs.Limits) -> ValidationReport:
        other = load_model(ran.folder / "first.onnx", shapes={"x": (16, 32)})
        return validate(place, other if model.name == "second" else model, samples, limits)

    monkeypatch.setattr(jobs, "_validate", against_first)
    plan = ran.folder / "two.toml"
    text = PLAN.replace(', "strange.onnx"', "").replace('"made"', '"two"').split("[[cells]]")
    plan.write_text("[[cells]]".join([text[0], text[2], text[1]]), encoding="utf-8")
    told = []
    result = relaxtune.batch(plan, on_cell=told.append)
    second, first = result.cells
    assert (second.status, second.validated, result.exit_code) == (CellStatus.REJECTED, False, 3)
    assert "disagrees with ONNX Runtime" in second.reason
    assert (first.status, told) == (CellStatus.DONE, [second, first])
    stopped = relaxtune.batch(plan, fail_fast=True)
    assert [one.status.value for one in stopped.cells] == ["rejected", "skipped"]
    assert "second-16x32-llvm is rejected" in stopped.cells[1].reason


def test_a_cell_of_another_machine_says_so(ran: Ran) -> None:
    plan = ran.folder / "gpu.toml"
    text = '[[cells]]\nmodels = ["first.onnx"]\nshapes = ["x=16x32"]\ntargets = ["cuda:sm_90a"]\n'
    plan.write_text(f'database = "none.db"\n{text}', encoding="utf-8")
    if not (result := run_batch(read_plan(plan))).cells[0].reason:
        pytest.skip("this machine has the GPU")
    assert "sm_90a is not on this machine" in result.cells[0].reason
    assert (result.exit_code, result.tuning) == (1, ())


def test_places_that_cannot_be_written_are_told_before_anything_starts(ran: Ran, tmp_path: Path) -> None:
    plan = ran.folder / "taken.toml"
    plan.write_text(PLAN.replace('"made"', '"first.onnx"'), encoding="utf-8")
    with pytest.raises(relaxtune.ArtifactError, match=r"first\.onnx"):
        run_batch(read_plan(plan))
