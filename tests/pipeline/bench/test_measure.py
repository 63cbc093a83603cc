from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper
from rich.console import Console

from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench import measure as bench_measure
from relaxtune.pipeline.bench.idle import wait_until_idle
from relaxtune.pipeline.bench.measure import (
    Arm,
    ArmResult,
    Call,
    LoadArm,
    Peers,
    arm_of_calls,
    measure,
    measure_load,
    module_arm,
    onnxruntime_peer,
)
from relaxtune.pipeline.bench.tables import render, render_sizes, run_conditions
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.onnx_runtime.process import onnx_runtime


def test_arms_take_turns_and_each_timed_run_follows_an_untimed_one() -> None:
    calls: list[str] = []
    report = measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, runs=3, warmup=2)
    assert calls == ["a"] * 2 + ["b"] * 2 + ["a", "a", "b", "b"] * 3
    assert [len(arm.latencies_ms) for arm in report.arms] == [3, 3]
    assert (report.runs, report.warmup) == (3, 2)


def test_an_arm_of_another_process_waits_until_threads_of_this_one_sleep() -> None:
    computing: list[threading.Thread] = []
    calls: list[bool] = []

    def theirs() -> float:
        calls.append(computing[-1].is_alive())
        return 1.0

    measure({"ours": lambda: computing.append(spin(300_000)), "theirs": theirs}, runs=3, warmup=0, settle=False)
    assert calls == [False] * 3


def test_arms_run_untimed_as_long_after_an_arm_of_their_process_as_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_measure, "wait_until_idle", lambda: 0.001)
    calls: list[str] = []

    def arm(name: str, told: float | None = None) -> float | None:
        time.sleep(0.01)
        calls.append(name)
        return told

    measure({"a": lambda: arm("a"), "b": lambda: arm("b"), "c": lambda: arm("c", 10.0)}, runs=2, warmup=1)
    turns = [len(list(same)) for _, same in itertools.groupby(calls[3:])]
    assert len(turns) == 6
    # 50 ms, and the timed run.
    assert min(turns) > 3


@pytest.mark.slow
def test_threads_that_never_sleep_are_not_waited_for_for_ever() -> None:
    thread = spin(20_000_000)
    assert wait_until_idle() >= 0.5
    began = time.monotonic()
    measure({"ours": lambda: None, "theirs": lambda: 1.0}, runs=20, warmup=0, settle=False)
    assert thread.is_alive()
    assert time.monotonic() - began < 2.0
    thread.join()
    # It may still be on its way out.
    wait_until_idle()
    assert not wait_until_idle()


def spin(turns: int) -> threading.Thread:
    """Start a thread that computes without Python's lock, as the workers of TVM's pool spin after a call."""
    thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", turns))
    thread.start()
    # Until it has taken Python's lock and let go of it: a thread that waits for the lock sleeps.
    time.sleep(0.02)
    return thread


@pytest.mark.timing
def test_ratios_are_of_the_first_arm() -> None:
    report = measure({"fast": lambda: None, "slow": lambda: time.sleep(0.01)}, runs=9, warmup=0)
    assert report.ratio("fast") == 1.0
    assert report.ratio("slow") > 1.5
    assert report.arm("slow").median_ms >= 4.0


def test_calls_of_several_sizes_are_one_arm_with_a_mean_by_their_counts() -> None:
    calls = [Call({"ms": np.array(1.0)}, "short", 3), Call({"ms": np.array(9.0)}, "long", 1)]
    order: list[tuple[str, float]] = []

    def arm(name: str, inputs: Mapping[str, np.ndarray], ms: float | None = None) -> Arm:
        def run() -> float:
            order.append((name, float(inputs["ms"])))
            return ms or float(inputs["ms"])

        return run

    ours, slow = (arm_of_calls(calls, partial(arm, name, ms=ms)) for name, ms in (("ours", None), ("slow", 4.0)))
    report = measure({"ours": ours, "slow": slow}, runs=2, warmup=0, settle=False)
    # The arms take turns at each call.
    assert order[:4] == [("ours", 1.0), ("slow", 1.0), ("ours", 9.0), ("slow", 9.0)]
    assert report.arm("ours").latencies_ms == (3.0, 3.0)
    assert report.arm("ours").by_sizes == {"short": (1.0, 1.0), "long": (9.0, 9.0)}
    assert report.arm("ours").run_ms == 10.0
    both = report.arm("ours").and_then(report.arm("ours"))
    assert both.by_sizes["long"] == (9.0,) * 4
    text = io.StringIO()
    console = Console(file=text, width=120)
    sized = replace(report, sizes={"short": 3, "long": 1})
    console.print(render(sized), render_sizes(sized))
    assert "latency, ms: mean of 2 sizes" in text.getvalue()
    assert re.search(r"long +│ +1 │ +9.000 │ +4.000 │ +0.44", text.getvalue())


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=50))
def test_quantiles_lie_among_the_values(values: list[float]) -> None:
    arm = ArmResult("a", tuple(values))
    assert arm.quantile(0.95) in values
    assert sum(value <= arm.quantile(0.95) for value in values) >= 0.95 * len(values)
    assert min(values) <= arm.median_ms <= max(values)
    assert arm.spread >= 0


