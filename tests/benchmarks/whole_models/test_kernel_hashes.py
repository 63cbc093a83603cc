"""benchmarks.whole_models.kernel_hashes: the same tree gives the same hashes, and a changed kernel is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.whole_models.kernel_hashes import GRAPH, default_models, differences, parse_case, write
from relaxtune.schedules import fallback
from relaxtune.schedules.cpu.generic import plain

pytestmark = pytest.mark.slow


def test_default_models_are_of_the_whole_zoo_and_parse() -> None:
    cases = [parse_case(model) for model in default_models()]
    families = {case.source.split("-")[0] for case in cases}
    assert families == {"bert", "gpt2", "llama", "vit", "t5", "whisper"}
    assert parse_case("bert-tiny:fp16@batch=2,sequence=n").shapes["input_ids"] == (2, "n")


def test_a_changed_rule_changes_the_hash_of_its_kernels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for name in ("before", "again", "after"):
        if name == "after":
            monkeypatch.setattr(fallback, "elementwise", plain)
        write(tmp_path / name, ["bert-tiny@sequence=16"], ["llvm"])
        hashes.append(json.loads((tmp_path / name).read_text()))
    before, again, after = hashes
    assert GRAPH in before["bert-tiny@sequence=16/llvm"]
    assert list(differences(before, again, "code")) == []
    changed = list(differences(before, after, "tir"))
    assert 0 < len(changed) < len(before["bert-tiny@sequence=16/llvm"])


def test_a_model_of_one_file_alone_is_told() -> None:
    (line,) = differences({"a/llvm": {"k": {"tir": "1", "code": "1"}}}, {}, "code")
    assert line == "a/llvm: only in the file of before"
