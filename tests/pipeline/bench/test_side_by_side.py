"""Peers in processes of their own: checked first, timed, left out where they are not installed."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.files import save_model
from relaxtune.pipeline.bench.peers.callers import PeerError, PeerOrder, run_together
from relaxtune.pipeline.bench.peers.process import PeerMissingError, PeerProcess
from relaxtune.pipeline.bench.request import BenchRequest
from relaxtune.pipeline.errors import PipelineError, UsageError, ValidationFailedError
from relaxtune.pipeline.jobs.artifacts import bench_artifact, bench_batches
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.workers import limits

ORDER = PeerOrder("ort", "", "llvm", threads=1, streams=1, outputs=("y",))
QUICK = BenchRequest(runs=2, warmup=0)
# What `--torch` names: the two matmuls of the model below.
TORCH_FILE = """
import numpy as np
import torch

class Net(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.w, self.v = (torch.from_numpy(scale * np.load(f"{FOLDER}/{name}.npy")) for name in "wv")

    def forward(self, x):
        return {"y": torch.relu(x @ self.w) @ self.v}

def build():
    return Net(np.float32(1))

def twice():
    return Net(np.float32(2))

def number():
    return 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of a symbolic batch, its artifact, and a torch module of it."""
    folder = tmp_path_factory.mktemp("peers")
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((16, 24), np.float32) / 4, "v": rng.standard_normal((24, 8), np.float32) / 5}
    for name, array in weights.items():
        np.save(folder / f"{name}.npy", array)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "two", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "m.onnx")
    (folder / "nets.py").write_text(TORCH_FILE.replace("{FOLDER}", str(folder)), encoding="utf-8")
    compile_model(ModelRequest(folder / "m.onnx", target="llvm"), folder / "artifact", samples=1)
    return folder


@pytest.fixture
def model(folder: Path) -> OnnxModel:
    return load_model(folder / "m.onnx")


def test_a_peer_computes_in_its_own_process_and_ends_with_it(model: OnnxModel, tmp_path: Path) -> None:
    order = replace(ORDER, model=str(save_model(model, tmp_path / "m.onnx")), streams=2)
    with PeerProcess(order, tmp_path) as peer:
        outputs = peer.prepare({"x": np.zeros((3, 16), np.float32)})
        assert outputs["y"].shape == (3, 8)
        assert peer.run_ms() > 0
        latencies, seconds = peer.run_together(0.01)
        assert len(latencies) >= 2
        assert seconds > 0
        with pytest.raises(PeerError, match="Got invalid dimensions"):
            peer.prepare({"x": np.zeros((3, 17), np.float32)})
        # It goes on after what it could not do.
        assert peer.prepare({"x": np.zeros((1, 16), np.float32)})["y"].shape == (1, 8)
        pid = peer._worker.pid
    assert not psutil.pid_exists(pid)


def test_a_peer_that_gives_no_answer_is_ended_and_told(
    model: OnnxModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = replace(ORDER, model=str(save_model(model, tmp_path / "m.onnx")))
    with PeerProcess(order, tmp_path) as peer:
        monkeypatch.setattr(limits, "LOOK_S", 0.05)
        monkeypatch.setattr(limits, "STILL_LOOKS", 5)
        os.kill(peer._worker.pid, signal.SIGSTOP)
        with pytest.raises(PeerError, match="the process did nothing for 5 s and gave no answer"):
            peer.prepare({"x": np.zeros((3, 16), np.float32)})


def test_a_peer_that_is_not_installed_names_its_package(tmp_path: Path) -> None:
    with pytest.raises(PeerMissingError) as caught:
        PeerProcess(replace(ORDER, peer="ort-cuda", kind="cuda"), tmp_path)
    assert caught.value.package == "onnxruntime-gpu"


def test_a_process_that_dies_says_its_last_words(tmp_path: Path) -> None:
    shell = tmp_path / "python"
    shell.write_text("#!/bin/sh\necho out of luck >&2\nexit 7\n", encoding="utf-8")
    shell.chmod(0o755)
    with pytest.raises(PeerError, match="ended with exit status 7; it wrote last: out of luck"):
        PeerProcess(ORDER, tmp_path, shell)
    with pytest.raises(PeerError, match="does not start: No such file"):
        PeerProcess(ORDER, tmp_path, tmp_path / "nowhere")


def test_an_artifact_is_measured_beside_peers_alone_under_load_and_at_a_size(folder: Path) -> None:
    _, reports = bench_artifact(folder / "artifact", None, replace(QUICK, dims={"batch": 5}))
    report = reports[""]
    assert [arm.name for arm in report.arms] == ["relaxtune", "ort"]
    assert all(len(arm.latencies_ms) == 2 for arm in report.arms)
    assert {"ort", "threads", "tvm"} <= report.conditions.keys()
    json.dumps(report.to_json(), allow_nan=False)
    report.raise_if_failed()
    asked = replace(QUICK, against=(), streams=2, duration_s=0.05)
    report = bench_artifact(folder / "artifact", None, asked)[1][""]
    assert report.conditions["callers at once"] == "2"
    assert report.arms[0].busy_s is not None
    with pytest.raises(UsageError, match="not noted in a database"):
        bench_artifact(folder / "artifact", None, asked, database=folder / "no.db")
    with pytest.raises(ModelShapeError, match=r"axis 'words' of --dim is no symbolic axis .* one of batch"):
        bench_artifact(folder / "artifact", None, replace(QUICK, dims={"words": 5}))


def test_a_peer_without_its_package_is_left_out_and_one_that_fails_is_an_error(folder: Path) -> None:
    """No environment of the tests has torch; where one does, it has no such file of modules."""
    asked = replace(QUICK, against=("torch",), torch_module="nowhere.py:build")
    report = bench_artifact(folder / "artifact", None, asked)[1][""]
    assert [arm.name for arm in report.arms] == ["relaxtune"]
    if report.left_out:
        assert report.left_out == {"torch": "torch is not installed: pip install torch"}
        report.raise_if_failed()
    else:
        assert "nowhere.py" in report.failed["torch"]
    with pytest.raises(PipelineError, match="cannot run the model: torch: it broke"):
        replace(report, failed={"torch": "it broke"}).raise_if_failed()
    with pytest.raises(ValidationFailedError, match="result is wrong: torch: output 'y'"):
        replace(report, wrong={"torch": "output 'y': off"}).raise_if_failed()


@pytest.mark.export
def test_torch_is_checked_and_timed(folder: Path) -> None:
    nets = folder / "nets.py"
    asked = replace(QUICK, against=("torch", "torch-compile"), torch_module=f"{nets}:build", dims={"batch": 4})
    report = bench_artifact(folder / "artifact", None, asked)[1][""]
    report.raise_if_failed()
    assert [arm.name for arm in report.arms] == ["relaxtune", "torch", "torch-compile"]
    for factory, told in (("twice", "output 'y'"), ("number", "returned int"), ("other", "no function 'other'")):
        asked = replace(asked, against=("torch",), torch_module=f"{nets}:{factory}")
        report = bench_artifact(folder / "artifact", None, asked)[1][""]
        assert told in {**report.wrong, **report.failed}["torch"]


def test_a_sweep_of_the_batch_is_measured_at_each_size(folder: Path, tmp_path: Path) -> None:
    report = bench_batches([folder / "artifact"], (1, 4), None, replace(QUICK, against=()))
    assert [str(point) for point, _ in report.points] == ["batch=1", "batch=4"]
    compile_model(ModelRequest(folder / "m.onnx", {"batch": (2,)}, "llvm"), tmp_path / "static", samples=1)
    with pytest.raises(UsageError, match=r"takes one batch; compile it .* --shape input_ids=batchx128"):
        bench_batches([tmp_path / "static"], (1, 4), None, QUICK)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"against": ("abacus",)}, "cannot measure against abacus; expected ort, ort-cuda, torch"),
        ({"against": ("ort", "ort")}, "names a peer twice"),
        ({"against": ("torch",)}, "torch reads no ONNX: give a function .* --torch MODULE:FACTORY"),
        ({"against": ("torch",), "torch_module": "module"}, "--torch 'module': expected MODULE:FACTORY"),
        ({"duration_s": 0.0}, "0 seconds is none"),
        ({"streams": 0}, "0 streams; expected 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(values: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        BenchRequest(**values)


def test_a_peer_of_another_device_is_refused() -> None:
    with pytest.raises(UsageError, match=r"ort-cuda does not compute on the artifact's device \(target llvm\)"):
        BenchRequest(against=("ort-cuda",)).check_device("llvm")
    BenchRequest(against=("ort", "ort-cuda")).check_device("cuda")


def test_what_a_caller_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_together([lambda: 1, lambda: 1 // 0], 0.0)


def test_the_files_of_the_worker_need_no_tvm() -> None:
    """Another interpreter runs them, one that may have the peer alone."""
    import subprocess

    code = (
        "import sys; sys.modules['tvm'] = sys.modules['onnx'] = None; "
        "import relaxtune.pipeline.bench.peers.worker, relaxtune.pipeline.bench.peers.onnxruntime_peer"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
