"""A plan carried out: tasks merged and tuned once, cells accepted or not each by itself, and nothing done twice."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import relaxtune
from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline import jobs
from relaxtune.pipeline.artifact.directory import hash_file, load_manifest
from relaxtune.pipeline.artifact.runtime import Module
from relaxtune.pipeline.batch import board, prediction, unchanged, worker
from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.driver import _spec, resume_batch, run_batch
from relaxtune.pipeline.batch.events import BatchEvent, CandidateEvent, CellEvent
from relaxtune.pipeline.batch.executors import LocalExecutors
from relaxtune.pipeline.batch.feed import CellFeed
from relaxtune.pipeline.batch.finishing import FinishedCell
from relaxtune.pipeline.batch.plan import parse_plan, read_plan
from relaxtune.pipeline.batch.prediction import preview
from relaxtune.pipeline.batch.tasks import CellFault, CellTasks, group_cells, prepare_cell, share_budget
from relaxtune.pipeline.batch.unchanged import cell_key, find_unchanged
from relaxtune.pipeline.batch.worker import CellWorker, PrepareWork, Work
from relaxtune.pipeline.batch.workers import CellWorkers, LocalWorkers
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.processes.fork_client import ForkServer
from relaxtune.pipeline.spans import VARIABLE, read_spans
from relaxtune.pipeline.tuning.options import LEVELS, Effort
from relaxtune.pipeline.validate.acceptance import Limits
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.tuning_db.batches import batch_key, get_batch, list_attempts, move_cell, start_batch
from relaxtune.tuning_db.batches import list_cells as stored_cells
from relaxtune.tuning_db.cell_states import CellState, Driver
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.questions.insights import coverage
from relaxtune.tuning_db.records import RecordFilter, Route, Status, utc_now
from relaxtune.tuning_db.store import SqlDatabase
from tests import warm_python

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
        patch.setenv(VARIABLE, str(folder / "spans"))
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


def test_what_did_not_change_is_not_done_again(ran: Ran, database: TuningDatabase, capsys) -> None:
    """The group's tuning is known to be done; accepted cells stay, the others are tried again."""
    shown = preview(read_plan(ran.plan))
    (group,) = shown.groups
    (job,) = database.list_jobs(model="batch small")
    assert (group.ended_by, group.candidates, group.tuning_s) == (job.id, 0, 0.0)
    assert group.finishing_s is not None
    assert group.finishing_s > 0
    assert all(group.records[task.workload_hash] for task in group.group.tasks)
    before = {record.id for record in database.list_records() if "norm_rows_max" not in record.decision}
    artifacts = len(database.list_artifacts())
    events: list[BatchEvent] = []
    result = run_batch(read_plan(ran.plan), on_event=events.append)
    assert [one.state.value for one in result.cells] == ["done", "done", "failed", "rejected"]
    assert [summary.candidates for summary in result.tuning] == [0]
    after = {record.id for record in database.list_records() if "norm_rows_max" not in record.decision}
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
        with SqlDatabase.open(tmp_path / "copy.db") as copy:
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


def plan_of(ran: Ran, name: str, changes: dict[str, str] | None = None, cells: str = "") -> Path:
    """A plan of the same folder and database, with artifacts of its own."""
    text = PLAN if not cells else PLAN.partition("[[cells]]")[0] + cells
    for old, new in {'"small"': f'"{name}"', '"made"': f'"{name}"', **(changes or {})}.items():
        text = text.replace(old, new)
    path = ran.folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


FIRST = '[[cells]]\nmodels = ["first.onnx"]\n'


