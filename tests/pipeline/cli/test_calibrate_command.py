"""`relaxtune calibrate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from relaxtune.models import load_model, random_inputs

DIMS = ("--dim", "batch=1", "--dim", "sequence=16")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    model = load_model("bert-tiny", shapes={"input_ids": (1, 16)})
    (tmp_path / "data").mkdir()
    for seed in range(2):
        np.savez(tmp_path / "data" / f"{seed}.npz", **random_inputs(model, seed=seed))
    return tmp_path / "data"


def test_a_folder_of_calls_makes_a_record(relaxtune, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "ranges.json"
    options = ("--data", data, "--out", out, "--method", "mse", "--format", "json")
    code, shown, _ = relaxtune("calibrate", "bert-tiny", *DIMS, *options)
    written = json.loads(out.read_text())
    assert code == 0
    assert json.loads(shown)["ranges"] == written["ranges"]
    assert (written["samples"], written["method"], len(written["ranges"])) == (2, "mse", 9)
    code, _, shown = relaxtune(
        "compile", "bert-tiny", *DIMS, "--precision", "fp16", "--calibration", out, "--target", "llvm"
    )
    assert (code, "only fp8 has static scales" in shown) == (2, True)


def test_data_that_cannot_be_read_have_a_remedy(relaxtune, data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    texts, tokenizer = tmp_path / "texts.txt", tmp_path / "tokenizer.json"
    texts.write_text("a text\n")
    tokenizer.write_text("{}")
    cases = [
        (("--data", tmp_path / "none.npz"), "cannot be read"),
        (("--data", tmp_path / "empty"), "has no .npz file"),
        (("--data", texts), "name the model's tokenizer.json by --tokenizer"),
        (("--data", texts, "--tokenizer", tokenizer), "tokenizer.json"),
        (("--data", tmp_path / "none.txt", "--tokenizer", tokenizer), "expected UTF-8 text"),
        (("--data", data, "--tokenizer", tokenizer), "--tokenizer is for texts"),
        (("--data", data, "--method", "median"), "'median' is not one of"),
    ]
    for options, remedy in cases:
        code, _, shown = relaxtune("calibrate", "bert-tiny", *DIMS, *options, "--out", tmp_path / "r.json")
        assert (code, remedy in " ".join(shown.split())) == (2, True), shown
    code, _, shown = relaxtune("calibrate", "bert-tiny", *DIMS, "--data", data, "--out", tmp_path / "no" / "r.json")
    assert (code, "--out" in shown) == (1, True), shown
