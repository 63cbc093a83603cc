"""Benchmarks as tables for a terminal, what their figures are true for, and what calls cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import tvm

from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import ArmResult, BenchmarkReport
from relaxtune.pipeline.onnx_runtime.process import onnx_runtime
from relaxtune.pipeline.printed_tables import TableView
from relaxtune.pipeline.validate.reference import peer_provider


def cost_of_a_million(price_per_hour: float | None, calls_per_s: float) -> float | None:
    """Return the price of a million calls on a machine of a price; None without a price, or without calls."""
    return None if price_per_hour is None or not calls_per_s else price_per_hour / (calls_per_s * 3600) * 1e6


def run_conditions(module: Module) -> dict[str, str]:
    """Return what the latencies of a module and of ONNX Runtime beside it are true for."""
    threads = str(module.threads)
    left_out = "" if peer_provider(module.manifest.target.kind) else ", not timed: it does not run on this device"
    return {
        "device": str(module.device),
        "target": module.manifest.target.text,
        "tvm": tvm.__version__,
        "tvm_threads": threads,
        "onnxruntime": onnx_runtime().description().version + left_out,
        "onnxruntime_threads": threads,
    }


def render(report: BenchmarkReport) -> TableView:
    """Return the report as a table for a terminal."""
    conditions = ", ".join(f"{name} {value}" for name, value in report.conditions.items())
    runs = f"{report.runs} runs" if report.duration_s is None else f"{report.duration_s:g} s of each arm"
    left_out = "".join(f"; {name} is left out: {why}" for name, why in report.left_out.items())
    warmup = f" after {report.warmup} untimed runs" if report.warmup else ""
    caption = f"{runs}{warmup}; {conditions}{left_out}"
    sizes = f": mean of {len(report.sizes)} sizes" if len(report.sizes) > 1 else " at ".join(["", *report.sizes])
    figures: dict[str, Callable[[ArmResult], str]] = {
        "median": lambda arm: f"{arm.median_ms:.3f}",
        "p90": lambda arm: f"{arm.quantile(0.9):.3f}",
        "p95": lambda arm: f"{arm.quantile(0.95):.3f}",
        "p99": lambda arm: f"{arm.quantile(0.99):.3f}",
        "min": lambda arm: f"{min(arm.latencies_ms):.3f}",
        "calls/s": lambda arm: f"{arm.calls_per_s:.1f}",
        "spread": lambda arm: f"{arm.spread:.0%}",
        "ratio": lambda arm: f"{report.ratio(arm.name):.2f}",
    }
    columns = {"arm": lambda arm: arm.name, **figures}
    optional = ("p95", "min", "p90", "spread")
    return TableView.of(f"latency, ms{sizes}", report.arms, columns, caption, figures.keys(), optional)


def render_sizes(report: BenchmarkReport) -> TableView:
    """Return the median latency of each arm at each size as a table."""
    figures = ("counts", *(arm.name for arm in report.arms), *(f"{arm.name}, ratio" for arm in report.arms[1:]))
    rows = []
    for sizes, count in report.sizes.items():
        medians = [statistics.median(arm.by_sizes[sizes]) for arm in report.arms]
        ratios = [f"{median / medians[0]:.2f}" for median in medians[1:]]
        rows.append((sizes, str(count), *(f"{median:.3f}" for median in medians), *ratios))
    return TableView("latency by sizes, ms", ("sizes", *figures), tuple(rows), right=figures)
