"""Latencies of a case's arms, taking turns: by the host clock and by CUDA events.

`latencies_ms`, which is what the table quotes, is what a caller waits for: the host clock around one launch and a
synchronise. `device_ms` is what the GPU takes for each of a few launches that follow each other at once, by CUDA
events: the host's cost is hidden where it is smaller. (ONNX Runtime waits inside each launch, so its events hold the
host's wake-up too.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.gpu_arms.arm import DeviceArm
from relaxtune.pipeline.bench.measure import ArmResult, measure

# Launches between two events.
_LAUNCHES = 5


def time_arms(arms: Mapping[str, DeviceArm], *, runs: int, warmup: int) -> dict[str, dict[str, object]]:
    """Return the latencies of every arm: raw values, medians and 95th percentiles, in milliseconds."""
    report = measure({name: arm.run for name, arm in arms.items()}, runs=runs, warmup=warmup)
    device = _device_latencies(arms, runs)
    return {
        result.name: {
            **_summary("", result),
            **_summary("device_", ArmResult(result.name, tuple(device[result.name]))),
        }
        for result in report.arms
    }


def _summary(prefix: str, result: ArmResult) -> dict[str, object]:
    return {
        f"{prefix}median_ms": round(result.median_ms, 6),
        f"{prefix}p95_ms": round(result.quantile(0.95), 6),
        f"{prefix}spread": round(result.spread, 4),
        f"{prefix}latencies_ms": [round(value, 6) for value in result.latencies_ms],
    }


def _device_latencies(arms: Mapping[str, DeviceArm], runs: int) -> dict[str, list[float]]:
    latencies: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(runs):
        for name, arm in arms.items():
            arm.run()
            latencies[name].append(_device_latency(arm))
    return latencies


def _device_latency(arm: DeviceArm) -> float:
    stream = torch.cuda.ExternalStream(arm.stream) if arm.stream else torch.cuda.default_stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    for _ in range(_LAUNCHES):
        arm.launch()
    end.record(stream)
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / _LAUNCHES