def test_a_second_driver_is_told_who_has_the_plan(ran: Ran, database: TuningDatabase, capsys) -> None:
    path = plan_of(ran, "held", cells=FIRST)
    plan = read_plan(path)
    other = subprocess.Popen(["sleep", "60"])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Driver, "here", classmethod(lambda cls: Driver(socket.gethostname(), other.pid)))
            batch = start_batch(
                database, key=batch_key(plan.name, plan.out), name="held", path=str(path), plan=plan.text,
                cells=[_spec(plan, cell) for cell in list_cells(plan)],
            )  # fmt: skip
            move_cell(database, batch.id, "first-16x32-llvm", CellState.IMPORTING)
        for words in (["run", str(path)], ["resume", str(path)]):
            with pytest.raises(SystemExit) as ended:
                main(["batch", *words])
            assert ended.value.code == 1
            assert f"is being worked on by process {other.pid} on" in " ".join(capsys.readouterr().err.split())
    finally:
        other.kill()
        other.wait()
    # A driver that was killed: status says so, resume takes its cells up and measures nothing that is known.
    with pytest.raises(SystemExit):
        main(["batch", "status", str(path)])
    assert "dead (importing)" in capsys.readouterr().out
    result = resume_batch(plan.database, "held")
    assert [one.state for one in result.cells] == [CellState.DONE]
    assert [attempt.error for attempt in list_attempts(database, batch.id)] == ["its driver died", None]
    with pytest.raises(SystemExit):
        main(["batch", "watch", str(path)])
    assert "1 of 1 accepted; 1 done" in capsys.readouterr().out


