"""How often the gate's latency check is right: one artifact beside itself, with a slowdown planted and without.

    python -m benchmarks.artifacts.bench_gate [--target llvm|cuda] [--comparisons 100] [--planted 3] [--results FILE]

The planted slowdown is a loop on the host behind each run, as long as so many percent of what the run takes when it is
not disturbed. A comparison without one that says "slower" is a false alarm; with one, all that does not say "slower" is
a miss. Both builds are loaded afresh for each block, as the gate does; `--reload-every N` loads them once in N
comparisons instead, for a GPU that is lent by the minute.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import relaxtune
from benchmarks.this_run import run_facts
from relaxtune.models.inputs import unpadded_inputs
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import Arm, measure, module_arm
from relaxtune.pipeline.gate.latency import LatencyComparison, LatencyLimit, Speed, compare_latency
from relaxtune.pipeline.validate.builds import reference_model

RESULTS = Path(__file__).parents[1] / "results"


@dataclass
class Builds:
    """One artifact loaded twice; kept for `reload_every` comparisons, or loaded at each call of `load` (0)."""

    directory: Path
    reload_every: int
    inputs: dict[str, np.ndarray]
    kept: tuple[Arm, Arm] | None = None
    loadings: int = 0

    def load(self) -> tuple[Arm, Arm]:
        """Return both arms."""
        if self.kept is None or not self.reload_every:
            self.kept = None
            first, second = (module_arm(Module.load(self.directory, verify=False), self.inputs) for _ in range(2))
            self.loadings += 1
            self.kept = first, second
        return self.kept


def main() -> None:
    """Compare, print a line a kind and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-tiny")
    parser.add_argument("--shape", default="1x32", help="of every input")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--comparisons", type=int, default=100, help="of each kind")
    parser.add_argument("--planted", type=float, default=3.0, help="percent")
    parser.add_argument("--max-slowdown", type=float, default=2.0, help="percent: the gate's limit")
    parser.add_argument("--seconds", type=float, default=60.0, help="what one comparison may take")
    parser.add_argument("--reload-every", type=int, default=0, help="comparisons; 0: at each block")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no comparison begins")
    parser.add_argument("--results", type=Path, default=None)
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        sizes = tuple(map(int, asked.shape.split("x")))
        names = [spec.name for spec in relaxtune.load_model(asked.model).inputs]
        relaxtune.compile(
            asked.model, place, target=asked.target, shapes=dict.fromkeys(names, sizes), precision=asked.precision,
            samples=1,
        )  # fmt: skip
        module = Module.load(place)
        builds = Builds(place, asked.reload_every, unpadded_inputs(reference_model(module), seed=0))
        del module
        limit = LatencyLimit(asked.max_slowdown / 100, seconds=asked.seconds)
        kinds = {"equal": 0.0, "planted": asked.planted / 100}
        found: dict[str, list[LatencyComparison]] = {kind: [] for kind in kinds}
        loads = [os.getloadavg()[0]]
        for number in range(asked.comparisons):
            for kind, share in kinds.items():
                if time.monotonic() - began > asked.limit:
                    break
                if asked.reload_every and number % asked.reload_every == 0 and kind == "equal":
                    builds.kept = None
                found[kind].append(compare_latency(_planted(builds, share), limit))
            loads.append(os.getloadavg()[0])
    document = {
        "command": "python -m benchmarks.artifacts.bench_gate",
        "options": {name: str(value) for name, value in vars(asked).items() if name != "results"},
        "machine": run_facts(asked.target, loads),
        "loadings": builds.loadings,
        "kinds": {kind: _summary(every, kinds[kind]) for kind, every in found.items()},
    }
    for kind, every in found.items():
        counts = Counter(one.speed.value for one in every)
        print(kind, dict(counts), f"median {np.median([one.seconds for one in every]):.2f} s", flush=True)
    name = "h200-gate.json" if "cuda" in asked.target else "cpu-gate.json"
    (asked.results or RESULTS / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _planted(builds: Builds, share: float) -> Callable[[], tuple[Arm, Arm]]:
    """Return a loader of both arms; the second arm takes so much longer."""

    def load() -> tuple[Arm, Arm]:
        first, second = builds.load()
        if not share:
            return first, second
        quiet = measure({"arm": first}, runs=20, warmup=3).arm("arm").latencies_ms
        extra_ns = int(share * 1e6 * float(np.quantile(quiet, 0.25)))

        def slower() -> None:
            second()
            end = time.perf_counter_ns() + extra_ns
            while time.perf_counter_ns() < end:
                pass

        return first, slower

    return load


def _summary(every: list[LatencyComparison], planted: float) -> dict[str, object]:
    counts = Counter(one.speed for one in every)
    seconds = [one.seconds for one in every]
    known = [one.detectable for one in every if one.detectable is not None]
    return {
        "planted": planted,
        "comparisons": len(every),
        "verdicts": {speed.value: counts[speed] for speed in Speed},
        "median_slowdown": float(np.median([one.slowdown for one in every])),
        "covered_by_bounds": sum(
            one.least is not None and one.most is not None and one.least <= planted <= one.most for one in every
        ),
        "median_detectable": float(np.median(known)) if known else None,
        "seconds": {"median": float(np.median(seconds)), "max": max(seconds), "total": sum(seconds)},
        "median_runs": float(np.median([one.runs for one in every])),
        "median_ms": float(np.median([one.baseline.median_ms for one in every])),
        "slowdowns": [round(one.slowdown, 5) for one in every],
        "looks": [one.looks for one in every],
    }


if __name__ == "__main__":
    main()
