"""The commands from end to end on a small model: what they print, write and return."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from relaxtune.pipeline.choose import shipping
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.tuning.local.measuring_process import MeasuringProcess
from relaxtune.pipeline.tuning.measure.backend import Outcome
from relaxtune.tuning_db.records import Status
from relaxtune.tuning_db.store import TuningDatabase
from tests.command_line import Ended
from tests.pipeline.cli.classifier import CLASSES, classifier

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Workspace:
    model: Path
    database: Path
    artifact: Path
    tuned: Ended


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    """A model tuned once, by the command, with its output kept."""
    folder = tmp_path_factory.mktemp("commands")
    model = folder / "classifier.onnx"
    model.write_bytes(classifier().SerializeToString())
    database, artifact = folder / "tuning.db", folder / "artifact"
    command = ["tune", model, "--target", "llvm", "--shape", "x=16x32", "--trials", 4, "--db", database]
    with pytest.MonkeyPatch.context() as patch:
        printed: dict[str, list[str]] = {"stdout": [], "stderr": []}
        for stream, lines in printed.items():
            patch.setattr(f"sys.{stream}", _Recorder(lines))
        # Whether four trials of so small a model gain anything is chance; what chance decides is tested elsewhere.
        patch.setattr(shipping, "_QUESTION", replace(shipping._QUESTION, border=10.0))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in [*command, "--out", artifact, "--format", "json"]])
    outcome = Ended(int(ended.value.code or 0), "".join(printed["stdout"]), "".join(printed["stderr"]))
    return Workspace(model, database, artifact, outcome)


class _Recorder:
    """A text stream that keeps what is written to it."""

    encoding = "utf-8"

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def write(self, text: str) -> int:
        self._lines.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_tune_reports_tasks_artifact_validation_and_latencies(workspace) -> None:
    assert workspace.tuned.code == 0, workspace.tuned.stderr
    data = workspace.tuned.data
    assert data["tuning"]["candidates"] == 4
    tasks = data["tuning"]["tasks"]
    assert {node for task in tasks for node in task["onnx_nodes"]} >= {"first/MatMul", "second/MatMul", "scores"}
    assert all(task["before_us"] > 0 and task["after_us"] <= task["before_us"] for task in tasks)
    assert data["validation"]["passed"]
    assert {arm["name"] for arm in data["benchmark"]["arms"]} >= {"relaxtune", "untuned", "ort"}
    assert bool(data["without_record"]) != data["shipping"]["tuned"]


def test_tune_shows_progress_and_stages_on_stderr(workspace) -> None:
    assert "tuning 4/4" in workspace.tuned.stderr
    assert "INFO compile:" in workspace.tuned.stderr


def test_tune_records_every_candidate_under_its_job(workspace) -> None:
    with TuningDatabase.open(workspace.database) as database:
        (job,) = database.list_jobs()
        assert job.id == workspace.tuned.data["job"]
        assert job.outcome == "done"
        assert job.finished_at is not None
        tasks = workspace.tuned.data["tuning"]["tasks"]
        measured = sum(task["valid"] + task["failed"] for task in tasks) + len(tasks)
        # Contenders of a final are measured, and recorded, twice.
        records = database.list_records()
        # The model has a record of its own if its untuned kernels ship.
        hashes = {task["workload_hash"] for task in tasks}
        kept = {(one.workload_hash, one.route, one.decision) for one in records if one.workload_hash in hashes}
        assert len(kept) == measured


@pytest.mark.slow
def test_tuning_again_measures_nothing_unless_forced(relaxtune, workspace, tmp_path) -> None:
    database = tmp_path / "copy.db"
    shutil.copyfile(workspace.database, database)
    command = ["tune", workspace.model, "--target", "llvm", "--shape", "x=16x32", "--trials", 1, "--no-bench"]
    options = ["--db", database, "--samples", 0, "--format", "json"]
    again = relaxtune(*command, *options, "--out", tmp_path / "again")
    assert again.code == 0
    tasks = again.data["tuning"]["tasks"]
    valid = sum(task["valid"] for task in workspace.tuned.data["tuning"]["tasks"])
    assert sum(task["known"] for task in tasks) == valid > 0
    assert again.data["tuning"]["candidates"] == 0
    assert all("an earlier run did the same" in task["ended"] for task in tasks)
    forced = relaxtune(*command, *options, "--mode", "force", "--effort", "quick", "--out", tmp_path / "forced")
    assert forced.data["tuning"]["candidates"] == 1


def test_tune_exits_4_when_no_candidate_could_be_built(relaxtune, workspace, tmp_path, monkeypatch) -> None:
    # Without a linker on the path no candidate can be built.
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["tune", workspace.model, "--target", "llvm", "--shape", "x=7x32", "--trials", 2, "--no-bench"]
    options = ["--db", tmp_path / "tuning.db", "--out", tmp_path / "artifact"]
    outcome = relaxtune(*command, *options)
    assert outcome.code == 4, outcome.stderr
    assert "Nothing valid was measured" in outcome.stderr
    assert "build_error" in outcome.stderr
    assert "The untuned artifact cannot be made either" in outcome.stderr
    assert not (tmp_path / "artifact").exists()
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        (job,) = database.list_jobs()
        assert job.outcome == "nothing measured"
        statuses = {record.status for record in database.list_records()}
        assert statuses == {Status.BUILD_ERROR}


def test_tune_writes_the_untuned_artifact_when_nothing_valid_was_measured(
    relaxtune, workspace, tmp_path, monkeypatch
) -> None:
    late = Outcome(Status.TIMEOUT, error="killed after 1 s")
    monkeypatch.setattr(MeasuringProcess, "_outcome_of", lambda *_: late)
    command = ["tune", workspace.model, "--target", "llvm", "--shape", "x=7x32", "--trials", 1, "--no-bench"]
    options = ["--db", tmp_path / "tuning.db", "--out", tmp_path / "artifact"]
    outcome = relaxtune(*command, *options)
    assert outcome.code == 4, outcome.stderr
    told = " ".join(outcome.stderr.split())
    assert "Nothing valid was measured" in told
    assert f"The untuned artifact was written: {tmp_path / 'artifact'}" in told
    assert json.loads((tmp_path / "artifact/manifest.json").read_text())["validation"]["passed"]


def test_tune_refuses_a_device_that_is_not_here(relaxtune, workspace, tmp_path) -> None:
    options = ["--db", tmp_path / "tuning.db", "--out", tmp_path / "artifact"]
    outcome = relaxtune("tune", workspace.model, "--target", "cuda:sm_75", "--shape", "x=7x32", *options)
    assert outcome.code == 1
    assert "sm_75 is not on this machine" in outcome.stderr
    assert "relaxtune compile" in outcome.stderr


def test_compile_takes_the_same_records(relaxtune, workspace, tmp_path) -> None:
    command = ["compile", workspace.model, "--target", "llvm", "--shape", "x=16x32", "--db", workspace.database]
    outcome = relaxtune(*command, "--out", tmp_path / "again", "--format", "json")
    assert outcome.code == 0
    records = {kernel["function"]: kernel["record_id"] for kernel in outcome.data["kernels"]}
    if workspace.tuned.data["shipping"]["tuned"]:
        with TuningDatabase.open(workspace.database) as database:
            assert all(database.get_record(number).status is Status.OK for number in records.values())
        assert outcome.data["without_record"] == []
    else:  # The comparison found no sure gain, on a busy machine perhaps.
        assert set(records.values()) == {None}
    assert outcome.data["validation"]["passed"]


def test_compile_without_records_names_the_tasks_and_takes_the_fallback(relaxtune, workspace, tmp_path) -> None:
    command = ["compile", workspace.model, "--target", "llvm", "--shape", "x=3x32", "--out", tmp_path / "a"]
    outcome = relaxtune(*command, "--format", "json")
    assert outcome.code == 0
    assert {kernel["route"] for kernel in outcome.data["kernels"]} == {"fallback"}
    assert len(outcome.data["without_record"]) == len(outcome.data["kernels"])
    assert outcome.data["launches"] is None
    assert outcome.data["memory"]["planned_bytes"] > 0
    assert "tasks without a record" in outcome.stderr


def test_compile_prints_tables_by_default(relaxtune, workspace, tmp_path) -> None:
    command = ["compile", workspace.model, "--target", "llvm", "--shape", "x=3x32", "--out", tmp_path / "a"]
    outcome = relaxtune(*command)
    assert outcome.code == 0
    assert "kernels of" in outcome.stdout
    assert "first/MatMul" in outcome.stdout
    assert "MB of planned memory" in outcome.stdout
    assert "validation of classifier: passed" in outcome.stdout


def test_compile_writes_the_ir_of_each_phase_when_asked(relaxtune, workspace, tmp_path) -> None:
    command = ["compile", workspace.model, "--target", "llvm", "--shape", "x=3x32", "--out", tmp_path / "a"]
    assert relaxtune(*command, "--dump-ir", tmp_path / "ir").code == 0
    names = sorted(path.name for path in (tmp_path / "ir").iterdir())
    assert len(names) >= 5
    assert names[0].startswith("00-")


def test_embedded_weights_need_no_parameter_file(relaxtune, workspace, tmp_path) -> None:
    command = ["compile", workspace.model, "--target", "llvm", "--shape", "x=3x32", "--out", tmp_path / "a"]
    outcome = relaxtune(*command, "--embed-weights", "--format", "json")
    assert outcome.code == 0
    assert outcome.data["validation"]["passed"]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"manifest.json", "model.so"}


def test_run_gives_what_onnx_runtime_gives(relaxtune, workspace, tmp_path) -> None:
    import onnxruntime

    x = np.random.default_rng(1).standard_normal((16, 32)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    arguments = ["--inputs", tmp_path / "x.npz", "--outputs", tmp_path / "y.npz"]
    outcome = relaxtune("run", workspace.artifact, *arguments, "--format", "json")
    assert outcome.data == {"scores": {"dtype": "float32", "shape": [16, CLASSES]}}
    (expected,) = onnxruntime.InferenceSession(workspace.model.read_bytes()).run(None, {"x": x})
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["scores"], expected, rtol=1e-4, atol=1e-6)


def test_run_says_when_outputs_cannot_be_written(relaxtune, workspace, tmp_path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((16, 32), np.float32))
    outputs = tmp_path / "missing" / "y.npz"
    outcome = relaxtune("run", workspace.artifact, "--inputs", tmp_path / "x.npz", "--outputs", outputs)
    assert outcome.code == 1
    assert "y.npz cannot be written" in outcome.stderr


def test_validate_finds_the_model_by_itself_and_stores_the_result(relaxtune, workspace) -> None:
    outcome = relaxtune("validate", workspace.artifact, "--samples", 2, "--format", "json")
    assert outcome.code == 0
    assert outcome.data["samples"] == 2
    stored = json.loads((workspace.artifact / "manifest.json").read_text())["validation"]
    assert stored["passed"]
    assert stored["samples"] == 2


def test_validate_exits_3_when_the_tolerance_is_not_met(relaxtune, workspace) -> None:
    outcome = relaxtune("validate", workspace.artifact, "--rtol", 0, "--atol", 1e-12)
    assert outcome.code == 3
    assert "FAILED" in outcome.stdout
    assert "scores" in outcome.stderr
    assert relaxtune("validate", workspace.artifact).code == 0


def test_validate_refuses_another_model(relaxtune, workspace, tmp_path) -> None:
    other = tmp_path / "classifier.onnx"
    other.write_bytes(classifier(bias=0.25).SerializeToString())
    outcome = relaxtune("validate", workspace.artifact, "--model", other)
    assert outcome.code == 2
    assert "is not the model this artifact was compiled from" in outcome.stderr


def test_bench_measures_against_onnx_runtime(relaxtune, workspace) -> None:
    outcome = relaxtune("bench", workspace.artifact, "--runs", 5, "--warmup", 1, "--format", "json")
    assert outcome.code == 0
    arms = {arm["name"]: arm for arm in outcome.data["arms"]}
    assert set(arms) == {"relaxtune", "ort"}
    assert all(len(arm["latencies_ms"]) == 5 for arm in arms.values())


def test_bench_prints_a_table_and_refuses_unknown_peers(relaxtune, workspace) -> None:
    assert "latency, ms" in relaxtune("bench", workspace.artifact, "--runs", 2, "--warmup", 0).stdout
    outcome = relaxtune("bench", workspace.artifact, "--against", "abacus")
    assert outcome.code == 2
    assert "abacus" in outcome.stderr


def test_bench_sends_calls_at_a_rate(relaxtune, workspace) -> None:
    words = ("bench", workspace.artifact, "--rate", 40, "--duration", 0.5, "--arrivals", "bursty", "--warmup", 1)
    data = relaxtune(*words, "--slo-ms", 1e6, "--price", 2, "--streams", 2, "--format", "json").data
    assert (data["callers"], data["load"]["arrivals"], len(data["latencies_ms"]) % 8) == (2, "bursty", 0)
    assert data["goodput_per_s"] == data["calls_per_s"] > 0
    assert data["cost_of_a_million"] == pytest.approx(2e6 / 3600 / data["goodput_per_s"])
    shown = relaxtune(*words).stdout
    assert "latency from the planned arrival" in shown
    assert "only GPUs have a counter" in shown
    told = relaxtune("bench", workspace.artifact, "--runs", 1, "--warmup", 0, "--against", "", "--price", 2).stdout
    assert "a million calls of relaxtune, one after another: " in told
    for wrong, said in (
        (("--slo-ms", 5), "go with --rate"),
        (("--rate", 5, "--arrivals", "uniform"), "expected poisson or bursty"),
        (("--rate", 5, "--batch-sweep", "1,2"), "--rate takes sizes from --dim"),
    ):
        outcome = relaxtune("bench", workspace.artifact, *wrong)
        assert (outcome.code, said in " ".join(outcome.stderr.split())) == (2, True)


def test_db_top_lists_the_best_record_of_each_task(relaxtune, workspace) -> None:
    outcome = relaxtune("db", "top", "--db", workspace.database, "--format", "json")
    tuned = {task["task"]: task["after_us"] for task in workspace.tuned.data["tuning"]["tasks"]}
    best = {line["name"]: line["best"]["latency_us"] for line in outcome.data}
    assert set(best) == set(tuned)
    assert all(best[name] <= latency * 1.001 for name, latency in tuned.items())
    assert "matmul" in relaxtune("db", "top", "--db", workspace.database, "--family", "matmul").stdout


def test_db_query_filters_records(relaxtune, workspace) -> None:
    options = ["--db", workspace.database, "--route", "fallback", "--since", "2020-01-01", "--format", "json"]
    lines = relaxtune("db", "query", *options).data
    assert lines
    assert {line["record"]["route"] for line in lines} == {"fallback"}
    assert relaxtune("db", "query", "--db", workspace.database, "--until", "2020-01-01", "--format", "json").data == []
    assert "classifier" in relaxtune("db", "query", "--db", workspace.database, "--model", "classifier").stdout


def test_db_workloads_and_info_count(relaxtune, workspace) -> None:
    lines = relaxtune("db", "workloads", "--db", workspace.database, "--format", "json").data
    assert sum(line["records"] for line in lines) > 4
    info = relaxtune("db", "info", "--db", workspace.database, "--format", "json").data
    assert info["workloads"] == len(lines)
    assert sum(info["records_by_route"].values()) == info["records"]
    assert "records ok" in relaxtune("db", "info", "--db", workspace.database).stdout


def test_db_upgrade_leaves_a_current_database_alone(relaxtune, workspace) -> None:
    data = relaxtune("db", "upgrade", "--db", workspace.database, "--format", "json").data
    assert data["before"] == data["after"]


def test_db_info_does_not_create_a_database(relaxtune, tmp_path) -> None:
    outcome = relaxtune("db", "info", "--db", tmp_path / "none.db")
    assert outcome.code == 1
    assert "none.db" in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(relaxtune) -> None:
    outcome = relaxtune("compile", "no-such-model", "--target", "llvm", "--debug")
    assert outcome.code == 1
    assert "Traceback" in outcome.stderr
    assert "no-such-model" in outcome.stderr


def test_json_target_needs_an_output_directory(relaxtune) -> None:
    outcome = relaxtune("compile", "bert-tiny", "--target", '{"kind": "llvm"}')
    assert outcome.code == 2
    assert "--out" in outcome.stderr