def test_a_driver_that_is_killed_is_taken_up_where_it_was(ran: Ran, database: TuningDatabase) -> None:
    path = plan_of(ran, "killed", {"candidates = 6": "candidates = 24"}, FIRST + 'shapes = ["x=24x32"]\n')
    command = [sys.executable, "-c", "from relaxtune.pipeline.cli.app import main; main()", "batch", "run", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = warm_python.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "of 24 candidates" in line:
            break
    # Records are written each second: the first ones are there long before the last candidate is measured.
    job = database.list_jobs()[0].id
    while process.poll() is None and sum(one.job_id == job for one in database.list_records()) < 3:
        time.sleep(0.02)
    process.kill()
    process.wait()
    process.stderr.close()
    batch = get_batch(database, "killed")
    assert [cell.dead for cell in stored_cells(database, batch.id)] == [True]
    (broken,) = database.list_jobs(model="batch killed")
    left = [record for record in database.list_records() if record.job_id == broken.id]
    result = resume_batch(ran.folder / "records.db", batch.id[:8])
    assert [one.state for one in result.cells] == [CellState.DONE]
    again = database.list_jobs(model="batch killed")[0]
    new = [record for record in database.list_records() if record.job_id == again.id]
    measured = {one.decision for one in left if one.route is not Route.FALLBACK}
    (summary,) = result.tuning
    # What was measured counts; only a final measures a decision twice.
    assert summary.candidates == 24 - len(measured)
    searched = [one.decision for one in new if one.route is not Route.FALLBACK]
    assert len(set(searched) - measured) == summary.candidates


def test_a_cancelled_cell_is_left_out(ran: Ran, database: TuningDatabase, capsys, monkeypatch) -> None:
    path = plan_of(ran, "fewer", cells=FIRST + FIRST + 'shapes = ["x=4x32"]\n')

    heard: list[str] = []
    # Heartbeats read of the cancelled cell again and again.
    monkeypatch.setattr(board, "BEAT_S", 0.05)

    def told(event: BatchEvent) -> None:
        if isinstance(event, CellEvent) and event.state is CellState.CANCELLED:
            heard.append(event.cell.name)
        if isinstance(event, CellEvent) and event.state is CellState.TUNING and "16x32" in event.cell.name:
            with pytest.raises(SystemExit):
                main(["batch", "cancel", "first-4x32-llvm", str(path)])

    result = run_batch(read_plan(path), on_event=told)
    assert [one.state.value for one in result.cells] == ["done", "cancelled"]
    assert result.exit_code == 1
    assert "first-4x32-llvm of fewer is cancelled" in capsys.readouterr().out
    assert not (ran.folder / "fewer" / "first-4x32-llvm").exists()
    with pytest.raises(SystemExit) as ended:
        main(["batch", "cancel", "first-4x32-llvm", str(path)])
    assert ended.value.code == 0
    assert heard.count("first-4x32-llvm") == 1


def test_other_processes_import_and_finish_cells_beside_the_tuning(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    def workers(self: LocalExecutors, target: object) -> LocalWorkers:
        server = self._stack.enter_context(closing(ForkServer([worker.WORKER_MODULE])))
        return self._stack.enter_context(closing(LocalWorkers(["cpu:0"], self._turns, server)))

    monkeypatch.setattr(LocalExecutors, "workers", workers)
    path = plan_of(ran, "beside", cells='[[cells]]\nmodels = ["first.onnx", "strange.onnx"]\n')
    states: dict[str, list[str]] = {}

    def told(event: BatchEvent) -> None:
        if isinstance(event, CellEvent):
            states.setdefault(event.cell.name, []).append(event.state.value)

    result = run_batch(read_plan(path), on_event=told)
    assert [one.state.value for one in result.cells] == ["done", "failed"]
    assert states["first-16x32-llvm"] == ["importing", "tuning", "compiling", "done"]
    assert "strange.onnx" in str(result.cells[1].facts.error)


def small_cell(folder: Path) -> Cell:
    onnx.save(dense(), folder / "first.onnx")
    text = '[[cells]]\ntargets = ["llvm"]\nmodels = ["first.onnx"]\nshapes = ["x=16x32"]\n'
    (cell,) = list_cells(parse_plan(folder / "near.toml", text))
    return cell


def test_a_cell_of_a_killed_process_is_done_by_another(tmp_path: Path) -> None:
    cell = small_cell(tmp_path)
    with (
        closing(ForkServer([worker.WORKER_MODULE])) as server,
        closing(LocalWorkers(["cpu:0"], tmp_path, server)) as workers,
    ):
        assert isinstance(workers.submit(PrepareWork(cell)).result(timeout=120), CellTasks)
        for process in workers._processes.values():
            os.kill(process.pid, signal.SIGKILL)
        assert isinstance(workers.submit(PrepareWork(cell)).result(timeout=120), CellTasks)


@pytest.mark.parametrize(("left", "kept"), [(1.0, True), (0.0, False)], ids=["memory is left", "memory is short"])
def test_a_worker_keeps_no_model_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float, kept: bool
) -> None:
    monkeypatch.setattr(worker, "memory_left", lambda: left)
    one = CellWorker()
    assert isinstance(one.answer(PrepareWork(small_cell(tmp_path))), CellTasks)
    assert bool(one._ready) == kept


class HereWorkers(CellWorkers):
    """Does work on cells at once, in the thread that asks for it."""

    def __init__(self) -> None:
        self._worker = CellWorker()

    @property
    def count(self) -> int:
        return 1

    def submit(self, work: Work) -> Future[object]:
        future: Future[object] = Future()
        future.set_result(self._worker.answer(work))
        return future

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("left", "made"), [(1.0, True), (0.0, False)], ids=["memory is left", "memory is short"])
def test_what_tuning_does_not_change_is_made_while_a_cell_is_tuned(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, left: float, made: bool
) -> None:
    over, found = CellFeed._over, []

    def noted(self: CellFeed, cell: Cell, finished: FinishedCell) -> None:
        found.append(finished)
        over(self, cell, finished)

    monkeypatch.setattr(CellFeed, "_over", noted)
    monkeypatch.setattr(LocalExecutors, "workers", lambda *_: HereWorkers())
    monkeypatch.setattr(worker, "memory_left", lambda: left)
    path = plan_of(ran, f"ahead-{made}", cells=FIRST + 'shapes = ["x=9x32"]\n')
    result = run_batch(read_plan(path))
    assert [one.state.value for one in result.cells] == ["done"]
    early = {"load", "import", "lower", "compile untuned", "reference"}
    assert early.isdisjoint(found[0].stage_s) == made
    assert {"compile", "compare", "export", "validate"} <= found[0].stage_s.keys()


