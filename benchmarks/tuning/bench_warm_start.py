"""What records of a near shape are worth: a model tuned cold, and after the same model with another sequence length.

    python -m benchmarks.tuning.bench_warm_start [--model bert-base] [--layers N] [--from 1x128] [--to 1x384]
        [--precision fp16] [--target auto] [--trials 600] [--seeds 1] [--routes metaschedule,template] [--out FILE]

For each seed: `to` is tuned in an empty database (cold); `from` in another, then `to` in that one (warm), then `to`
there once more (again). The latency of the model is the sum over its kernels of calls times the best latency known;
after each candidate it is a little less. `needed` is how many candidates an arm takes to come within 5 % of what the
cold one ends with. `again` should measure nothing. Without the route `template` the model is lowered without the passes
whose kernels only templates make, so that all of its kernels are searched.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onnx

from relaxtune.models.zoo.bert import build_bert
from relaxtune.models.zoo.graph import Precision
from relaxtune.models.zoo.presets import DEFAULT_DIMS, get_preset
from relaxtune.pipeline.artifact.export import versions
from relaxtune.pipeline.choose.record_lookup import still_true_in
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tuning.options import TuningOptions, TuningSummary
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.pipeline.tuning.session import tune
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.store import TuningDatabase

WITHIN = 0.95


class Trajectory:
    """Every candidate's task and the best latency of that task after it."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float | None]] = []

    def __call__(self, event: ProgressEvent) -> None:
        """Keep what is told."""
        self.steps.append((event.task, event.best_us))


def model_latencies(
    prepared: PreparedModel, summary: TuningSummary, steps: Sequence[tuple[str, float | None]]
) -> list[float]:
    """Return the model's latency in microseconds before the first candidate and after each."""
    calls = {task.name: task.weight for task in prepared.tasks}
    best = {task.task.name: task.before_us for task in summary.tasks if task.before_us is not None}
    latencies = [sum(calls[name] * us for name, us in best.items())]
    for name, us in steps:
        if us is not None and name in best:
            best[name] = min(best[name], us)
        latencies.append(sum(calls[name] * us for name, us in best.items()))
    return latencies


def tuned(prepared: PreparedModel, url: str, options: TuningOptions) -> dict[str, Any]:
    """Tune and return the trajectory and the figures of one arm."""
    trajectory = Trajectory()
    began = time.perf_counter()
    with TuningDatabase.open(url) as database:
        summary = tune(
            prepared.tasks,
            target=prepared.target,
            database=database,
            environment=prepared.environment,
            still_true=still_true_in(database, prepared.target, prepared.environment),
            options=options,
            progress=trajectory,
        )
    seconds = time.perf_counter() - began
    latencies = model_latencies(prepared, summary, trajectory.steps)
    return {"candidates": summary.candidates, "seconds": seconds, "model_us": latencies, "best": trajectory.steps}


def needed(latencies: Sequence[float], goal_us: float) -> int | None:
    """Return after how many candidates the goal is reached, None for never."""
    return next((count for count, us in enumerate(latencies) if us <= goal_us), None)


def source_of(arguments: argparse.Namespace, directory: str) -> str | Path:
    """Return the model's name, or where it was written with fewer layers and a short vocabulary."""
    if arguments.layers is None:
        return str(arguments.model)
    config = dataclasses.replace(get_preset(arguments.model).config, layers=arguments.layers, vocab=1024)
    dims = {axis: DEFAULT_DIMS[axis] for axis in ("batch", "sequence")}
    path = Path(directory) / f"{arguments.model}.onnx"
    onnx.save(build_bert(arguments.model, config, dims, Precision.FP32, 0), path)
    return path


def prepared_for(arguments: argparse.Namespace, source: str | Path, shape: str) -> PreparedModel:
    sizes = tuple(int(size) for size in shape.split("x"))
    lowering = LoweringOptions(precision=arguments.precision)
    shapes = {name: sizes for name in arguments.inputs}
    routes = routes_of(arguments)
    return prepare_model(ModelRequest(source, shapes=shapes, target=arguments.target, lowering=lowering, routes=routes))


def routes_of(arguments: argparse.Namespace) -> frozenset[Route]:
    return frozenset(Route(name) for name in arguments.routes.split(","))


def run_seed(arguments: argparse.Namespace, seed: int, near: PreparedModel, goal: PreparedModel) -> dict[str, Any]:
    options = TuningOptions(trials=arguments.trials, seed=seed, routes=routes_of(arguments))
    with tempfile.TemporaryDirectory(prefix="warm-start-") as directory:
        cold = tuned(goal, f"{directory}/cold.db", options)
        donor = tuned(near, f"{directory}/warm.db", options)
        warm = tuned(goal, f"{directory}/warm.db", options)
        again = tuned(goal, f"{directory}/warm.db", options)
    optimum = cold["model_us"][-1]
    cold["needed"], warm["needed"] = (needed(arm["model_us"], optimum / WITHIN) for arm in (cold, warm))
    print(
        f"seed {seed}: cold {cold['model_us'][0]:.0f} -> {optimum:.0f} us, {cold['needed']} of {cold['candidates']} "
        f"candidates to within 5 %; warm ends at {warm['model_us'][-1]:.0f} us, {warm['needed']} of "
        f"{warm['candidates']}; again {again['candidates']} candidates in {again['seconds']:.1f} s"
    )
    return {"seed": seed, "cold": cold, "from": donor, "warm": warm, "again": again}


def main() -> None:
    """Run every seed, print the figures, keep the raw values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--layers", type=int, help="of a BERT, instead of the model's own number")
    parser.add_argument("--inputs", nargs="+", default=["input_ids", "attention_mask", "token_type_ids"])
    parser.add_argument("--from", dest="near", default="1x128")
    parser.add_argument("--to", default="1x384")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--target", default="auto")
    parser.add_argument("--trials", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--routes", default="metaschedule,template", help="who offers candidates")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/warm-start.json"))
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="warm-start-") as directory:
        source = source_of(arguments, directory)
        near, goal = (prepared_for(arguments, source, shape) for shape in (arguments.near, arguments.to))
    document: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": goal.environment.device_name,
        "driver": goal.environment.driver,
        "versions": versions(),
        "asked": {key: str(value) for key, value in vars(arguments).items() if key != "out"},
        "seeds": [],
    }
    for seed in range(arguments.seeds):
        document["seeds"].append(run_seed(arguments, seed, near, goal))
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    pairs = [(run["cold"]["needed"], run["warm"]["needed"]) for run in document["seeds"]]
    reached = [(cold, warm) for cold, warm in pairs if cold is not None and warm is not None]
    print(f"{len(reached)} of {len(pairs)} seeds came within 5 % with both")
    if reached:
        cold, warm = (statistics.median(values) for values in zip(*reached, strict=True))
        print(f"median candidates needed: cold {cold:g}, warm {warm:g} ({warm / cold if cold else 0:.2f} of it)")


if __name__ == "__main__":
    main()
