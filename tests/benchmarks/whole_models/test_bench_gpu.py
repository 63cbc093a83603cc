"""The whole table with stand-ins for the cases' processes: what is kept, resumed, given up and told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_arms import children
from benchmarks.whole_models import bench_gpu

# Every arm takes 1 ms but relaxtune's, which takes 0.5 ms; a process of GPT-2 dies.
WORKER = """
import json, os, sys
order = json.loads(sys.argv[1])
def emit(**event):
    print(json.dumps(event), flush=True)
if order["case"].startswith("gpt2"):
    os._exit(9)
emit(event="ready")
sys.stdin.readline()
def arm(name):
    value = 0.5 if name == "relaxtune" else 1.0
    return {"median_ms": value, "p95_ms": value, "device_median_ms": value}
arms = {name: arm(name) for name in order["arms"]}
emit(event="result", result={"case": order["case"], "arms": arms, "skipped": {}})
"""


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "standin.py").write_text(WORKER)
    monkeypatch.setattr(children, "WORKER_MODULE", "standin")
    monkeypatch.setattr(bench_gpu, "machine", lambda: {"gpu": "none"})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path / "results" / "table.json"


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> None:
    logs = str(out.parent.parent / "logs")
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--out", str(out), "--logs", logs, "--jobs", "2", *arguments])
    bench_gpu.main()


def test_every_case_is_kept_and_a_dead_one_is_told(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, out, "--cases", "bert-base-1x128,gpt2-small-1x128,vit-base")
    document = json.loads(out.read_text())
    assert [entry["case"] for entry in document["cases"]] == ["bert-base-1x128", "gpt2-small-1x128", "vit-base-8x224"]
    assert document["geometric_mean_of_ratios"] == {"host_clock": 2.0, "device": 2.0, "cases": 2}
    assert "ended with code 9" in document["cases"][1]["failed"]
    text = capsys.readouterr().out
    assert "geometric mean of 2" in text
    assert "gpt2-small-1x128: its process ended with code 9" in text


def test_a_resumed_run_repeats_only_what_failed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, out, "--cases", "bert-base-1x128,gpt2-small-1x128")
    document = json.loads(out.read_text())
    document["cases"][0]["kept"] = True
    out.write_text(json.dumps(document))
    run(monkeypatch, out, "--cases", "bert-base-1x128,gpt2-small-1x128", "--resume", "--arms", "ort")
    again = json.loads(out.read_text())["cases"]
    assert again[0]["kept"] is True
    assert [entry["case"] for entry in again] == ["bert-base-1x128", "gpt2-small-1x128"]


def test_no_case_is_started_when_the_budget_is_spent(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, out, "--cases", "bert-base", "--budget", "0.000001")
    assert not out.exists()
    assert "is spent; not run: bert-base-1x128, bert-base-8x128" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "bert-huge"], "no case is called bert-huge"),
        (["--arms", "tensorrt"], "no arm is called tensorrt"),
        (["--runs", "0"], "expected --runs and --jobs of at least 1"),
    ],
)
def test_options_that_cannot_be_are_usage_errors(
    arguments: list[str],
    message: str,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(monkeypatch, out, *arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
