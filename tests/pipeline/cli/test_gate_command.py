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
from relaxtune.pipeline.gate import gate as gate_module
from relaxtune.tuning_db.gates import list_gates
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase

VALIDATION = {"passed": True, "samples": 3, "reference": "ort", "tolerance": {"rtol": 1e-4, "atol": 1e-4}}


def test_gate_exits_5_when_it_says_no_and_writes_for_ci_and_for_the_database(
    artifact, artifact_copy, bert_inputs, tmp_path, capsys
) -> None:
    new, inputs = artifact_copy(), tmp_path / "x.npz"
    np.savez(inputs, **bert_inputs)
    junit, markdown = tmp_path / "gate.xml", tmp_path / "gate.md"
    command = [
        "gate", new, "--baseline", artifact, "--inputs", inputs, "--max-slowdown", "900%", "--seconds", 0.5,
        "--junit", junit, "--markdown", markdown, "--format", "json", "--db", tmp_path / "gates.db",
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
    with TuningDatabase.open(tmp_path / "gates.db", mode=Mode.READ_ONLY) as database:
        kept = list_gates(database)
        assert {one.location for one in database.list_artifacts()} <= {str(artifact), str(new)}
    assert [one.passed for one in kept] == [True, False]
    told = json.loads(kept[0].report)
    assert [check["name"] for check in told["checks"]] == [check["name"] for check in data["checks"]]
    assert told["latencies"] == {}


def test_gate_says_that_its_database_cannot_be_written_before_it_runs(artifact, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(gate_module, "run_gate", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(["gate", str(artifact), "--baseline", str(artifact), "--db", str(tmp_path / "none" / "x.db")])
    assert ended.value.code == 1
    assert "of the database x.db does not exist" in capsys.readouterr().err


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
