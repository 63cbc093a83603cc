"""`relaxtune gate`: exit 5 when it says no, files for CI, and shares that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from relaxtune.pipeline.artifact.directory import record_validation
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.cli.gate import parse_percent
from relaxtune.pipeline.errors import UsageError

VALIDATION = {"passed": True, "samples": 3, "reference": "ort", "tolerance": {"rtol": 1e-4, "atol": 1e-4}}


def test_gate_exits_5_when_it_says_no_and_writes_for_ci(artifact, artifact_copy, bert_inputs, tmp_path, capsys) -> None:
    new, inputs = artifact_copy(), tmp_path / "x.npz"
    np.savez(inputs, **bert_inputs)
    junit, markdown = tmp_path / "gate.xml", tmp_path / "gate.md"
    command = [
        "gate", new, "--baseline", artifact, "--inputs", inputs, "--max-slowdown", "900%", "--seconds", 0.5,
        "--junit", junit, "--markdown", markdown, "--format", "json",
    ]  # fmt: skip

    def call() -> tuple[int, dict, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in command])
        written = capsys.readouterr()
        return int(ended.value.code or 0), json.loads(written.out), written.err

    code, data, error = call()
    assert code == 5
    assert data["passed"] is False
    assert "may not take the place" in error
    assert '<failure message="' in junit.read_text()
    assert ": NO" in markdown.read_text()
    record_validation(new, VALIDATION)
    code, data, _ = call()
    assert code == 0
    assert data["latencies"][""]["speed"] == "within the limit"
    assert 'failures="0"' in junit.read_text()


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.5 %", 0.005), ("none", None), ("0%", 0.0)])
def test_shares_are_read(text: str, share: float | None) -> None:
    assert parse_percent(text, "--max-size") == share


@pytest.mark.parametrize("text", ["2", "0.02", "-1%", "2%%", "nan%", "two%", "inf%", ""])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--max-size .* is no share; expected a number and a percent sign"):
        parse_percent(text, "--max-size")


def test_a_gate_without_a_limit_of_latency_is_a_usage_error(artifact: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gate", str(artifact), "--baseline", str(artifact), "--max-slowdown", "none"])
    assert ended.value.code == 2
    assert "needs a limit of latency" in capsys.readouterr().err
