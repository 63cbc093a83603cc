"""A plan carried out: tasks merged and tuned once, cells accepted or not each by itself, and nothing done twice."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from relaxtune.pipeline.artifact.directory import hash_file, load_manifest
from relaxtune.pipeline.batch import prediction, unchanged
from relaxtune.pipeline.batch.cells import list_cells
from relaxtune.pipeline.batch.driver import run_batch
from relaxtune.pipeline.batch.events import BatchEvent, CandidateEvent, CellEvent
from relaxtune.pipeline.batch.plan import read_plan
from relaxtune.pipeline.batch.prediction import preview
from relaxtune.pipeline.batch.tasks import CellFault, CellTasks, group_cells, prepare_cell, share_budget
from relaxtune.pipeline.batch.unchanged import cell_key, find_unchanged
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.spans import VARIABLE, read_spans
from relaxtune.pipeline.tuning.options import LEVELS, Effort
from relaxtune.pipeline.validate.acceptance import Limits
from relaxtune.tuning_db.batches import get_batch, list_attempts, list_cells as stored_cells
from relaxtune.tuning_db.cell_states import CellState
from relaxtune.tuning_db.questions.insights import coverage
from relaxtune.tuning_db.records import RecordFilter, Status, utc_now
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.batch.plan_cases import PLAN, write_models


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
    write_models(folder)
    plan = folder / "small.toml"
    plan.write_text(PLAN, encoding="utf-8")
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.write", printed.append)
        patch.setenv(VARIABLE, str(folder / "spans"))
        with pytest.raises(SystemExit) as ended:
            main(["batch", "run", str(plan), "--format", "json"])
    return Ran(folder, plan, int(ended.value.code or 0), [json.loads(line) for line in "".join(printed).splitlines()])


@pytest.fixture
def database(ran: Ran) -> Iterator[TuningDatabase]:
    with TuningDatabase.open(ran.folder / "records.db") as opened:
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


def test_all_processes_of_a_run_say_what_they_did_and_when(ran: Ran) -> None:
    spans = read_spans(ran.folder / "spans")
    processes: dict[str, set[int]] = {}
    for one in spans:
        processes.setdefault(one.stage, set()).add(one.process)
    here = {os.getpid()}
    assert processes["import"] == processes["compile"] == processes["build"] == processes["cpu:0: measure"] == here
    assert not (processes["build: compile"] | processes["time"]) & here
    for task in {one.of for one in spans if one.stage == "time"}:
        built, taken = (
            [one for one in spans if (one.stage, one.of) == (stage, task)] for stage in ("build", "measure")
        )
        assert min(one.ended_s for one in built) <= min(one.began_s for one in taken)


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


def test_the_database_says_what_became_of_each_cell(ran: Ran, database: TuningDatabase) -> None:
    batch = get_batch(database, "small")
    assert (batch.outcome, batch.held) == ("2 of 4 accepted", False)
    first, second, strange, missed = stored_cells(database, batch.id)
    assert (first.spec.shape, first.spec.precision, first.spec.effort, first.spec.tags) == (
        "x=16x32",
        "graph",
        "normal",
        "kept",
    )
    assert (first.facts.validated, first.facts.peer, missed.spec.max_latency_ms) == (True, "ort", 1e-6)
    artifact = Path(str(first.facts.artifact))
    assert first.facts.size_bytes == sum(path.stat().st_size for path in artifact.iterdir())
    assert {one.state for one in list_attempts(database, batch.id)} == {
        CellState.DONE,
        CellState.FAILED,
        CellState.REJECTED,
    }
    assert "strange.onnx" in str(strange.facts.error)
    assert second.facts.job_id in {job.id for job in database.list_jobs(model="second")}


@pytest.mark.slow
def test_what_did_not_change_is_not_done_again(ran: Ran, database: TuningDatabase, capsys) -> None:
    """The group's tuning is known to be done; accepted cells stay, the others are tried again."""
    shown = preview(read_plan(ran.plan))
    (group,) = shown.groups
    (job,) = database.list_jobs(model="batch small")
    assert (group.ended_by, group.candidates, group.tuning_s) == (job.id, 0, 0.0)
    assert group.finishing_s is not None
    assert group.finishing_s > 0
    assert all(group.records[task.workload_hash] for task in group.group.tasks)
    before = {record.id for record in database.list_records() if '"template":"model"' not in record.decision}
    artifacts = len(database.list_artifacts())
    events: list[BatchEvent] = []
    result = run_batch(read_plan(ran.plan), on_event=events.append)
    assert [one.state.value for one in result.cells] == ["done", "done", "failed", "rejected"]
    assert [summary.candidates for summary in result.tuning] == [0]
    after = {record.id for record in database.list_records() if '"template":"model"' not in record.decision}
    assert after == before
    assert len(database.list_artifacts()) <= artifacts + 1
    done = [one for one in events if isinstance(one, CellEvent) and one.state is CellState.DONE]
    assert all("nothing changed since it was accepted at" in one.note for one in done)
    assert [one.cell.name for one in done] == ["first-16x32-llvm", "second-16x32-llvm"]
    assert not any(isinstance(one, CandidateEvent) for one in events)
    with pytest.raises(SystemExit):
        main(["batch", "status", str(ran.plan), "--format", "json"])
    data = json.loads(capsys.readouterr().out)
    assert [cell["status"] for cell in data["cells"]] == ["done", "done", "failed", "rejected"]
    assert data["outcome"] == "2 of 4 accepted"


