"""A plan of twelve cells on one GPU and on two: cells an hour, candidates a second, and how busy each GPU is.

    python -m benchmarks.batch.bench_batch [--devices 1 2] [--candidates 360] [--cores 16] [--rounds 1] [--target cuda]
        [--models bert-base-2-layers:fp16 ...] [--ways local ray] [--out FILE] [--spans FILE.json.gz]

Each run is a process of its own with a fresh database, pinned to its GPUs (CUDA_VISIBLE_DEVICES) and to so many cores
a GPU. Through Ray, a cluster of one node with these GPUs and cores and a PostgreSQL are started before the clock is.
Idle is the share of the tuning in which a device had nothing to measure, as the driver sees it; `used_share` is what
the measuring processes themselves say they used, the way to and from them left out. `stages` says how often each stage
was done and what it took, in all processes (`relaxtune.pipeline.spans`); `--spans` keeps each one.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.gpu_arms.results import machine
from relaxtune.pipeline.batch.cells import Cell
from relaxtune.pipeline.batch.driver import run_batch
from relaxtune.pipeline.batch.events import BatchEvent, CandidateEvent, CellEvent
from relaxtune.pipeline.batch.executors import ClusterExecutors, LocalExecutors
from relaxtune.pipeline.batch.feed import CellFeed
from relaxtune.pipeline.batch.finishing import FinishedCell
from relaxtune.pipeline.batch.plan import parse_plan
from relaxtune.pipeline.spans import VARIABLE, Span, read_spans, span
from relaxtune.pipeline.tuning.ray.cluster import CPU_RESOURCE
from tests.tuning_db.postgres_server import running_server

MODELS = {
    "bert-base-2-layers:fp16": ("input_ids=1x128", "input_ids=8x128"),
    "gpt2-small-2-layers:fp16": ("input_ids=1x128", "input_ids=8x128"),
    "llama-1b-2-layers:fp16": ("input_ids=1x128", "input_ids=4x128"),
    "vit-base-2-layers:fp16": ("pixel_values=1x3x224x224", "pixel_values=8x3x224x224"),
    "t5-small-2-layers:fp16": ("input_ids=1x128", "input_ids=8x128"),
    "whisper-base-2-layers:fp16": ("decoder_input_ids=1x128", "decoder_input_ids=8x128"),
}


def main() -> None:
    """Run each arm, and print what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--candidates", type=int, default=360)
    parser.add_argument("--cores", type=int, default=16, help="Cores for each GPU.")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=["local", "ray"], default=["local"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--spans", type=Path, help="Keep what every process did, and when.")
    parser.add_argument("--keep", type=Path, help="Copy the last local run's database here.")
    parser.add_argument("--arm", action="store_true", help="Be one run (used by the script itself).")
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(run_arm(arguments)))
        return
    runs = []
    logs = []
    for _ in range(arguments.rounds):
        for count, way in itertools.product(arguments.devices, arguments.ways):
            result, spans = start_arm(arguments, count, way)
            used = used_share(spans, count * float(result.get("tuning_s") or 0.0))  # type: ignore[arg-type]
            runs.append({"devices": count, "way": way, **result, "used_share": used, "stages": summarise(spans)})
            told = {key: value for key, value in runs[-1].items() if key not in ("cells", "moments", "stages")}
            print(json.dumps(told), flush=True)
            if arguments.out:
                document = {"machine": machine(), "plan": plan_text(arguments), "runs": runs}
                arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            if arguments.spans:
                logs.append([vars(one) for one in spans])
                arguments.spans.write_bytes(gzip.compress(json.dumps(logs).encode()))


def used_share(spans: Sequence[Span], devices_s: float) -> float | None:
    """Return the share of the tuning in which devices checked, timed or computed references, as they told it."""
    stages = (": measure", ": reference", ": final")
    used = sum(one.seconds for one in spans if one.stage.endswith(stages))
    return used / devices_s if devices_s else None


def summarise(spans: Sequence[Span]) -> dict[str, dict[str, float]]:
    """Return of each stage how often it was done, and the seconds it took; its first and last moment in the run."""
    stages: dict[str, list[Span]] = {}
    for one in spans:
        stages.setdefault(one.stage, []).append(one)
    began = min((one.began_s for one in spans), default=0.0)
    return {
        name: {
            "count": len(found),
            "seconds": round(sum(one.seconds for one in found), 3),
            "cpu_s": round(sum(one.cpu_s or 0.0 for one in found), 3),
            "median_ms": round(1e3 * statistics.median(one.seconds for one in found), 2),
            "greatest_ms": round(1e3 * max(one.seconds for one in found), 2),
            "first_s": round(min(one.began_s for one in found) - began, 2),
            "last_s": round(max(one.ended_s for one in found) - began, 2),
        }
        for name, found in sorted(stages.items())
    }


