"""A graph that ends ONNX Runtime, or that it never finishes, ends no command of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T, helper

from relaxtune.models import load_model
from relaxtune.pipeline.bench.measure import Call, onnxruntime_peer
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.onnx_runtime import process as process_module
from relaxtune.pipeline.onnx_runtime.process import OnnxRuntimeProcess, onnx_runtime
from relaxtune.pipeline.onnx_runtime.requests import Level, Open, Settings
from relaxtune.pipeline.onnx_runtime.session import OnnxRuntimeSession
from relaxtune.pipeline.onnx_runtime.worker import _Worker
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.workers import limits
from relaxtune.pipeline.workers.worker import Worker
from tests.command_line import Ended
from tests.pipeline.onnx_runtime.faulty_worker import FAULT

X = np.arange(8, dtype=np.float32).reshape(2, 4)
OPTIMISED = Settings(Level.BASIC, threads=1)


@pytest.fixture
def proto() -> onnx.ModelProto:
    weight = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32) * 2, "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [helper.make_tensor_value_info("x", T.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", T.FLOAT, ["n", 4])], [weight],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], OnnxRuntimeProcess]]:
    """Have a process of ONNX Runtime with a fault in place of this one's."""
    kept = dict(process_module._processes)

    def planted(fault: str) -> OnnxRuntimeProcess:
        monkeypatch.setenv(FAULT, fault)
        monkeypatch.setattr(process_module, "_MODULE", "tests.pipeline.onnx_runtime.faulty_worker")
        faulty = process_module._processes[os.getpid()] = OnnxRuntimeProcess()
        return faulty

    yield planted
    faulty = process_module._processes.pop(os.getpid(), None)
    if faulty is not None and faulty is not kept.get(os.getpid()):
        faulty.close()
    process_module._processes.clear()
    process_module._processes.update(kept)


