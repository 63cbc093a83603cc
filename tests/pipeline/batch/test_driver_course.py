"""While a plan is carried out: drivers and processes that end, cells that are cancelled, limits that are kept."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import onnx
import pytest

import relaxtune
from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.batch import board, worker
from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.driver import _spec, resume_batch, run_batch
from relaxtune.pipeline.batch.events import BatchEvent, CandidateEvent, CellEvent
from relaxtune.pipeline.batch.executors import LocalExecutors
from relaxtune.pipeline.batch.feed import CellFeed
from relaxtune.pipeline.batch.finishing import FinishedCell
from relaxtune.pipeline.batch.plan import parse_plan, read_plan
from relaxtune.pipeline.batch.tasks import CellTasks
from relaxtune.pipeline.batch.worker import CellWorker, PrepareWork, Work
from relaxtune.pipeline.batch.workers import CellWorkers, LocalWorkers
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.jobs import compile_and_tune as jobs
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.pipeline.workers.fork_server import ForkServer
from relaxtune.tuning_db.batches import (
    batch_key,
    get_batch,
    list_attempts,
    list_cells as stored_cells,
    move_cell,
    start_batch,
)
from relaxtune.tuning_db.cell_states import CellState, Driver
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.store import TuningDatabase
from tests import warm_python
from tests.pipeline.batch.plan_cases import FIRST, PLAN, dense, plan_of, write_models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The models of a plan, and a database without records: near shapes that saved nothing would end its tasks."""
    write_models(tmp_path)
    return tmp_path


@pytest.fixture
def database(folder: Path) -> Iterator[TuningDatabase]:
    with TuningDatabase.open(folder / "records.db") as opened:
        yield opened


@pytest.mark.slow
def test_a_second_driver_is_told_who_has_the_plan(folder: Path, database: TuningDatabase, capsys) -> None:
    path = plan_of(folder, "held", cells=FIRST)
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


@pytest.mark.slow
def test_a_driver_that_is_killed_is_taken_up_where_it_was(folder: Path, database: TuningDatabase) -> None:
    path = plan_of(folder, "killed", {"candidates = 6": "candidates = 24"}, FIRST + 'shapes = ["x=24x32"]\n')
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
    result = resume_batch(folder / "records.db", batch.id[:8])
    assert [one.state for one in result.cells] == [CellState.DONE]
    again = database.list_jobs(model="batch killed")[0]
    new = [record for record in database.list_records() if record.job_id == again.id]
    measured = {one.decision for one in left if one.route is not Route.FALLBACK}
    (summary,) = result.tuning
    # What was measured counts; only a final measures a decision twice.
    assert summary.candidates == 24 - len(measured)
    # A record of the whole model, which says that it ships untuned, is no candidate.
    candidates = [one for one in new if one.route is not Route.FALLBACK and '"template":"model"' not in one.decision]
    assert len({one.decision for one in candidates} - measured) == summary.candidates


@pytest.mark.slow
def test_a_cancelled_cell_is_left_out(folder: Path, database: TuningDatabase, capsys, monkeypatch) -> None:
    path = plan_of(folder, "fewer", cells=FIRST + FIRST + 'shapes = ["x=4x32"]\n')

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
    assert not (folder / "fewer" / "first-4x32-llvm").exists()
    with pytest.raises(SystemExit) as ended:
        main(["batch", "cancel", "first-4x32-llvm", str(path)])
    assert ended.value.code == 0
    assert heard.count("first-4x32-llvm") == 1


