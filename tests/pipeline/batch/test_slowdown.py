"""`max_slowdown`: an artifact that is slower than the last accepted one does not take its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import relaxtune
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.batch import unchanged
from relaxtune.pipeline.batch.driver import run_batch
from relaxtune.pipeline.batch.plan import parse_plan
from relaxtune.pipeline.bench.measure import Call
from relaxtune.pipeline.gate import latency
from relaxtune.pipeline.gate.latency import slower_than_last
from relaxtune.pipeline.jobs import compile_and_tune as jobs
from relaxtune.tuning_db.cell_states import CellState

CALLS = [Call({"x": np.ones((64, 256), np.float32)})]
PLAN = """\
effort = "quick"
samples = 1
[budget]
candidates = 1
[[cells]]
models = ["layers.onnx"]
targets = ["llvm"]
limits = { max_slowdown = 0.5 }
"""


def layers(count: int) -> onnx.ModelProto:
    """Matmuls one after another: many take many times as long as one."""
    weights = np.eye(256, dtype=np.float32)
    names = ["x", *(f"h{number}" for number in range(1, count)), "y"]
    nodes = [helper.make_node("MatMul", [names[at], "w"], [names[at + 1]]) for at in range(count)]
    of = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (64, 256)) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "layers", of[:1], of[1:], [numpy_helper.from_array(weights, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Artifacts of one layer and of sixteen."""
    folder = tmp_path_factory.mktemp("layers")
    made = []
    for count in (1, 16):
        onnx.save(layers(count), folder / f"{count}.onnx")
        relaxtune.compile(folder / f"{count}.onnx", folder / str(count), target="llvm", samples=0)
        made.append(folder / str(count))
    return made[0], made[1]


def test_an_artifact_that_is_slower_is_told_by_how_much(
    built: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "_SECONDS", 0.3)
    fast, slow = built
    told = slower_than_last(slow, fast, CALLS, 0.5)
    assert told is not None
    assert f"the artifact in {fast}" in told
    assert "max_slowdown is 50.0%" in told
    assert slower_than_last(fast, slow, CALLS, 0.5) is None
    assert slower_than_last(fast, tmp_path / "none", CALLS, 0.5) is None
    (tmp_path / "damaged").mkdir()
    assert slower_than_last(fast, tmp_path / "damaged", CALLS, 0.5) is None


@pytest.mark.slow
def test_a_cell_that_became_slower_is_rejected_and_the_last_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(layers(1), tmp_path / "layers.onnx")
    plan = parse_plan(tmp_path / "slow.toml", PLAN)
    (first,) = run_batch(plan).cells
    assert first.state is CellState.DONE
    place = Path(str(first.facts.artifact))
    kept = load_manifest(place)
    monkeypatch.setattr(unchanged, "code_key", lambda: "another version")
    asked = []

    def slower(new: Path, last: Path, *rest: object) -> str:
        asked.append((last, (new / "manifest.json").exists(), rest[1]))
        return "twice as slow"

    monkeypatch.setattr(jobs, "slower_than_last", slower)
    (again,) = run_batch(plan).cells
    assert asked == [(place, True, 0.5)]
    assert (again.state, again.facts.error) == (CellState.REJECTED, "twice as slow")
    assert again.facts.artifact == f"{place}.rejected"
    assert load_manifest(place) == kept
