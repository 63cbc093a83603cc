"""Calls that arrive as planned: latency from the arrival, goodput, cost, and energy from a GPU's counter."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tvm_ffi

from relaxtune.pipeline.bench.energy import Energy, energy_of
from relaxtune.pipeline.bench.open_loop import Arrivals, OpenLoad, OpenLoadReport, render_load, run_open_loop
from relaxtune.pipeline.bench.tables import cost_of_a_million
from relaxtune.pipeline.errors import UsageError


@pytest.mark.parametrize("arrivals", Arrivals)
def test_arrivals_have_the_mean_rate_and_bursts_arrive_at_once(arrivals: Arrivals) -> None:
    planned = OpenLoad(1000, arrivals, seconds=100).planned_s(seed=1)
    assert len(planned) == pytest.approx(100_000, rel=0.03)
    assert (np.diff(planned) >= 0).all()
    assert planned[-1] <= 100
    gaps = np.diff(np.unique(planned))
    bursts = 8 if arrivals is Arrivals.BURSTY else 1
    assert len(planned) == bursts * len(np.unique(planned))
    # Gaps of a Poisson process: mean and deviation are one.
    assert gaps.mean() == pytest.approx(bursts / 1000, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    assert len(OpenLoad(0.01, arrivals, seconds=0.1).planned_s()) == bursts


def test_a_late_call_counts_from_its_arrival() -> None:
    load = OpenLoad(8, Arrivals.BURSTY, seconds=0.05)
    latencies_ms, took_s = run_open_loop([lambda: time.sleep(0.02)], load)
    # Eight at once, one caller: each waits for those before it.
    assert len(latencies_ms) == 8
    assert all(latency >= 20 * number - 0.1 for number, latency in enumerate(latencies_ms, 1))
    assert took_s >= 0.16
    together, _ = run_open_loop([lambda: time.sleep(0.02)] * 8, load)
    assert max(together) < max(latencies_ms)


def test_no_call_begins_before_its_arrival_and_failures_are_raised() -> None:
    load, lock, starts = OpenLoad(200, seconds=0.2), threading.Lock(), []

    def call() -> None:
        with lock:
            starts.append(time.perf_counter())

    began = time.perf_counter()
    latencies_ms, took_s = run_open_loop([call, call], load)
    assert len(starts) == len(latencies_ms) == len(load.planned_s())
    assert all(start - began >= planned for start, planned in zip(sorted(starts), load.planned_s(), strict=True))
    assert took_s >= 0.2
    with pytest.raises(ZeroDivisionError):
        run_open_loop([lambda: 1 / 0], load)


def test_the_report_has_goodput_percentiles_and_cost() -> None:
    load = OpenLoad(10, limit_ms=50, seconds=10, price_per_hour=3.6)
    report = OpenLoadReport(load, 2, tuple(range(1, 101)), 10.0, "batch=1", Energy(10, 500.0))
    assert [report.percentile(share) for share in (50, 90, 99)] == [50, 90, 99]
    assert (report.calls_per_s, report.goodput_per_s, report.keeps_up) == (10, 5, True)
    assert report.cost_of_a_million == pytest.approx(200)  # 0.001 a second, five calls
    data = json.loads(json.dumps(report.to_json()))
    assert data["energy"] == {"watts": 50, "joules_a_call": 5, "seconds": 10, "missing": ""}
    assert (data["p99_ms"], data["goodput_per_s"], data["load"]["arrivals"]) == (99, 5, "poisson")
    shown = dict(render_load(report).rows)
    assert shown["goodput"] == "5.0 calls/s within 50 ms"
    assert shown["a million calls within 50 ms"] == "200 at 3.6 an hour"
    assert shown["energy"] == "50.0 W, 5 J a call"
    assert "overload" not in shown
    late = OpenLoadReport(load, 2, report.latencies_ms, 20.0)
    assert "queue grows" in dict(render_load(late).rows)["overload"]
    assert cost_of_a_million(None, 5) is cost_of_a_million(1, 0) is None


@pytest.mark.parametrize(
    ("values", "said"),
    [({"rate_per_s": 0}, "--rate 0"), ({"limit_ms": -1}, "--slo-ms -1"), ({"seconds": float("inf")}, "--duration inf")],
)
def test_loads_that_are_none_are_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=f"{said}: expected more than 0"):
        OpenLoad(**{"rate_per_s": 1.0, **values})


class FakeNvml:
    """The counter of GPU 3, in millijoules, which grows by 2 J at each look."""

    NVMLError = OSError

    def __init__(self, fails: bool = False) -> None:
        self.millijoules, self.fails = 0, fails

    def nvmlInit(self) -> None:
        if self.fails:
            raise OSError("no driver")

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:
        return f"GPU {number}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return name

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if handle not in ("GPU 3", "GPU-3f"):
            raise OSError(f"not {handle}")
        self.millijoules += 2000
        return self.millijoules


@pytest.mark.parametrize(
    ("visible", "device", "joules", "said"),
    [
        ("", "cuda:3", 2, ""),
        ("1, 3", "cuda:1", 2, ""),
        ("GPU-3f", "cuda:0", 2, ""),
        ("1", "cuda:0", None, "the driver has no counter of energy (not GPU 1)"),
        ("", "cpu", None, "only GPUs"),
    ],
)
def test_energy_is_read_from_the_counter_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str, device: str, joules: float | None, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with energy_of(tvm_ffi.device(device)) as energy:
        time.sleep(0.01)
    assert energy.joules == joules
    assert energy.seconds >= 0.01
    if joules is None:
        assert energy.watts is None
        assert said in energy.text(4)
    else:
        assert energy.watts == joules / energy.seconds
        assert energy.text(4).endswith("W, 0.5 J a call")


def test_energy_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(type="cuda", index=0)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with energy_of(gpu) as energy:
        pass
    assert energy.text(1) == "not measured: nvidia-ml-py is not installed; pip install 'relaxtune[energy]'"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(fails=True))
    with energy_of(gpu) as energy:
        pass
    assert energy.text(1) == "not measured: NVML does not work here (no driver)"
