"""An artifact is made again, the same bit for bit, from its manifest and its records; what changed is named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.errors import ArtifactError, UsageError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.registry.bundle import write_bundle
from relaxtune.pipeline.registry.rebuild import rebuild_artifact
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.artifact.test_compile import keep, matmul, parallel_trace, record_of

SHAPES = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 32))


@pytest.fixture(scope="module")
def place(tasks, llvm_target, tmp_path_factory) -> tuple[Path, Path]:
    """An artifact with a kernel of a record, and the database of that record."""
    folder = tmp_path_factory.mktemp("rebuild")
    database, task = folder / "records.db", matmul(tasks)
    record = record_of(task, llvm_target, decision=parallel_trace(task), latencies_us=(3.0,))
    with TuningDatabase.open(database) as opened:
        keep(opened, task, record)
    compile_model(ModelRequest("bert-tiny", SHAPES, "llvm"), folder / "artifact", database=database, samples=0)
    routes = [kernel.route for kernel in load_manifest(folder / "artifact").kernels]
    assert routes.count("metaschedule") == 1
    return folder / "artifact", database


def test_an_artifact_is_made_again_bit_for_bit(place, tmp_path) -> None:
    artifact, database = place
    made = rebuild_artifact(artifact, tmp_path / "again", database=database)
    assert made.same
    assert made.outputs is not None
    assert all(output.identical == 1.0 for output in made.outputs)
    assert all(made.same_files.values()), made.same_files
    again, first = load_manifest(tmp_path / "again"), load_manifest(artifact)
    assert [kernel.kernel_hash for kernel in again.kernels] == [kernel.kernel_hash for kernel in first.kernels]
    assert again.memory == first.memory


def test_a_record_that_is_not_there_is_named(place, tmp_path) -> None:
    artifact, _ = place
    with pytest.raises(ArtifactError, match=r"1 kernels: \w+ \(metaschedule\): its record 1 is in a database; name it"):
        rebuild_artifact(artifact, tmp_path / "again")
    with TuningDatabase.open(tmp_path / "empty.db"):
        pass
    with pytest.raises(ArtifactError, match=r"empty.db has no record of decision [0-9a-f]{12} \(it was record 1\)"):
        rebuild_artifact(artifact, tmp_path / "again", database=tmp_path / "empty.db")
    assert not (tmp_path / "again").exists()


def test_what_changed_is_named(place, tmp_path, capsys) -> None:
    artifact, database = place
    altered = Path(shutil.copytree(artifact, tmp_path / "altered"))
    manifest = load_manifest(artifact)
    first, *others = manifest.kernels
    other = replace(
        manifest,
        kernels=(replace(first, kernel_hash="v2:other"), *others),
        versions={**manifest.versions, "tvm": "0.1"},
    )
    (altered / "manifest.json").write_text(other.to_json(), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["artifact", "rebuild", str(altered), "--db", str(database), "--format", "json"])
    assert ended.value.code == 1
    written = capsys.readouterr()
    assert '"same": false' in written.out
    assert f"the artifact is another: {first.function}: kernel hash v2:other -> {first.kernel_hash}" in written.err
    assert "Versions that differ: tvm 0.1 ->" in written.err


@pytest.mark.slow
def test_a_bundle_has_the_records_of_the_artifacts_and_makes_the_same_kernels(place, tmp_path, capsys) -> None:
    artifact, database = place
    bundle = tmp_path / "bundle.db"
    with TuningDatabase.open(database) as opened:
        (needed,) = opened.list_records()
        job = opened.start_job(model="m", model_sha256="0" * 64, target=needed.target)
        opened.record_measurement(replace(needed, decision="[[], []]", latencies_us=(9.0,), job_id=job.id))
    with pytest.raises(SystemExit) as ended:
        main(["db", "bundle", str(artifact), "--db", str(database), "--out", str(bundle), "--format", "json"])
    assert not ended.value.code
    assert '"records": 1' in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.db"]
    with TuningDatabase.open(bundle, mode=Mode.READ_ONLY) as opened:
        assert [record.decision for record in opened.list_records()] == [needed.decision]
    compile_model(ModelRequest("bert-tiny", SHAPES, "llvm"), tmp_path / "there", database=bundle, samples=0)
    hashes = [[one.kernel_hash for one in load_manifest(place).kernels] for place in (artifact, tmp_path / "there")]
    assert hashes[0] == hashes[1]
    with pytest.raises(UsageError, match=r"bundle.db exists; expected a new file"):
        write_bundle([artifact], database, bundle)
    with TuningDatabase.open(tmp_path / "other.db"):
        pass
    with pytest.raises(
        ArtifactError, match=r"other.db has other records than the manifests name for 1 kernels: .*record 1"
    ):
        write_bundle([artifact], tmp_path / "other.db", tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()


def test_another_model_is_refused(place, tmp_path) -> None:
    artifact, database = place
    with pytest.raises(UsageError, match="is not the model this artifact was compiled from"):
        rebuild_artifact(artifact, tmp_path / "again", database=database, source="bert-tiny-1-layers")