@pytest.mark.slow
def test_other_processes_import_and_finish_cells_beside_the_tuning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def workers(self: LocalExecutors, target: object) -> LocalWorkers:
        server = self._stack.enter_context(closing(ForkServer([worker.WORKER_MODULE])))
        return self._stack.enter_context(closing(LocalWorkers(["cpu:0"], self._locks, server)))

    monkeypatch.setattr(LocalExecutors, "workers", workers)
    path = plan_of(folder, "beside", cells='[[cells]]\nmodels = ["first.onnx", "strange.onnx"]\n')
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
        for process in workers._workers:
            if process.pid:
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

    count = 1

    def __init__(self) -> None:
        self._worker = CellWorker()

    def submit(self, work: Work) -> Future[object]:
        future: Future[object] = Future()
        future.set_result(self._worker.answer(work))
        return future

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(("left", "made"), [(1.0, True), (0.0, False)], ids=["memory is left", "memory is short"])
def test_what_tuning_does_not_change_is_made_while_a_cell_is_tuned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left: float, made: bool
) -> None:
    over, found = CellFeed._over, []

    def noted(self: CellFeed, cell: Cell, finished: FinishedCell) -> None:
        found.append(finished)
        over(self, cell, finished)

    monkeypatch.setattr(CellFeed, "_over", noted)
    monkeypatch.setattr(LocalExecutors, "workers", lambda *_: HereWorkers())
    monkeypatch.setattr(worker, "memory_left", lambda: left)
    path = plan_of(folder, f"ahead-{made}", cells=FIRST + 'shapes = ["x=9x32"]\n')
    result = run_batch(read_plan(path))
    assert [one.state.value for one in result.cells] == ["done"]
    early = {"load", "import", "lower", "compile untuned", "reference"}
    assert early.isdisjoint(found[0].stage_s) == made
    assert {"compile", "compare", "export", "validate"} <= found[0].stage_s.keys()


@pytest.mark.slow
def test_a_batch_is_iterated_over_and_may_be_left(folder: Path, database: TuningDatabase) -> None:
    path = plan_of(folder, "loop", {"candidates = 6": "candidates = 40"}, FIRST + 'shapes = ["x=3x32"]\n')
    run = relaxtune.batch(path)
    for event in run:
        if isinstance(event, CandidateEvent):
            break
    assert isinstance(event, CandidateEvent)
    assert event.progress.workload_hash
    (cell,) = stored_cells(database, get_batch(database, "loop").id)
    assert cell.state is CellState.QUEUED
    assert get_batch(database, "loop").outcome == "interrupted"


def test_a_plan_is_shown_without_a_database_and_makes_none(tmp_path: Path, capsys) -> None:
    onnx.save(dense(), tmp_path / "first.onnx")
    plan = tmp_path / "new.toml"
    plan.write_text('[[cells]]\nmodels = ["first.onnx"]\ntargets = ["llvm"]\nshapes = ["x=4x32"]\n', encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["batch", "plan", str(plan)])
    shown = capsys.readouterr().out
    assert int(ended.value.code or 0) == 0
    assert "predicted: tuning unknown, finishing unknown" in " ".join(shown.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.onnx", "new.toml"]


@pytest.mark.slow
def test_a_failed_validation_rejects_its_cell_and_exits_with_3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validate = jobs.validate_written

    def against_first(module: Module, place: Path, model: OnnxModel, *rest: object) -> ValidationReport:
        if model.name != "second":
            return validate(module, place, model, *rest)
        other = load_model(folder / "first.onnx", shapes={"x": (16, 32)})
        # The reference that was made before is of the model itself.
        return validate(module, place, other, *rest[:-1])

    monkeypatch.setattr(jobs, "validate_written", against_first)
    plan = folder / "two.toml"
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


def test_a_cell_of_another_machine_says_so(folder: Path) -> None:
    plan = folder / "gpu.toml"
    text = '[[cells]]\nmodels = ["first.onnx"]\nshapes = ["x=16x32"]\ntargets = ["cuda:sm_90a"]\n'
    plan.write_text(f'database = "none.db"\n{text}', encoding="utf-8")
    if not (result := run_batch(read_plan(plan))).cells[0].facts.error:
        pytest.skip("this machine has the GPU")
    assert "sm_90a is not on this machine" in str(result.cells[0].facts.error)
    assert (result.exit_code, result.tuning) == (1, ())


def test_places_that_cannot_be_written_are_told_before_anything_starts(folder: Path) -> None:
    plan = folder / "taken.toml"
    plan.write_text(PLAN.replace('"made"', '"first.onnx"'), encoding="utf-8")
    with pytest.raises(relaxtune.ArtifactError, match=r"first\.onnx"):
        run_batch(read_plan(plan))
