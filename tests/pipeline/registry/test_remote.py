"""A store at a URL: what is there is whole, copies are checked, and one process gives way to another."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest

from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.registry.registry import Registry, open_store
from relaxtune.pipeline.registry.remote import RemoteStore
from relaxtune.tuning_db.store import TuningDatabase


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return RemoteStore(f"file://{tmp_path}/store")


def test_another_machine_has_the_same_bytes_and_runs_them(
    store: RemoteStore,
    artifact: Path,
    bert_inputs: dict[str, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        key = Registry(store.name, database).tag(artifact, "prod").artifact_key
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other-machine"))
    there = RemoteStore(store.name)
    copy = there.path_of(there.links()["prod"])
    assert copy.is_relative_to(tmp_path / "other-machine")
    assert copy.name == key
    with pytest.raises(SystemExit, match="0"):
        main(["artifact", "fetch", "prod", "--store", store.name, "--out", str(tmp_path / "fetched")])
    for path in artifact.iterdir():
        assert (copy / path.name).read_bytes() == (tmp_path / "fetched" / path.name).read_bytes() == path.read_bytes()
    for name, array in Module.load(artifact).run(bert_inputs).items():
        assert Module.load(copy).run(bert_inputs)[name].tobytes() == array.tobytes()


def test_an_upload_that_ends_early_is_no_artifact_and_is_mended_by_the_next(
    store: RemoteStore, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = type(fsspec.filesystem("file"))
    put = files.put_file

    def fail(self: object, source: str, place: str, **options: object) -> None:
        if source.endswith("params.safetensors"):
            raise OSError("the line is down")
        put(self, source, place, **options)

    monkeypatch.setattr(files, "put_file", fail)
    with pytest.raises(ArtifactError, match="cannot be written: OSError: the line is down; see that the URL"):
        store.put(artifact)
    assert store.list_keys() == []
    monkeypatch.setattr(files, "put_file", lambda self, source, place, **_: Path(place).write_bytes(b"half"))
    with pytest.raises(ArtifactError, match=r"has 4 bytes, expected \d+; add it again"):
        store.put(artifact)
    assert store.list_keys() == []
    monkeypatch.setattr(files, "put_file", put)
    key = store.put(artifact).key
    assert store.list_keys() == [key]
    assert load_manifest(store.path_of(key)) == load_manifest(artifact)
    assert not list((tmp_path / "store" / "using").iterdir())


@pytest.mark.parametrize("damaged", ["model.so", "params.safetensors", "manifest.json"])
def test_what_is_not_what_was_put_there_is_refused_and_not_kept(
    store: RemoteStore, artifact: Path, tmp_path: Path, damaged: str
) -> None:
    key = store.put(artifact).key
    path = tmp_path / "store" / "objects" / key / damaged
    path.write_bytes(path.read_bytes().replace(b"e", b"f", 1))
    with pytest.raises(ArtifactError):
        store.path_of(key)
    assert not list((tmp_path / "cache").rglob("objects/*"))


def test_an_artifact_under_the_key_of_another_is_refused(store: RemoteStore, artifact: Path, tmp_path: Path) -> None:
    place = tmp_path / "store" / "objects"
    (place / store.put(artifact).key).rename(place / ("0" * 64))
    with pytest.raises(ArtifactError, match=r"is artifact \w{12}; the store is damaged"):
        store.path_of("0" * 64)


def test_collecting_and_adding_give_way_to_each_other(store: RemoteStore, artifact: Path) -> None:
    other = RemoteStore(store.name)
    with store.lock(alone=True):
        with pytest.raises(ArtifactError, match=r"is in use: \S+, process \d+, .* collects; say it again when"):
            other.put(artifact)
        with pytest.raises(ArtifactError, match="collects"), other.lock(alone=True):
            pass
    other.put(artifact)
    said = r"adds or tags; .* remove /.*/using/\w+ if that process was killed"
    with (
        store.lock(),
        other.lock(),  # two may add
        pytest.raises(ArtifactError, match=said),
        RemoteStore(store.name).lock(alone=True),
    ):
        pass
    with store.lock(alone=True):
        pass


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("what://bucket/store", "store what://bucket/store cannot be opened: ValueError: Protocol not known: what"),
        ("s3://user:secret@bucket/store", r"store s3://user:\*\*\*@bucket/store cannot be opened: ImportError"),
    ],
)
def test_a_url_that_cannot_be_opened_is_named_without_its_password(url: str, said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        open_store(url)


def test_without_fsspec_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ArtifactError, match=r"needs fsspec; install it: pip install 'relaxtune\[remote\]'"):
        open_store("memory://store")
