"""Compiled zoo models beside ONNX Runtime on this CPU: same inputs, same threads, taking turns in one run.

    python -m benchmarks.whole_models.bench_cpu [MODEL ...] [--db URL] [--runs 30] [--disable-pass NAME]

Without --db every kernel takes the fallback schedule: what a user gets untuned. After the whole model each of its
kernels is timed alone, calls of ten copies of its arguments in turn, so that weights come from memory as they do in
the model; their rate stands beside what OpenBLAS reaches with the same threads on matrices of 2048. Raw values go to
`benchmarks/results/cpu-MODEL.json` with the machine and the versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from relaxtune.pipeline.bench.measure import ORT_ARM, OWN_ARM
from relaxtune.pipeline.bench.request import BenchRequest
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.codegen.finish import finish_kernels
from relaxtune.pipeline.environment import cpu_name
from relaxtune.pipeline.jobs.artifacts import bench_artifact
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tvm_runtime.threads import configure_threads
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.tuning_db.store import TuningDatabase

RESULTS = Path(__file__).parents[1] / "results"
MODELS = ("bert-tiny", "bert-base", "gpt2-small", "vit-base", "t5-small")
# Of a kernel timed alone: copies of its arguments, within so many bytes, and passes over all of them.
COPIES, COPIES_BYTES_MAX, PASSES = 10, 1 << 30, 8


def main() -> None:
    """Compile, validate and measure each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--db", help="tuning database to take records from")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--disable-pass", action="append", default=[], help="pass to switch off; nothing is written")
    arguments = parser.parse_args()
    for name in arguments.models:
        lowering = LoweringOptions(disabled_passes=frozenset(arguments.disable_pass))
        request = ModelRequest(name, target="llvm", lowering=lowering)
        document = measure_model(request, name, arguments.db, arguments.runs)
        if arguments.disable_pass:
            continue
        RESULTS.mkdir(exist_ok=True)
        tuned = "-tuned" if arguments.db is not None else ""
        (RESULTS / f"cpu-{name}{tuned}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure_model(request: ModelRequest, name: str, url: str | None, runs: int) -> dict[str, Any]:
    """Print how a model and its kernels do, and return the raw values."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / name
        compiled = compile_model(request, directory, database=url)
        if compiled.validation is None or not compiled.validation.passed:
            raise SystemExit(f"{name} failed its validation; nothing was timed")
        report = bench_artifact(directory, None, BenchRequest(runs=runs))[1][""]
    own, ort = report.arm(OWN_ARM), report.arm(ORT_ARM)
    print(
        f"{name}: relaxtune {own.median_ms:.2f} ms (spread {own.spread:.0%}), ONNX Runtime {ort.median_ms:.2f} ms "
        f"(spread {ort.spread:.0%}), relaxtune / ONNX Runtime {own.median_ms / ort.median_ms:.2f}, compiled in "
        f"{sum(compiled.manifest.compile_seconds.values()):.1f} s"
    )
    kernels = time_kernels(prepare_model(request), url)
    library = openblas_gflops()
    print_kernels(kernels, library)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "model": name,
        "tuned": url is not None,
        "versions": dict(compiled.manifest.versions),
        "compile_seconds": dict(compiled.manifest.compile_seconds),
        "report": report.to_json(),
        "openblas_gflops": library,
        "kernels": kernels,
    }


def time_kernels(prepared: PreparedModel, url: str | None) -> list[dict[str, Any]]:
    """Return each kernel's calls, work and latencies, as an artifact has it; those that take most of the time first."""
    database = TuningDatabase.open(url) if url is not None else None
    target = prepared.target.target
    choices = select_kernels(
        prepared.lowered,
        prepared.tasks,
        database=database,
        target=prepared.target,
        environment=prepared.environment,
    )
    by_task = {choice.task: choice for choice in choices if choice.task is not None}
    kernels = []
    for task in prepared.tasks:
        choice = by_task[task.name]
        mod = apply_fallback(task.mod, target)
        if choice.scheduled is not None:
            func = choice.scheduled.with_attr("global_symbol", "main").with_attr(SCHEDULED_ATTR, True)
            mod = tvm.ir.IRModule({"main": func})
        latencies_us = time_function(tvm.compile(finish_kernels(mod, target), target=target)["main"], task.mod["main"])
        kernels.append(
            {
                "name": task.name,
                "family": task.family,
                "route": choice.route.value,
                "calls": task.weight,
                "flops": task.flops,
                "median_us": statistics.median(latencies_us),
                "fastest_us": min(latencies_us),
                "latencies_us": latencies_us,
            }
        )
    if database is not None:
        database.close()
    return sorted(kernels, key=lambda kernel: -kernel["calls"] * kernel["median_us"])


def time_function(main: Any, func: tvm.tirx.PrimFunc) -> list[float]:
    """Return the microseconds of calls on copies of random arguments in turn; integers are 0, a valid index."""
    configure_threads()
    rng = np.random.default_rng(0)
    shapes = [(tuple(map(int, param.shape)), str(param.dtype)) for param in func.params]
    size = sum(int(np.prod(shape)) * tvm.DataType(dtype).bits // 8 for shape, dtype in shapes)
    copies = []
    for _ in range(max(1, min(COPIES, COPIES_BYTES_MAX // max(1, size)))):
        arrays = [
            rng.random(shape, "float32").astype(dtype) if dtype.startswith("float") else np.zeros(shape, dtype)
            for shape, dtype in shapes
        ]
        copies.append([tvm.runtime.tensor(array) for array in arrays])
    latencies_us = []
    for turn in range(PASSES + 1):
        for arguments in copies:
            began = time.perf_counter()
            main(*arguments)
            if turn:
                latencies_us.append((time.perf_counter() - began) * 1e6)
    return latencies_us


def openblas_gflops() -> float:
    """Return the best rate of NumPy's matmul of two float32 matrices of 2048, as many threads as TVM's pool has."""
    a, b = (np.random.default_rng(seed).random((2048, 2048), "float32") for seed in (0, 1))
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        np.matmul(a, b)
        seconds.append(time.perf_counter() - began)
    return float(2 * 2048**3 / min(seconds) / 1e9)


def print_kernels(kernels: list[dict[str, Any]], library: float) -> None:
    """Print the kernels that take a hundredth of the time of all."""
    total = sum(kernel["calls"] * kernel["median_us"] for kernel in kernels)
    print(f"  kernels alone: {total / 1e3:.2f} ms in all; OpenBLAS sgemm {library:.0f} GFLOP/s")
    for kernel in kernels:
        time_us = kernel["calls"] * kernel["median_us"]
        if time_us < 0.01 * total:
            continue
        print(
            f"  {time_us / total:5.1%} {kernel['calls']:3d} x {kernel['median_us']:9.1f} us "
            f"(fastest {kernel['fastest_us']:9.1f}) {kernel['flops'] / kernel['median_us'] / 1e3:6.1f} GFLOP/s "
            f"{kernel['route']:12s} {kernel['name']}"
        )


if __name__ == "__main__":
    main()