def crashing_graph() -> onnx.ModelProto:
    """Return a graph that ends ONNX Runtime 1.32 while it optimises it; drawn by `tests.guardrails.graphs`."""
    draw = np.random.default_rng(0)
    weights = {
        "c0": draw.standard_normal((16, 16), np.float32),
        "c1": draw.standard_normal(16, np.float32),
        "c8": np.asarray([-0.87], np.float32),
    }
    nodes = [
        helper.make_node("Neg", ["x"], ["t0"]),
        helper.make_node("Concat", ["x", "t0"], ["t1"], axis=0),
        helper.make_node("MatMul", ["t1", "c0"], ["t2"]),
        helper.make_node("Add", ["t2", "c1"], ["t3"]),
        helper.make_node("Transpose", ["t3"], ["t12"], perm=[1, 0, 2]),
        helper.make_node("ArgMax", ["t12"], ["t18"], axis=2, keepdims=1, select_last_index=1),
        helper.make_node("Cast", ["t18"], ["t19"], to=T.FLOAT),
        helper.make_node("MatMul", ["t19", "c8"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", T.FLOAT, [4, 1, 16])],
        [helper.make_tensor_value_info("y", T.FLOAT, [1, 8])],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_a_graph_that_ends_the_optimiser_is_computed_without_it(tmp_path: Path) -> None:
    """Whether the version installed crashes or not, this process goes on and the answer is there."""
    proto = crashing_graph()
    x = np.random.default_rng(1).standard_normal((4, 1, 16), np.float32)
    plain = OnnxRuntimeSession(proto, "g", Settings(Level.NONE, threads=1))
    optimised = OnnxRuntimeSession(proto, "g", Settings(Level.ALL, threads=1))
    np.testing.assert_allclose(optimised.run(["y"], {"x": x})[0], plain.run(["y"], {"x": x})[0], rtol=1e-5)
    onnx.save(proto, tmp_path / "m.onnx")
    peers = onnxruntime_peer(load_model(tmp_path / "m.onnx"), [Call({"x": x})], threads=1)
    if optimised.fell_back is None:
        assert list(peers.arms) == ["ort"]
    else:
        assert "died of signal SIGSEGV" in optimised.fell_back
        assert "died of signal SIGSEGV" in peers.left_out["ort"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("load-crash", "died of signal SIGSEGV"),
        ("run-crash", "died of signal SIGSEGV"),
        ("load-hang", "did nothing for"),
        ("run-hang", "did nothing for"),
    ],
)
def test_what_crashes_or_hangs_with_optimisations_goes_without_them_and_says_so(
    proto: onnx.ModelProto, plant, fault: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(limits, "LOOK_S", 0.05)
    monkeypatch.setattr(limits, "STILL_LOOKS", 20)
    plant(fault)
    session = OnnxRuntimeSession(proto, "case", OPTIMISED)
    np.testing.assert_array_equal(session.run(["y"], {"x": X})[0], X * 2)
    assert session.fell_back is not None
    assert told in session.fell_back
    assert "the model case is loaded by ONNX Runtime without graph optimisations: with them, the process" in caplog.text


def test_what_crashes_without_optimisations_too_is_an_error_that_says_so(proto: onnx.ModelProto, plant) -> None:
    plant("always-crash")
    with pytest.raises(PipelineError, match=r"about the model 'case': the process died of signal SIGSEGV"):
        OnnxRuntimeSession(proto, "case", OPTIMISED)


def test_what_is_killed_again_and_again_is_an_error_and_no_fault_of_the_graph(proto: onnx.ModelProto, plant) -> None:
    plant("always-kill")
    with pytest.raises(PipelineError, match=r"the process died of signal SIGKILL; is there memory enough\?"):
        OnnxRuntimeSession(proto, "case", OPTIMISED)


def test_a_process_that_is_killed_from_outside_is_started_again_for_all_its_sessions(proto: onnx.ModelProto) -> None:
    first, second = OnnxRuntimeSession(proto, "one", OPTIMISED), OnnxRuntimeSession(proto, "two", OPTIMISED)
    call = second.call(["y"], {"x": X})
    os.kill(onnx_runtime()._worker.pid, signal.SIGKILL)
    np.testing.assert_array_equal(first.run(["y"], {"x": X})[0], X * 2)
    assert call() > 0
    assert first.settings.level is Level.BASIC
    assert (first.fell_back, second.fell_back) == (None, None)


def test_a_process_that_is_killed_as_it_starts_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []

    class KilledAtFirst(Worker):
        def _begin(self, server):
            child = super()._begin(server)
            starts.append(child.pid)
            if len(starts) == 1:
                os.kill(child.pid, signal.SIGKILL)
            return child

    monkeypatch.setattr(process_module, "Worker", KilledAtFirst)
    process = OnnxRuntimeProcess()
    try:
        assert process.description() == onnx_runtime().description()
    finally:
        process.close()
    assert len(starts) == 2


def test_a_request_that_is_interrupted_leaves_no_answer_behind(
    proto: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = OnnxRuntimeSession(proto, "case", OPTIMISED)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run(["y"], {"x": X})
    np.testing.assert_array_equal(session.run(["y"], {"x": X + 1})[0], (X + 1) * 2)


def test_it_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    """A process that starts afresh: ONNX Runtime writes a file there while it is imported."""
    code = (
        "from relaxtune.pipeline.onnx_runtime.process import onnx_runtime; print(onnx_runtime().description().version)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == onnx_runtime().description().version
    assert list(tmp_path.iterdir()) == []


def test_sessions_on_one_graph_share_its_weights(bert_tiny) -> None:
    session = OnnxRuntimeSession(bert_tiny.inline_proto(), "one", OPTIMISED)
    graph, worker = session._graph, _Worker()
    for number in (1, 2):
        worker.answer(Open(number, graph.graph, graph.weights_key, graph.weights.where, OPTIMISED))
    assert worker._sessions[1].weights is worker._sessions[2].weights
    assert len(worker._sessions[1].weights) > 1


def test_a_session_that_is_gone_is_let_go(proto: onnx.ModelProto) -> None:
    session = OnnxRuntimeSession(proto, "case", OPTIMISED)
    number = session._number
    del session
    assert number in onnx_runtime()._unused
    onnx_runtime().ask(process_module.Describe())
    assert number not in onnx_runtime()._unused


def test_compile_ends_well_and_says_what_the_reference_was(
    proto: onnx.ModelProto, plant, tmp_path: Path, relaxtune: Callable[..., Ended]
) -> None:
    onnx.save(proto, tmp_path / "m.onnx")
    plant("load-crash")
    ended = relaxtune("compile", tmp_path / "m.onnx", "--shape", "x=2x4", "--out", tmp_path / "out")
    assert ended.code == 0
    said = " ".join((ended.stdout + ended.stderr).split())
    assert "no graph optimisations (with them, the process died of signal SIGSEGV)" in said


def test_a_reference_is_loaded_again_as_it_could_be_loaded(
    proto: onnx.ModelProto, plant, tmp_path: Path, caplog
) -> None:
    onnx.save(proto, tmp_path / "m.onnx")
    plant("load-crash")
    reference = Reference(load_model(tmp_path / "m.onnx", shapes={"x": (2, 4)}))
    reference.remember([{"x": X}])
    np.testing.assert_array_equal(reference.run({"x": X + 1})["y"], (X + 1) * 2)
    assert caplog.text.count("without graph optimisations") == 1
