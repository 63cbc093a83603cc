from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from relaxtune.pipeline.artifact import directory as directory_module
from relaxtune.pipeline.artifact.compile import CompiledModule
from relaxtune.pipeline.artifact.directory import (
    copy_artifact,
    hash_file,
    load_manifest,
    record_validation,
    verify_artifact,
    write_directory,
)
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import ArtifactError
from tests import warm_python

Maker = Callable[[], Path]


def test_artifact_holds_the_module_the_weights_and_the_manifest(artifact: Path, compiled: CompiledModule) -> None:
    assert sorted(path.name for path in artifact.iterdir()) == ["manifest.json", "model.so", "params.safetensors"]
    manifest = verify_artifact(artifact)
    assert manifest.model == "bert-tiny"
    assert manifest.model_sha256 == compiled.lowered.graph.source_sha256
    assert manifest.inputs == compiled.lowered.graph.inputs
    assert manifest.weights == tuple(compiled.lowered.weights)
    assert set(manifest.files) == {"model.so", "params.safetensors"}
    assert {"schedule", "plan_memory", "codegen", "link"} == set(manifest.compile_seconds)
    assert {"tvm", "tvm_ffi", "relaxtune", "onnx"} <= set(manifest.versions)
    assert len(manifest.kernels) == len(compiled.lowered.kernels)
    assert sum(kernel.calls for kernel in manifest.kernels) == sum(map(len, compiled.lowered.kernels.values()))
    assert manifest.validation is None


