"""`--precision`, `--group-size`, `--logits` and `--tokens` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import exit_code
from tests.unoptimised import UNOPTIMISED_TEXT


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("precision") / "llama"
    options = ["--target", UNOPTIMISED_TEXT, "--precision", "w8a16", "--group-size", "64", "--shape", "input_ids=1x12"]
    assert exit_code("compile", "llama-tiny", *options, "--out", directory) == 0
    return directory


def test_the_manifest_has_the_group_size_asked_for(artifact: Path) -> None:
    policy = json.loads((artifact / "manifest.json").read_text())["policy"]
    assert (policy["name"], policy["group_size"], policy["scale_dtype"]) == ("w8a16", 64, "float16")


def test_validate_tells_the_perplexity_of_a_token_file(relaxtune, artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokens.txt"
    path.write_text(" ".join(map(str, np.random.default_rng(0).integers(0, 1024, 40))))
    code, out, _ = relaxtune("validate", artifact, "--samples", 1, "--tokens", path, "--format", "json")
    assert code == 0
    drift = json.loads(out)["drift"]
    perplexity = drift["perplexity"]
    assert perplexity["tokens"] == 33
    assert perplexity["data"]["name"] == "tokens.txt"
    assert perplexity["ours"] == pytest.approx(perplexity["original"], rel=0.01)
    # Random weights know nothing of the next token.
    assert 500 < perplexity["original"] < 2500
    assert [one["name"] for one in drift["data"]] == ["random inputs, seed 0", "tokens.txt"]
    stored = json.loads((artifact / "manifest.json").read_text())["validation"]["drift"]
    assert stored["perplexity"] == perplexity


def test_validate_prints_the_drift_beside_the_verdict(relaxtune, artifact: Path) -> None:
    code, out, _ = relaxtune("validate", artifact, "--samples", 1, "--logits", "logits")
    assert code == 0
    assert "drift of w8a16 from float32" in out
    assert "KL" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logits", "scores"], "has no output 'scores'"),
        (["--tokens", "missing.npy"], "--tokens missing.npy cannot be read"),
    ],
)
def test_validate_refuses_what_is_not_there(relaxtune, artifact: Path, options: list[str], message: str) -> None:
    code, _, err = relaxtune("validate", artifact, "--samples", 1, *options)
    assert code == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "fp16", "--group-size", "64"], "has no groups of weights"),
        (["--group-size", "64"], "a group size without a precision"),
        (["--precision", "w4a16", "--group-size", "33"], "expected a multiple of 32"),
    ],
)
def test_group_sizes_without_effect_are_refused(relaxtune, options: list[str], message: str, tmp_path: Path) -> None:
    code, _, err = relaxtune("compile", "bert-tiny", "--target", "llvm", *options, "--out", tmp_path / "out")
    assert code == 2
    assert message in " ".join(err.split())
    assert not list(tmp_path.iterdir())