def start_arm(arguments: argparse.Namespace, count: int, way: str) -> tuple[dict[str, object], list[Span]]:
    """Run the plan in a process that sees so many GPUs and cores; return what it printed, and its spans."""
    cores = sorted(os.sched_getaffinity(0))[: count * arguments.cores]
    command = [sys.executable, "-m", "benchmarks.batch.bench_batch", "--arm", "--target", arguments.target]
    command += ["--candidates", str(arguments.candidates), "--models", *arguments.models]
    command += ["--ways", way, "--devices", str(count)]
    command += ["--keep", str(arguments.keep)] if arguments.keep else []
    visible = ",".join(str(index) for index in range(count))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "spans"
        log.touch()
        process = subprocess.run(
            ["taskset", "-c", ",".join(map(str, cores)), *command],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": visible, VARIABLE: str(log)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        spans = read_spans(log)
    lines = process.stdout.splitlines()
    found = json.loads(lines[-1]) if process.returncode == 0 else {"failed": process.returncode, "said": lines[-5:]}
    return found, spans


def plan_text(arguments: argparse.Namespace, database: str = "relaxtune.db") -> str:
    """Return the plan."""
    shapes = {model: list(MODELS.get(model, ("",))) for model in arguments.models}
    cells = "".join(f"[[cells]]\nmodels = [{model!r}]\nshapes = {own}\n" for model, own in shapes.items())
    return (
        f'name = "twelve"\ndatabase = "{database}"\neffort = "quick"\nsamples = 1\n'
        f"[budget]\ncandidates = {arguments.candidates}\n"
        f'[defaults]\ntargets = ["{arguments.target}"]\n{cells}'
    )


@contextmanager
def one_node(arguments: argparse.Namespace) -> Iterator[str]:
    """Start Ray on this process's cores and GPUs; give its address."""
    import ray

    # As docs/batch.md starts nodes: Ray's own is 15, and the driver is at 0.
    os.environ.setdefault("RAY_worker_niceness", "0")
    gpus = arguments.devices[0] if arguments.target.startswith("cuda") else 0
    resources = {} if gpus else {CPU_RESOURCE: 1}
    started = ray.init(
        "local",
        num_cpus=len(os.sched_getaffinity(0)),
        num_gpus=gpus,
        resources=resources,
        include_dashboard=False,
        namespace="relaxtune",
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        yield started.address_info["address"]
    finally:
        ray.shutdown()


def run_arm(arguments: argparse.Namespace) -> dict[str, object]:
    """Carry the plan out in this process."""
    executors = LocalExecutors if arguments.ways == ["local"] else ClusterExecutors
    busy: dict[str, float] = {}
    moments: list[tuple[float, str, str]] = []
    tuned: list[float] = []
    machine_of = executors.machine

    @contextmanager
    def watched(self, *asked):  # type: ignore[no-untyped-def]
        with machine_of(self, *asked) as machine:
            yield machine
            busy.update(machine.backend.busy_s)

    def told(event: BatchEvent) -> None:
        if isinstance(event, CellEvent):
            moments.append((time.monotonic() - began, event.cell.name, event.state.value))
        elif isinstance(event, CandidateEvent):
            tuned.append(time.monotonic() - began)

    over = CellFeed._over
    stages: dict[str, dict[str, float]] = {}

    def noted(self: CellFeed, cell: Cell, found: FinishedCell) -> None:
        stages[cell.name] = {name: round(seconds, 2) for name, seconds in found.stage_s.items()}
        over(self, cell, found)

    executors.machine = watched  # type: ignore[method-assign]
    CellFeed._over = noted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        database, cluster = "relaxtune.db", None
        if executors is ClusterExecutors:
            database, cluster = stack.enter_context(running_server()), stack.enter_context(one_node(arguments))
        plan = parse_plan(Path(folder) / "twelve.toml", plan_text(arguments, database))
        began = time.monotonic()
        with span("run"):
            result = run_batch(plan, on_event=told, cluster=cluster)
        seconds = time.monotonic() - began
        if arguments.keep and cluster is None:
            shutil.copy(Path(folder) / "relaxtune.db", arguments.keep)
    candidates = sum(one.candidates for one in result.tuning)
    tuning_s = sum(one.seconds for one in result.tuning)
    return {
        "accepted": result.accepted,
        "seconds": seconds,
        "cells_per_hour": 3600 * result.accepted / seconds,
        "candidates": candidates,
        "tuning_s": tuning_s,
        "driver_cpu_s": resource.getrusage(resource.RUSAGE_SELF).ru_utime,
        "candidates_per_s": candidates / tuning_s if tuning_s else None,
        "idle_share": {name: 1 - one / tuning_s for name, one in busy.items()},
        "first_candidate_s": min(tuned, default=None),
        "last_candidate_s": max(tuned, default=None),
        "seconds_by_phase": [dict(one.seconds_by_phase) for one in result.tuning],
        "tasks": sum(len(one.tasks) for one in result.tuning),
        "finishing_s": stages,
        "moments": [(round(at, 1), name, state) for at, name, state in moments],
        "cells": [
            (
                one.cell.name,
                one.state.value,
                one.facts.untuned_ms,
                one.facts.shipped_ms,
                one.facts.seconds,
                one.facts.error,
            )
            for one in result.cells
        ],
    }


if __name__ == "__main__":
    main()