def test_artifact_is_as_readable_as_other_files(artifact: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    assert artifact.stat().st_mode & 0o777 == 0o777 & ~mask
    assert (artifact / "params.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("name", ["model.so", "params.safetensors"])
def test_verify_names_the_file_when_one_byte_changed(artifact_copy: Maker, name: str) -> None:
    directory = artifact_copy()
    data = bytearray((directory / name).read_bytes())
    data[len(data) // 2] ^= 1
    (directory / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{name} was changed after it was written: expected .* got"):
        verify_artifact(directory)


def test_verify_notices_any_change_of_the_manifest(artifact_copy: Maker) -> None:
    path = artifact_copy() / "manifest.json"
    path.write_text(path.read_text().replace('"model": "bert-tiny"', '"model": "bert-tinY"'))
    with pytest.raises(ArtifactError, match=r"manifest\.json was changed after it was written"):
        verify_artifact(path.parent)


@pytest.mark.parametrize("name", ["model.so", "params.safetensors"])
def test_verify_names_a_missing_file(artifact_copy: Maker, name: str) -> None:
    directory = artifact_copy()
    (directory / name).unlink()
    with pytest.raises(ArtifactError, match=f"lacks its file {name}"):
        verify_artifact(directory)


def test_verify_says_so_when_a_file_cannot_be_read(artifact_copy: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = artifact_copy()

    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr("relaxtune.pipeline.artifact.directory.hash_file", refuse)
    with pytest.raises(ArtifactError, match=r"model\.so cannot be read .*Input/output error"):
        verify_artifact(directory)


def test_load_refuses_an_unknown_format_version(artifact_copy: Maker) -> None:
    path = artifact_copy() / "manifest.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "format_version": 99}))
    with pytest.raises(ArtifactError, match="has format version 99, this relaxtune reads version 1"):
        load_manifest(path.parent)


def test_load_refuses_a_manifest_without_its_fields(artifact_copy: Maker) -> None:
    from relaxtune.pipeline.artifact.manifest import _digest

    path = artifact_copy() / "manifest.json"
    data = {k: v for k, v in json.loads(path.read_text()).items() if k not in {"kernels", "manifest_sha256"}}
    path.write_text(json.dumps({**data, "manifest_sha256": _digest(data)}))
    with pytest.raises(ArtifactError, match=r"kernels: this key is missing. The artifact is damaged; compile it"):
        load_manifest(path.parent)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), ("[]", "is not the manifest of an artifact"), ("{}", "is not the manifest")],
)
def test_load_refuses_what_is_no_manifest(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=message):
        load_manifest(tmp_path)


def test_load_says_what_is_there_instead_of_an_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        load_manifest(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"has no manifest\.json"):
        load_manifest(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="is a file"):
        load_manifest(tmp_path / "file")
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_manifest(tmp_path)


def test_verify_refuses_a_manifest_that_points_outside(artifact: Path, tmp_path: Path) -> None:
    manifest = load_manifest(artifact)
    escaping = manifest.with_files({"../outside": manifest.files["model.so"]})
    (tmp_path / "manifest.json").write_text(escaping.to_json())
    with pytest.raises(ArtifactError, match="not a file of the artifact itself"):
        verify_artifact(tmp_path)


def test_write_replaces_an_artifact_and_leaves_nothing_beside_it(
    artifact_copy: Maker, compiled: CompiledModule
) -> None:
    directory = artifact_copy()
    record_validation(directory, {"passed": True})
    write_artifact(compiled, directory)
    assert verify_artifact(directory).validation is None
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_weights_that_two_artifacts_share_are_read_once(
    artifact_copy: Maker, compiled: CompiledModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, read = artifact_copy(), []
    monkeypatch.setattr(directory_module, "hash_file", lambda path: read.append(path.name) or hash_file(path))
    write_artifact(compiled, tmp_path / "second", beside=(compiled, first))
    assert read == ["model.so"]
    monkeypatch.undo()
    assert verify_artifact(tmp_path / "second").files["params.safetensors"].bytes
    loaded = Module.load(first)
    assert Module.load(tmp_path / "second", beside=loaded)._weights == loaded._weights
    other = tmp_path / "copy" / "artifact"
    shutil.copytree(first, other)
    assert all(a is not b for a, b in zip(Module.load(other, beside=loaded)._weights, loaded._weights, strict=True))


def test_write_leaves_alone_what_is_no_artifact(tmp_path: Path, compiled: CompiledModule) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="exists and is not an artifact"):
        write_artifact(compiled, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ArtifactError, match="exists and is not a directory"):
        write_artifact(compiled, tmp_path / "notes.txt")


def test_write_takes_an_empty_directory(tmp_path: Path, artifact: Path) -> None:
    destination = tmp_path / "empty"
    destination.mkdir()

    def write_files(directory: Path) -> Manifest:
        (directory / "model.so").write_bytes(b"code")
        (directory / "params.safetensors").write_bytes(b"weights")
        return load_manifest(artifact)

    written = write_directory(destination, write_files)
    assert verify_artifact(destination) == written
    assert written.files["model.so"].bytes == 4


def test_nothing_is_written_when_the_disk_is_full(tmp_path: Path, artifact_copy: Maker) -> None:
    directory = artifact_copy()
    before = verify_artifact(directory)

    def write_files(staging: Path) -> Manifest:
        (staging / "model.so").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ArtifactError, match="cannot be written: No space left on device; nothing was left"):
        write_directory(directory, write_files)
    assert verify_artifact(directory) == before
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_nothing_is_written_when_the_folder_cannot_be_made(tmp_path: Path, compiled: CompiledModule) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_artifact(compiled, tmp_path / "file" / "out")


def test_the_old_artifact_comes_back_when_the_rename_fails(
    artifact_copy: Maker, compiled: CompiledModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = artifact_copy()
    before = verify_artifact(directory)

    def fail(first: Path, second: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("relaxtune.pipeline.artifact.directory._exchange", fail)
    with pytest.raises(ArtifactError, match="Device or resource busy"):
        write_artifact(compiled, directory)
    monkeypatch.undo()
    assert verify_artifact(directory) == before
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_record_validation_keeps_the_artifact_valid(artifact_copy: Maker) -> None:
    directory = artifact_copy()
    record_validation(directory, {"passed": True, "outputs": []})
    assert verify_artifact(directory).validation == {"passed": True, "outputs": []}
    assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", "model.so", "params.safetensors"]


def test_a_file_that_the_manifest_does_not_know_is_refused(artifact_copy: Maker) -> None:
    directory = artifact_copy()
    (directory / "extra.so").write_bytes(b"code")
    with pytest.raises(ArtifactError, match=r"holds what its manifest does not know: extra\.so"):
        verify_artifact(directory)


@pytest.mark.parametrize("left_out", ["model.so", "params.safetensors"])
def test_a_manifest_without_the_hash_of_a_file_is_refused(artifact_copy: Maker, left_out: str) -> None:
    directory = artifact_copy()
    manifest = load_manifest(directory)
    (directory / "manifest.json").write_text(
        manifest.with_files({name: entry for name, entry in manifest.files.items() if name != left_out}).to_json()
    )
    with pytest.raises(ArtifactError, match=f"has no hash of {left_out}"):
        load_manifest(directory)


@pytest.mark.parametrize(
    "value", ["NaN", '"\\ud800"', "[" * 100_000, '{"a":' * 100_000], ids=["nan", "surrogate", "lists", "objects"]
)
def test_json_that_cannot_be_read_or_hashed_is_refused(tmp_path: Path, value: str) -> None:
    text = f'{{"format": "relaxtune-artifact", "format_version": 1, "seed": {value}}}'
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match="is not valid JSON"):
        load_manifest(tmp_path)


def test_a_reader_always_finds_an_artifact_while_it_is_replaced(artifact_copy: Maker) -> None:
    """A kill at any moment leaves what a reader sees at that moment."""
    directory = artifact_copy()
    write = "import sys; from pathlib import Path; from relaxtune.pipeline.artifact.directory import _move_into_place\n"
    other = directory.with_name("other")
    shutil.copytree(directory, other)
    write += "import shutil\nfor n in range(60):\n    shutil.copytree(sys.argv[2], sys.argv[1] + '.s')\n"
    write += "    _move_into_place(Path(sys.argv[1] + '.s'), Path(sys.argv[1]))\n"
    with warm_python.Popen([sys.executable, "-c", write, str(directory), str(other)]) as writer:
        seen = 0
        while writer.poll() is None:
            seen += (directory / "manifest.json").exists()
            assert directory.is_dir()
    assert writer.returncode == 0
    assert seen
    assert verify_artifact(directory) == verify_artifact(other)
    assert not directory.with_name(directory.name + ".s").exists()


@pytest.mark.slow
def test_several_writers_of_one_place_take_turns(artifact_copy: Maker) -> None:
    """Each of 4 processes moves 25 artifacts to a place that is free at first; none fails, and no lock is left."""
    source = artifact_copy()
    destination = source.with_name("place")
    write = "import sys; from pathlib import Path; from relaxtune.pipeline.artifact.directory import copy_artifact\n"
    write += "for _ in range(25):\n    copy_artifact(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    command = [sys.executable, "-c", write, str(source), str(destination)]
    writers = [warm_python.Popen(command) for _ in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert verify_artifact(destination) == verify_artifact(source)
    assert sorted(path.name for path in source.parent.iterdir()) == [source.name, "place"]


def test_the_log_names_an_artifact_of_another_model_that_is_replaced(
    artifact_copy: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    directory = artifact_copy()
    manifest = replace(load_manifest(directory), source="/models/first/model.onnx")

    def write_files(staging: Path) -> Manifest:
        for name in manifest.files:
            shutil.copyfile(directory / name, staging / name)
        return manifest

    place = directory.with_name("place")
    write_directory(place, write_files)
    assert "replaced" not in caplog.text
    copy_artifact(directory, place)
    assert f"the artifact in {place} was replaced: it was of another model, /models/first/model.onnx" in caplog.text


def test_what_a_killed_writer_left_goes_with_the_next_write(artifact_copy: Maker, compiled: CompiledModule) -> None:
    directory = artifact_copy()
    left, young = (directory.parent / f".{directory.name}.staging-{name}" for name in ("left", "young"))
    for path in (left, young):
        path.mkdir()
        (path / "model.so").write_bytes(b"half")
    os.utime(left, (0, 0))
    write_artifact(compiled, directory)
    assert sorted(path.name for path in directory.parent.iterdir()) == [young.name, directory.name]