@pytest.mark.parametrize(("runs", "warmup"), [(0, 0), (1, -1)])
def test_nothing_to_measure_is_an_error(runs: int, warmup: int) -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        measure({"a": lambda: None}, runs=runs, warmup=warmup)
    with pytest.raises(UsageError, match="nothing to measure: 0 arms"):
        measure({})


def test_an_arm_that_times_itself_is_believed() -> None:
    report = measure({"other process": lambda: 7.5}, runs=2, warmup=0)
    assert report.arms[0].latencies_ms == (7.5, 7.5)


def test_arms_under_load_take_turns_and_a_warm_up_does_not_count() -> None:
    calls: list[str] = []

    def arm(name: str, latency_ms: float) -> LoadArm:
        def run(seconds: float) -> tuple[list[float], float]:
            calls.append(name)
            assert seconds == pytest.approx(0.1)
            return [latency_ms] * 4, 0.2

        return run

    report = measure_load({"a": arm("a", 1.0), "b": arm("b", 2.0)}, seconds=1.0)
    assert calls == ["a", "b"] * 11
    assert [len(one.latencies_ms) for one in report.arms] == [40, 40]
    # Two callers at once: more calls a second than one after another.
    assert [one.calls_per_s for one in report.arms] == [pytest.approx(20.0)] * 2
    assert (report.runs, report.duration_s) == (40, 1.0)
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert {"p90_ms", "p95_ms", "p99_ms", "median_ms", "calls_per_s"} <= data["arms"][0].keys()
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(report))
    assert "1 s of each arm" in console.export_text()
    assert measure_load({"a": arm("a", 1.0)}, seconds=1.0, warmup=0).runs == 40


def test_a_peer_runs_on_the_same_device_or_is_left_out_and_told(
    bert_tiny: OnnxModel, bert_inputs: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """No machine of the tests has the CUDA provider: here it is missing from the list, then on it and does not load."""
    described = onnx_runtime().description()
    assert "CUDAExecutionProvider" not in described.providers
    caplog.set_level("INFO", logger="relaxtune")
    assert onnxruntime_peer(bert_tiny, [Call(bert_inputs)], "cuda") == Peers()
    assert "no peer is timed: this ONNX Runtime does not compute on a device of kind cuda" in caplog.text
    listed = replace(described, providers=("CUDAExecutionProvider", "CPUExecutionProvider"))
    monkeypatch.setattr(onnx_runtime(), "_described", listed)
    assert onnxruntime_peer(bert_tiny, [Call(bert_inputs)], "cuda") == Peers()
    assert "CUDAExecutionProvider does not load on this machine" in caplog.text
    (peer,) = onnxruntime_peer(bert_tiny, [Call(bert_inputs)], "llvm").arms.items()
    assert peer[0] == "ort"
    assert peer[1]() > 0


def test_a_peer_that_onnx_runtime_cannot_load_is_left_out_and_the_table_says_why(
    bert_tiny: OnnxModel, bert_inputs: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    broken = onnx.ModelProto()
    broken.CopyFrom(bert_tiny.inline_proto())
    broken.graph.node[0].op_type = "NoSuchOperator"
    monkeypatch.setattr(type(bert_tiny), "inline_proto", lambda _: broken)
    peers = onnxruntime_peer(bert_tiny, [Call(bert_inputs)])
    assert peers.arms == {}
    assert "does not load the model 'bert-tiny'" in peers.left_out["ort"]
    assert "no peer is timed: ONNX Runtime" in caplog.text
    report = replace(measure({"own": lambda: 1.0}, runs=1, warmup=0), left_out=peers.left_out)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(report))
    assert "ort is left out: ONNX Runtime" in console.export_text()


def test_conditions_name_the_threads_that_a_module_computes_with(artifact: Path) -> None:
    # A pool never grows, and each thread has its own.
    with ThreadPoolExecutor(max_workers=1) as fresh:
        told = fresh.submit(lambda: run_conditions(Module.load(artifact, threads=1))).result()
    assert (told["tvm_threads"], told["onnxruntime_threads"]) == ("1", "1")


def test_each_call_of_a_peer_is_timed_on_its_own_inputs(tmp_path: Path) -> None:
    names = ["x", *(f"h{number}" for number in range(8))]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [before, before], [name]) for before, name in itertools.pairwise(names)],
        "square",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "n"])],
        [helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, ["n", "n"])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    calls = [Call({"x": np.zeros((size, size), np.float32)}, str(size)) for size in (512, 2)]
    arm = onnxruntime_peer(load_model(tmp_path / "m.onnx"), calls, threads=1).arms["ort"]
    taken = measure({"ort": arm}, runs=3, warmup=1).arm("ort").by_sizes
    assert min(taken["512"]) > 10 * min(taken["2"])


def test_sizes_that_a_module_refuses_are_an_error_of_the_user() -> None:
    class Refusing:
        input_buffers = None

        def to_device(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            return list(inputs.values())

        def run_device(self, _tensors: Sequence[np.ndarray]) -> None:
            raise ValueError("a tensor has more than 2147483647 elements; make smaller batches")

    arm = module_arm(Refusing(), {"ids": np.zeros((32, 512))})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"a call of ids 32x512 cannot run: .*make smaller batches"):
        arm()