def test_processes_lower_the_cells_of_a_large_plan_side_by_side(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = list_cells(read_plan(ran.plan))
    here = [told(one) for one in prediction.prepare_cells(cells)]
    monkeypatch.setattr(prediction, "_CELLS_EACH", 1)
    monkeypatch.setattr(prediction, "physical_cores", lambda: 2)
    monkeypatch.setattr(prediction, "prepare_alike", None)
    assert [told(one) for one in prediction.prepare_cells(cells)] == here
    assert [count for _, count, _ in here] == [1, 1, 0, 1]


def told(one: CellTasks | CellFault) -> tuple[str, int, str]:
    hashes = [task.workload_hash for task in one.tasks] if isinstance(one, CellTasks) else []
    return f"{one.cell.name} {hashes}", len(hashes), one.note


def test_a_page_shows_the_batch_and_fetches_nothing(ran: Ran, tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["batch", "report", "small", "--db", str(ran.folder / "records.db"), "--out", str(page)])
    assert not ended.value.code
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text(encoding="utf-8")
    assert all(cell in text for cell in ("first-16x32-llvm", "first-8x32-llvm", "strange-16x32-llvm"))
    assert "max_latency_ms is 1e-06" in text
    # What a cell lacks is an empty cell, so that a column that is empty in all rows is left out.
    assert not re.search(r'<code></code>|<span class="note"></span>|<td[^>]*> ', text)
    # Each artifact's kernels, the plan, and nothing from elsewhere.
    assert text.count("<h2>Kernels</h2>") == 3
    assert "candidates = 6" in text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)


@pytest.mark.parametrize("what", ["artifact", "record", "limit", "code"])
def test_what_changed_is_done_again(ran: Ran, database: TuningDatabase, tmp_path: Path, what: str, monkeypatch) -> None:
    plan = read_plan(ran.plan)
    cell = list_cells(plan)[0]
    out = plan.out / cell.name
    assert find_unchanged(database, cell_key(plan, cell, out)) is not None
    if what == "artifact":
        library = out / "model.so"
        manifest = out / "manifest.json"
        kept = manifest.read_bytes()
        manifest.write_bytes(kept.replace(hash_file(library).sha256.encode(), b"0" * 64))
        try:
            assert find_unchanged(database, cell_key(plan, cell, out)) is None
        finally:
            manifest.write_bytes(kept)
        return
    if what == "record":
        shutil.copy(ran.folder / "records.db", tmp_path / "copy.db")
        with TuningDatabase.open(tmp_path / "copy.db") as copy:
            found = find_unchanged(copy, cell_key(plan, cell, out))
            assert found is not None
            hashes = [task.workload_hash for task in copy.list_job_tasks(str(found.facts.job_id))]
            known = copy.list_known(RecordFilter(status=Status.OK), workload_hashes=hashes)
            best = min(known, key=lambda record: record.latency_us or float("inf"))
            for factor, same in ((50.0, True), (1e-3, False)):
                latencies = tuple(factor * one for one in best.latencies_us)
                copy.record_measurement(replace(best, id=None, latencies_us=latencies, created_at=utc_now()))
                assert (find_unchanged(copy, cell_key(plan, cell, out)) is not None) is same
        return
    if what == "limit":
        cell = replace(cell, limits=Limits(max_latency_ms=1.0))
    else:
        monkeypatch.setattr(unchanged, "code_key", lambda: "another version")
    assert find_unchanged(database, cell_key(plan, cell, out)) is None


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
