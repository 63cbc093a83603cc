"""Recorded calls of a service, replayed by the gate through two artifacts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import relaxtune
from relaxtune.pipeline.artifact.directory import record_validation
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.errors import PipelineError, UsageError
from relaxtune.pipeline.gate.gate import GateLimits
from relaxtune.pipeline.gate.latency import LatencyLimit
from tests.pipeline.registry.test_refit import WIDTH, compiled, network

VALIDATION = {"passed": True, "samples": 3, "reference": "ort", "tolerance": {"rtol": 1e-4, "atol": 1e-4}}
LIMITS = GateLimits(LatencyLimit(9.0, seconds=0.3))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    place = compiled(network(folder / "served.onnx", 0, rows="n"), folder / "served")
    record_validation(place, VALIDATION)
    return place


def call(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, WIDTH)).astype("float32")}


def test_every_second_call_is_kept_and_the_oldest_go(served: Path, tmp_path: Path) -> None:
    recorder = relaxtune.CallRecorder(relaxtune.load(served), tmp_path / "calls", every=2, most=2)
    for rows in (1, 2, 3, 4, 5):
        assert recorder.run(call(rows))["y"].shape == (rows, WIDTH)
    with pytest.raises(PipelineError, match="missing input"):
        recorder.run({})
    kept = [np.load(path)["x"] for path in sorted((tmp_path / "calls").iterdir())]
    assert [len(array) for array in kept] == [5, 3]
    np.testing.assert_array_equal(kept[0], call(5)["x"])
    with pytest.raises(UsageError, match="every=0 and most=2; expected 1 or more"):
        relaxtune.CallRecorder(recorder.module, tmp_path, every=0, most=2)


def test_a_folder_that_cannot_be_written_does_not_stop_the_service(served: Path, tmp_path: Path, caplog) -> None:
    (tmp_path / "calls").touch()
    recorder = relaxtune.CallRecorder(relaxtune.load(served), tmp_path / "calls")
    assert recorder.run(call(2))["y"].shape == (2, WIDTH)
    assert recorder.lost == 1
    assert "a call was not recorded in" in caplog.text


def test_the_gate_compares_all_calls_and_times_the_commonest_sizes(served: Path, tmp_path: Path) -> None:
    calls = [call(rows) for rows in (1, 2, 2, 3, 3, 4, 4, 5, 5)]
    report = relaxtune.gate(served, served, LIMITS, inputs=calls)
    assert sorted(report.latencies) == ["n=2", "n=3", "n=4", "n=5"]
    assert relaxtune.gate(served, served, LIMITS, inputs=calls[1:3]).latencies.keys() == {""}
    with pytest.raises(UsageError, match="no recorded call is given"):
        relaxtune.gate(served, served, LIMITS, inputs=[])
    with pytest.raises(PipelineError, match="expected dtype float32, got float64"):
        relaxtune.gate(served, served, LIMITS, inputs=[{"x": np.zeros((2, WIDTH))}])
    other = compiled(network(tmp_path / "other.onnx", 0, rows="n", scale=0.5001), tmp_path / "other")
    checks = {check.name: check for check in relaxtune.gate(other, served, LIMITS, inputs=calls).checks}
    assert checks["drift"].change.startswith("max abs 0.0")


def test_the_command_replays_a_folder_through_two_tags(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = relaxtune.CallRecorder(relaxtune.load(served), tmp_path / "calls", every=1)
    for rows in (1, 2, 2):
        recorder.run(call(rows))
    store, db = tmp_path / "store", str(tmp_path / "tuning.db")
    with relaxtune.open_registry(store, db) as registry:
        for tag in ("prod", "canary"):
            registry.tag(served, tag)
    words = [
        "gate",
        "canary",
        "--baseline",
        "prod",
        "--store",
        str(store),
        "--max-slowdown",
        "900%",
        "--seconds",
        "0.3",
    ]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--inputs", str(tmp_path / "calls"), "--format", "json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], sorted(report["latencies"])) == (True, ["n=1", "n=2"])
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--inputs", str(tmp_path / "none")])
    assert "has no .npz file; relaxtune.CallRecorder writes them" in capsys.readouterr().err
