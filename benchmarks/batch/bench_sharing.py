"""What cells share: candidates of a plan beside those of single tunes, and its artifacts beside theirs.

    python -m benchmarks.batch.bench_sharing [--models bert-tiny ...] [--shape input_ids=1x64] [--target llvm]
        [--trials 32] [--seconds 10] [--out FILE]

A plan of all models, and a tune of each alone with a database of its own, as many candidates for each as the plan may
give to a cell that shares nothing. Then each pair of artifacts is timed alternately (`relaxtune.pipeline.gate`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import relaxtune
from benchmarks.gpu_arms.results import machine
from relaxtune.pipeline.batch import tasks
from relaxtune.pipeline.batch.driver import run_batch
from relaxtune.pipeline.batch.plan import parse_plan
from relaxtune.pipeline.cli.options import parse_shapes
from relaxtune.pipeline.gate.gate import GateLimits, run_gate
from relaxtune.pipeline.gate.latency import LatencyLimit
from relaxtune.pipeline.tuning.options import LEVELS, Effort

MODELS = ("bert-tiny", "bert-tiny-4-layers", "bert-tiny-6-layers", "gpt2-tiny", "gpt2-tiny-4-layers")


def main() -> None:
    """Tune both ways, time both artifacts, and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--shape", default="input_ids=1x64")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="Of timing, for each pair of artifacts.")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    # A cell that shares nothing has the candidates of the effort.
    tasks.LEVELS = {**LEVELS, Effort.QUICK: replace(LEVELS[Effort.QUICK], trials=arguments.trials)}  # type: ignore
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        plan = parse_plan(
            folder / "shared.toml",
            f'effort = "quick"\nsamples = 1\n[[cells]]\nmodels = {arguments.models}\n'
            f'shapes = ["{arguments.shape}"]\ntargets = ["{arguments.target}"]\n',
        )
        began = time.monotonic()
        result = run_batch(plan)
        document: dict[str, object] = {
            "machine": machine(),
            "plan": {
                "accepted": result.accepted,
                "candidates": sum(one.candidates for one in result.tuning),
                "tasks": sum(len(one.tasks) for one in result.tuning),
                "seconds": time.monotonic() - began,
            },
        }
        limit = GateLimits(LatencyLimit(0.02, seconds=arguments.seconds))
        alone = []
        for cell in result.cells:
            began = time.monotonic()
            out = folder / "alone" / cell.cell.name
            tuned = relaxtune.tune(
                cell.cell.source, out, database=folder / f"{cell.cell.name}.db", effort="quick", samples=1,
                trials=arguments.trials, shapes=parse_shapes([arguments.shape]), target=arguments.target,
            )  # fmt: skip
            seconds = time.monotonic() - began
            found = run_gate(Path(str(cell.facts.artifact)), out, limit).latencies[""]
            alone.append(
                {
                    "cell": cell.cell.name,
                    "candidates": tuned.summary.candidates,
                    "tasks": len(tuned.summary.tasks),
                    "seconds": seconds,
                    "alone_ms": found.baseline.median_ms,
                    "of_plan_ms": found.new.median_ms,
                    "slowdown": found.slowdown,
                    "bounds": [found.least, found.most],
                    "verdict": found.speed.value,
                }
            )
            print(json.dumps(alone[-1]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps({**document, "alone": alone}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
