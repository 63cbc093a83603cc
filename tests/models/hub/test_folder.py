"""Folders in the hub's layout and names of repositories: what is found, what is kept, what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import onnx
import pytest

from relaxtune.models import get_preset, load_model, save_model
from relaxtune.models.errors import ModelFileError, UnknownModelError, UnsupportedModelError
from relaxtune.models.hub.folder import model_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "relaxtune" / "models"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as the hub has it, with an ONNX file, and a pooling."""
    made = tmp_path / "tiny-encoder"
    for name in ("onnx", "1_Pooling"):
        (made / name).mkdir(parents=True)
    shapes = {spec.name: spec.shape for spec in get_preset("bert-tiny").inputs}
    save_model(load_model("bert-tiny", shapes=shapes), made / "onnx" / "model.onnx")
    modules = [{"path": "", "type": "s.Transformer"}, {"path": "1_Pooling", "type": "s.Pooling"}]
    (made / "modules.json").write_text(json.dumps(modules))
    (made / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (made / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    (made / "tokenizer.json").write_text('{"truncation": null}')
    return made


def test_model_path_a_folder_is_pooled_and_kept_by_content(folder: Path, cache: Path) -> None:
    model = load_model(folder)
    assert (model.name, [one.name for one in model.outputs]) == ("tiny-encoder", ["sentence_embedding"])
    assert model.path is not None
    assert model.path.parent.parent == cache
    tokenizer = json.loads((model.path.parent / "tokenizer.json").read_text())
    assert tokenizer["truncation"]["max_length"] == 20
    changed = model.path.stat().st_mtime_ns
    assert model_path(str(folder)) == model.path
    assert model.path.stat().st_mtime_ns == changed
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert model_path(folder) != model.path
    assert len(list(cache.iterdir())) == 2


def test_onnx_file_without_pooling_is_used_where_it_is(folder: Path, cache: Path) -> None:
    (folder / "modules.json").unlink()
    assert model_path(folder) == folder / "onnx" / "model.onnx"
    (folder / "onnx" / "model.onnx").rename(folder / "bert.onnx")
    assert model_path(folder) == folder / "bert.onnx"
    assert not cache.exists()
    shutil.copyfile(folder / "bert.onnx", folder / "other.onnx")
    with pytest.raises(ModelFileError, match=r"several ONNX files .* \(bert\.onnx, other\.onnx\)"):
        model_path(folder)
    (folder / "other.onnx").rename(folder / "onnx" / "decoder_model_merged.onnx")
    assert model_path(folder) == folder / "onnx"


def test_folder_that_cannot_be_kept_says_where(folder: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    with pytest.raises(ModelFileError, match="name another place by XDG_CACHE_HOME"):
        model_path(folder)


def test_folder_of_weights_needs_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"torch and transformers .* pip install 'relaxtune\[export\]'"):
        load_model(tmp_path)


def test_name_of_a_repository_needs_a_form_and_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownModelError, match=r"hf:a/b/c names no repository; expected hf:ORG/NAME"):
        load_model("hf:a/b/c")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedModelError, match=r"hf:org/name needs huggingface_hub: pip install"):
        load_model("hf:org/name")


def test_damaged_model_path_a_folder_is_named(folder: Path) -> None:
    (folder / "onnx" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ModelFileError, match="is not an ONNX model"):
        model_path(folder)


def test_embedding_of_another_opset_is_valid(folder: Path) -> None:
    onnx.checker.check_model(onnx.load(model_path(folder)), full_check=True)
