"""How long `relaxtune tune` takes after the last candidate, stage by stage.

    python -m benchmarks.tuning.bench_after_search --model bert-large --shape input_ids=1x128 [--target llvm] [--runs 1]
                                            [--results FILE]

The search is left out: the "tuned" model is the untuned one with one kernel made in another way, so that both are
compiled, loaded and timed, as where a search has found something. Each run is a process
of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from relaxtune.pipeline.artifact.export import versions
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.jobs.compile_and_tune import finish_tuned
from relaxtune.pipeline.jobs.tuned_model import TunedModel, untuned_kernels
from relaxtune.pipeline.jobs.values import TuneRequest
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model, timed_stages
from relaxtune.pipeline.tuning.options import TuningSummary
from relaxtune.schedules.marks import SCHEDULED_ATTR, as_scheduled
from relaxtune.schedules.registry import apply_decision, list_candidates
from relaxtune.tuning_db.store import TuningDatabase

RESULTS = Path(__file__).parents[1] / "results" / "after-search.json"


def main() -> None:
    """Measure runs, each in a process of its own, and write them."""
    asked = _parse()
    if asked.one:
        print(json.dumps(one_run(asked)))
        return
    command = [sys.executable, "-m", "benchmarks.tuning.bench_after_search", *sys.argv[1:], "--one"]
    runs = [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        for _ in range(asked.runs)
    ]
    conditions = {
        "command": " ".join(["python -m benchmarks.tuning.bench_after_search", *sys.argv[1:]]),
        "commit": asked.commit,
        "machine": {"device": runs[0]["device"], "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()},
        "versions": versions(),
    }
    asked.results.write_text(json.dumps({**conditions, "runs": runs}, indent=1) + "\n")
    for run in runs:
        print(f"{run['seconds']:.1f} s at load {run['load'][0]:.1f}:", run["stage_s"], run["verdict"])


def one_run(asked: argparse.Namespace) -> dict[str, object]:
    """Return the seconds of each stage that follows the search, and of all of them."""
    shapes = {name: tuple(int(size) for size in sizes.split("x")) for name, sizes in asked.shape}
    prepared = prepare_model(ModelRequest(asked.model, shapes, asked.target))
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder, TuningDatabase.open("sqlite://") as database:
        job = database.start_job(model=asked.model, model_sha256="0" * 64, target=target_key(prepared.target))
        nothing = TuningSummary((), 0.0, {}, interrupted=False)
        tuned = TunedModel(job.id, nothing, prepared, _one_made_otherwise(prepared))
        began = time.monotonic()
        with timed_stages() as stage_s:
            result = finish_tuned(prepared, tuned, TuneRequest("unused.db"), database, Path(folder) / "artifact")
        seconds = time.monotonic() - began
    assert result.shipping is not None
    return {
        "device": prepared.environment.device_name,
        "load": load,
        "seconds": seconds,
        "stage_s": {name: round(value, 2) for name, value in stage_s.items()},
        "timed_runs": result.shipping.report.runs,
        "arms": {arm.name: arm.median_ms for arm in result.shipping.report.arms},
        "verdict": result.shipping.verdict,
        "validated": result.compiled.validation is not None and result.compiled.validation.passed,
    }


def _one_made_otherwise(prepared: PreparedModel) -> tuple[KernelChoice, ...]:
    """Return the untuned kernels, one of them changed: a template's second candidate, else the least as plain loops."""
    choices, mod, target = list(untuned_kernels(prepared)), prepared.lowered.mod, prepared.target
    for number, choice in enumerate(choices):
        candidates = list_candidates(mod[choice.function], target)[0] if choice.decision is not None else ()
        if len(candidates) > 1:
            decision = candidates[1].to_json()
            made = as_scheduled(apply_decision(mod[choice.function], target, decision))
            choices[number] = replace(choice, decision=decision, scheduled=made)
            return tuple(choices)
    least = min(prepared.tasks, key=lambda task: task.flops or 0).name
    number = next(number for number, choice in enumerate(choices) if choice.task == least)
    plain = mod[choices[number].function].with_attr(SCHEDULED_ATTR, True)
    choices[number] = replace(choices[number], scheduled=plain)
    return tuple(choices)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-large")
    parser.add_argument("--shape", type=lambda text: text.split("="), action="append", default=[])
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the artifact is written; default: the system's place")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.commit:
        told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        asked.commit = told.stdout.strip()
    return asked


if __name__ == "__main__":
    main()
