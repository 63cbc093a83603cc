"""What tune, compile, validate and bench note in the database, and databases over each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import pytest

from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.choose import shipping
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.job_outcomes import artifact_of
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.cli.test_commands import classifier

MODEL_OPTIONS = ("--target", "llvm", "--shape", "x=16x32")


@dataclass(frozen=True)
class Tuned:
    model: Path
    database: Path
    artifact: Path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Tuned:
    folder = tmp_path_factory.mktemp("tuned")
    made = Tuned(folder / "classifier.onnx", folder / "tuning.db", folder / "artifact")
    onnx.save(classifier(), made.model)
    options = ("--trials", 4, "--db", made.database, "--out", made.artifact)
    with pytest.MonkeyPatch.context() as patch:
        # Whether four trials of so small a model gain anything is chance; what chance decides is tested elsewhere.
        patch.setattr(shipping, "_QUESTION", replace(shipping._QUESTION, border=10.0))
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in ("tune", made.model, *MODEL_OPTIONS, *options)])
    assert not ended.value.code
    return made


@pytest.fixture
def relaxtune(capsys) -> Callable[..., object]:
    def run(*arguments: object, code: int = 0) -> object:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert (ended.value.code or 0) == code, captured.err
        return json.loads(captured.out) if not code and "json" in arguments else captured.out + captured.err

    return run


def column(printed: str, title: str) -> str:
    """Return what stands in a column of a printed table, whose cells are broken where the table is too wide."""
    lines = printed.splitlines()
    (titles,) = [[cell.strip() for cell in line.split("┃")] for line in lines if title in line and line.startswith("┃")]
    place = titles.index(title)
    return "".join(line.split("│")[place].strip() for line in lines if line.startswith("│"))


def counts(path: Path) -> tuple[int, int, int]:
    with TuningDatabase.open(path, mode=Mode.READ_ONLY) as database:
        info = database.info()
        return info.artifacts, info.validations, info.benchmarks


def test_tune_notes_artifact_validation_and_latencies_of_its_job(tuned, relaxtune):
    (found,) = relaxtune("db", "artifacts", "--db", tuned.database, "--format", "json")
    (job,) = relaxtune("db", "jobs", "--db", tuned.database, "--format", "json")
    assert (found["model"], found["job_id"], found["location"]) == ("classifier", job["id"], str(tuned.artifact))
    assert found["validation"]["passed"]
    assert found["validation"]["samples"] == 3
    assert 0 < found["validation"]["max_abs"] < 1e-4
    # Where the tuned kernels are no faster in the model, their arm is kept too.
    arms = [arm["arm"] for arm in found["benchmarks"]]
    assert [arm for arm in arms if arm != "tuned, not shipped"] == ["relaxtune", "untuned", "ort"]
    with TuningDatabase.open(tuned.database, mode=Mode.READ_ONLY) as database:
        assert all(len(benchmark.latencies_us) >= 6 for benchmark in database.list_benchmarks())


def test_validate_and_bench_note_the_same_artifact(tuned, relaxtune, tmp_path):
    copy = tmp_path / "copy.db"
    relaxtune("db", "merge", tuned.database, "--db", copy)
    relaxtune("validate", tuned.artifact, "--samples", 1, "--db", copy)
    relaxtune("bench", tuned.artifact, "--runs", 3, "--db", copy)
    (found,) = relaxtune("db", "artifacts", "--db", copy, "--format", "json")
    assert (found["validations"], found["validation"]["samples"]) == (2, 1)
    with TuningDatabase.open(copy, mode=Mode.READ_ONLY) as database:
        last = database.list_benchmarks()[-1]
        assert (last.arm, len(last.latencies_us), json.loads(last.conditions)["runs"]) == ("ort", 3, 3)


def test_artifact_is_noted_with_its_first_result_and_not_without_a_database(tuned, relaxtune, tmp_path):
    before = counts(tuned.database)
    relaxtune("bench", tuned.artifact, "--runs", 1, "--against", "", "--db", tmp_path / "new.db")
    relaxtune("bench", tuned.artifact, "--runs", 1, "--against", "")
    assert counts(tmp_path / "new.db") == (1, 0, 1)
    assert counts(tuned.database) == before
    assert "is empty" in relaxtune("validate", tuned.artifact, "--db", "", code=1)


def test_key_of_an_artifact_depends_on_its_files_alone(tuned):
    manifest: Manifest = load_manifest(tuned.artifact)
    assert manifest.validation is not None
    validated, again = artifact_of(manifest, tuned.artifact), artifact_of(manifest.with_validation({}), Path("other"))
    assert validated.key == again.key
    assert validated.target == target_key(resolve_target("llvm"))
    # As a version that knows one more field of kernels would write the same artifact.
    noted = json.loads(validated.manifest)
    noted["kernels"][0]["colour"] = None
    assert replace(validated, manifest=json.dumps(noted)).key == validated.key
    noted["files"]["model.so"]["sha256"] = "0" * 64
    assert replace(validated, manifest=json.dumps(noted)).key != validated.key


def test_compile_notes_its_artifact_only_when_asked_to(tuned, relaxtune, tmp_path):
    command = ("compile", tuned.model, *MODEL_OPTIONS, "--samples", 1, "--out", tmp_path / "out")
    before = counts(tuned.database)
    relaxtune(*command, "--db", tuned.database)
    assert counts(tuned.database) == before
    relaxtune("db", "merge", tuned.database, "--db", tmp_path / "copy.db")
    # The same files once more: the same artifact, validated again.
    relaxtune(*command, "--db", tmp_path / "copy.db", "--record")
    assert counts(tmp_path / "copy.db") == (before[0], before[1] + 1, before[2])
    other = ("compile", tuned.model, "--target", "llvm", "--shape", "x=8x32", "--out", tmp_path / "other")
    relaxtune(*other, "--db", tmp_path / "copy.db", "--record")
    assert counts(tmp_path / "copy.db") == (before[0] + 1, before[1] + 2, before[2])
    assert "expected a database (--db URL) with --record" in relaxtune(*command, "--record", code=2)


@pytest.mark.slow
def test_shared_database_is_read_named_and_never_written(tuned, relaxtune, tmp_path):
    # Without a comparison, which on a busy machine may find the tuned kernels no faster, and ship the untuned ones.
    colleagues = tmp_path / "colleagues.db"
    searched = ("--trials", 4, "--no-bench", "--no-record", "--samples", 0, "--out", tmp_path / "theirs")
    relaxtune("tune", tuned.model, *MODEL_OPTIONS, *searched, "--db", colleagues)
    content = colleagues.read_bytes()
    mine = tmp_path / "mine.db"
    shared = ("--shared-db", colleagues)
    options = ("--trials", 4, "--db", mine, *shared, "--out", tmp_path / "out", "--no-bench", "--no-record")
    result = relaxtune("tune", tuned.model, *MODEL_OPTIONS, *options, "--format", "json")
    # What the shared one knows counts as known: no fallback is measured again.
    assert all(task["before_us"] is not None for task in result["tuning"]["tasks"])
    with TuningDatabase.open(mine, mode=Mode.READ_ONLY) as database:
        assert {record.route.value for record in database.list_records()} <= {"metaschedule", "template"}
        assert database.info().artifacts == 0
    recorded = [kernel for kernel in result["kernels"] if kernel["record_id"] is not None]
    assert {kernel["database"] for kernel in recorded} <= {f"sqlite:///{colleagues}", f"sqlite:///{mine}"}
    empty = tmp_path / "empty.db"
    relaxtune("db", "init", "--db", empty)
    command = ("compile", tuned.model, *MODEL_OPTIONS, "--samples", 0, "--out", tmp_path / "out")
    layered = relaxtune(*command, "--db", empty, *shared, "--format", "json")
    alone = relaxtune(*command, *shared, "--format", "json")
    (named,) = {kernel["database"] for kernel in layered["kernels"] if kernel["record_id"] is not None}
    assert named == f"sqlite:///{colleagues}"
    assert [kernel["record_id"] for kernel in layered["kernels"]] == [
        kernel["record_id"] for kernel in alone["kernels"]
    ]
    assert f"of{named}" in column(relaxtune(*command, "--db", empty, *shared), "record").replace(" ", "")
    assert colleagues.read_bytes() == content
    assert "each once" in relaxtune(*command, "--db", colleagues, *shared, code=1)


def test_a_command_that_runs_out_of_memory_says_so(relaxtune, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 3.6 TiB for an array")

    monkeypatch.setattr("relaxtune.pipeline.jobs.inspect.inspect_model", refuse)
    told = relaxtune("inspect", "bert-tiny", "--target", "llvm", code=1)
    assert "error: out of memory: Unable to allocate 3.6 TiB for an array" in told