def test_a_cell_that_keeps_its_limit_is_not_tuned_any_further(ran: Ran) -> None:
    limited = FIRST + 'shapes = ["x=5x32"]\nlimits = { max_latency_ms = 1000.0 }\n'
    path = plan_of(ran, "early", {"candidates = 6": "candidates = 500"}, limited)
    result = run_batch(read_plan(path))
    assert [one.state for one in result.cells] == [CellState.DONE]
    # What is given up then is what only this cell wanted.
    (summary,) = result.tuning
    assert summary.candidates < 100
    assert {task.ended for task in summary.tasks} == {"no model wants it any more"}


def test_a_batch_is_iterated_over_and_may_be_left(ran: Ran, database: TuningDatabase) -> None:
    path = plan_of(ran, "loop", {"candidates = 6": "candidates = 40"}, FIRST + 'shapes = ["x=3x32"]\n')
    run = relaxtune.batch(path)
    for event in run:
        if isinstance(event, CandidateEvent):
            break
    assert isinstance(event, CandidateEvent)
    assert event.progress.workload_hash
    (cell,) = stored_cells(database, get_batch(database, "loop").id)
    assert cell.state is CellState.QUEUED
    assert get_batch(database, "loop").outcome == "interrupted"


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
    validate = jobs.validate_written

    def against_first(module: Module, place: Path, model: OnnxModel, *rest: object) -> ValidationReport:
        if model.name != "second":
            return validate(module, place, model, *rest)
        other = load_model(ran.folder / "first.onnx", shapes={"x": (16, 32)})
        # The reference that was made before is of the model itself.
        return validate(module, place, other, *rest[:-1])

    monkeypatch.setattr(jobs, "validate_written", against_first)
    plan = ran.folder / "two.toml"
    text = PLAN.replace(', "strange.onnx"', "").replace('"made"', '"two"').replace('"small"', '"two"')
    head, own, other, _ = text.split("[[cells]]")
    plan.write_text("[[cells]]".join([head, other, own]), encoding="utf-8")
    run = relaxtune.batch(plan)
    over = [one.cell.name for one in run if isinstance(one, CellEvent) and one.state.over]
    result = run.result()
    second, first = result.cells
    assert (second.state, second.facts.validated, result.exit_code) == (CellState.REJECTED, False, 3)
    assert "disagrees with ONNX Runtime" in str(second.facts.error)
    assert first.state is CellState.DONE
    assert sorted(over) == sorted([first.cell.name, second.cell.name])
    plan.write_text(plan.read_text(encoding="utf-8").replace('"two"', '"three"'), encoding="utf-8")
    stopped = relaxtune.batch(plan, fail_fast=True).result()
    assert [one.state.value for one in stopped.cells] == ["rejected", "queued"]
    assert stopped.exit_code == 3


def test_a_cell_of_another_machine_says_so(ran: Ran) -> None:
    plan = ran.folder / "gpu.toml"
    text = '[[cells]]\nmodels = ["first.onnx"]\nshapes = ["x=16x32"]\ntargets = ["cuda:sm_90a"]\n'
    plan.write_text(f'database = "none.db"\n{text}', encoding="utf-8")
    if not (result := run_batch(read_plan(plan))).cells[0].facts.error:
        pytest.skip("this machine has the GPU")
    assert "sm_90a is not on this machine" in str(result.cells[0].facts.error)
    assert (result.exit_code, result.tuning) == (1, ())


def test_places_that_cannot_be_written_are_told_before_anything_starts(ran: Ran, tmp_path: Path) -> None:
    plan = ran.folder / "taken.toml"
    plan.write_text(PLAN.replace('"made"', '"first.onnx"'), encoding="utf-8")
    with pytest.raises(relaxtune.ArtifactError, match=r"first\.onnx"):
        run_batch(read_plan(plan))
